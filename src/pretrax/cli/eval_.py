"""Evaluate models on tasks, with standard errors.

A model is a run, one of its checkpoints, or a Hugging Face directory. The tasks need no network.
"""

import dataclasses
from typing import TYPE_CHECKING

from pretrax.cli._arguments import Dtype, Plugins, load_plugins, numbers
from pretrax.errors import UserError
from pretrax.option import argument, option
from pretrax.weights.loaded import check_dtype

if TYPE_CHECKING:
    from pretrax.weights.evaluated import Reading


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    models: tuple[str, ...] = argument(
        'runs/NAME, a checkpoint in it, or a Hugging Face directory.', default=(), metavar='MODEL...'
    )
    tasks: str | None = option('Names of tasks. [default: all, without --text; see --list]', metavar='A,B')
    text: tuple[str, ...] = option(
        'Bits per byte of a text of yours; may be repeated.', default=(), metavar='NAME=FILE'
    )
    limit: int = option('Documents of each kind.', default=50, min=1)
    seed: int = option('Seed of the choice of documents.', default=0)
    lengths: str | None = option(
        'Lengths of the texts of copying and retrieval. [default: 8,32,128, if they fit]', metavar='N,M'
    )
    batch_tokens: int = option('Tokens in a batch on each device.', default=4096, min=1)
    max_length: int | None = option(
        "Most tokens read at once. [default: an import's own length, or that in training]", metavar='N', min=2
    )
    dtype: Dtype = None
    all_checkpoints: bool = option('A column for each checkpoint.', default=False)
    follow: bool = option('Evaluate each checkpoint of a run when it is saved, to the last step.', default=False)
    json: str | None = option('Also write the results to a file.', metavar='FILE')
    harness: str | None = option('Tasks of lm-evaluation-harness, instead of --tasks.', metavar='A,B')
    harness_tasks: str | None = option(
        'A directory with task files for --harness. Python functions that they name are run.', metavar='DIR'
    )
    list_: bool = option('Show the tasks.', '--list', default=False)
    plugin: Plugins = ()


def eval_(options: Options) -> int:
    from pretrax.cli._output import write_output
    from pretrax.evaluate.results import TASKS, as_json, table_rows
    from pretrax.evaluate.task import Settings, choose
    from pretrax.evaluate.text_tasks import own_texts
    from pretrax.view.tables import text_table
    from pretrax.weights.evaluated import Reading, evaluate_models, follow

    if options.list_:
        for task in TASKS.values():
            print(f'{task.name:16} {task.description}')
        return 0
    if not options.models:
        raise UserError('give a model: pretrax eval runs/NAME')
    check_dtype(options.dtype)
    reading = Reading(options.batch_tokens, options.max_length, options.dtype)
    if options.harness is not None:
        _evaluate_with_harness(options, options.harness, reading)
        return 0
    if options.harness_tasks is not None:
        raise UserError('--harness-tasks has files for --harness\ngive the tasks too: --harness NAME')
    own = own_texts(options.text)
    names = list(own or TASKS)
    if options.tasks is not None:
        names = [*(name.strip() for name in options.tasks.split(',')), *own]
    tasks = choose(names, {**TASKS, **own})
    lengths = None if options.lengths is None else numbers('--lengths', options.lengths, 'numbers of words or lines')
    settings = Settings(limit=options.limit, seed=options.seed, lengths=lengths)
    load_plugins(options.plugin)
    results = {}
    if options.follow:
        run, *others = options.models
        if others or options.all_checkpoints:
            raise UserError('--follow evaluates the checkpoints of one run\ngive one run, without --all-checkpoints')
        for name, _, result in follow(run, tasks, settings, reading=reading):
            results[name] = result
            print('\n'.join(text_table(table_rows({name: result}), left=(0, 1), drop=('documents',))), flush=True)
            if options.json is not None:
                write_output(options.json, as_json(results, settings) + '\n')
    else:
        results = evaluate_models(
            options.models, tasks, settings, reading=reading, all_checkpoints=options.all_checkpoints
        )
        if options.json is not None:
            write_output(options.json, as_json(results, settings) + '\n')
        print('\n'.join(text_table(table_rows(results), left=(0, 1), drop=('documents',))))
    return int(any(one.failed for one in results.values()))


def _evaluate_with_harness(options: Options, tasks: str, reading: 'Reading') -> None:
    import json

    from pretrax.cli._output import write_output
    from pretrax.evaluate.task import Settings
    from pretrax.weights.evaluated import evaluate_with_harness

    if options.follow:
        raise UserError('--follow evaluates on --tasks, not on --harness\nleave one of them out')
    if options.tasks is not None or options.lengths is not None or options.text:
        raise UserError('--harness has tasks of its own\nleave out --tasks, --text and --lengths')
    load_plugins(options.plugin)
    settings = Settings(limit=options.limit, seed=options.seed)
    directory, every = options.harness_tasks, options.all_checkpoints
    results = evaluate_with_harness(options.models, tasks, directory, settings, reading, every)
    if options.json is not None:
        write_output(options.json, json.dumps({'results': results}, indent=1, default=str) + '\n')
