"""Evaluates the models of runs, checkpoints and Hugging Face directories on tasks, one after another."""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pretrax.errors import UserError, warn
from pretrax.evaluate.language_model import LanguageModel
from pretrax.evaluate.results import Results, run_task, run_tasks
from pretrax.evaluate.task import Settings, Task
from pretrax.observe.metrics import EVALUATIONS, append_evaluation, read_metrics
from pretrax.storage import AnyPath, locate
from pretrax.system.software import need_extra

if TYPE_CHECKING:
    from pretrax.weights.trained import Trained

_WAIT = 5.0  # seconds between two looks for checkpoints


class Reading(NamedTuple):
    """How models read texts."""

    batch_tokens: int  # in a batch on each device
    max_length: int | None = None  # tokens that are read at once; None: `Trained.length`
    dtype: str | None = None  # as in `open_trained`


def evaluate_models(
    paths: Sequence[str], tasks: Sequence[Task], settings: Settings, *, reading: Reading, all_checkpoints: bool
) -> dict[str, Results]:
    """{model: its results}.

    Raises:
        UserError: there is no such model, it has no tokenizer, or its only task cannot run on it.
    """
    found: dict[str, Results] = {}
    for path in paths:
        for name, model in models_at(path, reading, all_checkpoints):
            print(f'{name}: {", ".join(task.name for task in tasks)}', file=sys.stderr, flush=True)
            if len(tasks) == 1:  # the error is that of the command
                found[name] = Results({tasks[0].name: run_task(model, tasks[0], settings, warn)})
            else:
                found[name] = run_tasks(model, tasks, settings, warn)
    return found


def evaluate_with_harness(
    paths: Sequence[str], tasks: str, directory: str | None, settings: Settings, reading: Reading, all_checkpoints: bool
) -> dict[str, Any]:
    """{model: what lm-evaluation-harness returns for its tasks}. Prints a table for each model.

    Raises:
        UserError: the extra is not installed, there is no such model or task, or its data cannot be loaded.
    """
    need_extra('harness', '--harness', 'lm_eval')
    from lm_eval.utils import make_table

    from pretrax.evaluate.harness import evaluate, open_tasks

    if directory is not None and not Path(directory).is_dir():
        raise UserError(f'--harness-tasks {directory}: there is no such directory')
    names = [name.strip() for name in tasks.split(',')]
    manager = open_tasks(names, directory)
    found = {}
    for path in paths:
        for name, model in models_at(path, reading, all_checkpoints):
            print(f'{name}: {", ".join(names)}', file=sys.stderr, flush=True)
            found[name] = evaluate(model, names, manager, limit=settings.limit, seed=settings.seed)
            print(f'{name}\n\n{make_table(found[name])}', flush=True)
    return found


def models_at(path: str, reading: Reading, all_checkpoints: bool) -> Iterator[tuple[str, LanguageModel]]:
    """(name, model) of a run, a checkpoint or a Hugging Face directory, or of all checkpoints of a run."""
    from pretrax.checkpoint import is_checkpoint, steps_in
    from pretrax.weights.imported import run_of
    from pretrax.weights.trained import open_trained

    with run_of(path) as run_path:
        trained = open_trained(run_path, dtype=reading.dtype)
        run_name = trained.run_dir.name
        steps = [trained.step]
        if all_checkpoints:
            if is_checkpoint(locate(run_path)):
                raise UserError(f'--all-checkpoints: {path} is one checkpoint\n  give its run')
            steps = steps_in(trained.directory)
        model = None
        for step in steps:
            weights = trained.at(step).weights()
            model = _used(model, trained, weights, reading)
            yield (run_name if run_path != path else f'{run_name}@{step}'), model


def _used(model: LanguageModel | None, trained: 'Trained', weights: Any, reading: Reading) -> LanguageModel:
    """The language model with other weights; None: a new one."""
    if model is not None:
        model.use(weights)
        return model
    run = trained.run
    warn(f'{trained.run_dir.name}: computes in {run.compute}')
    return LanguageModel(
        run.recipe.model,
        weights,
        getattr(run.source, 'tokenizer', None),
        length=reading.max_length or trained.length,
        end=trained.end_tokens,
        batch_tokens=reading.batch_tokens,
    )


def follow(
    path: str, tasks: Sequence[Task], settings: Settings, *, reading: Reading
) -> Iterator[tuple[str, int, Results]]:
    """(run@step, step, results) of each checkpoint of a run, until that of its last step.

    Checkpoints that `evaluations.jsonl` in the run directory has are left out, and the results are appended to it.

    Raises:
        UserError: there is no such run, or it has no tokenizer.
    """
    from pretrax.checkpoint import is_checkpoint, read_description, steps_in
    from pretrax.weights.trained import open_trained

    place = locate(path)
    if is_checkpoint(place) or (place / 'config.json').is_file():
        raise UserError(f'--follow: {path} is not a run\n  give the directory of a run, such as runs/NAME')
    if not place.is_dir():
        raise UserError(f'{path}: no such run\n  start the training first')
    directory = place if place.name == 'checkpoints' else place / 'checkpoints'
    run_dir, model, last, is_said = directory.parent, None, math.inf, False
    done = _evaluated_steps(run_dir, tasks)
    if saved := steps_in(directory):
        last = read_description(directory, saved[-1])['config']['steps']
    while last not in done:
        new = [step for step in steps_in(directory) if step not in done]
        for step in new:
            try:
                trained = open_trained(str(directory / str(step)), dtype=reading.dtype)
                weights = trained.weights()
            except UserError:
                if step in steps_in(directory):
                    raise
                warn(f'{run_dir.name}@{step} was deleted before it could be evaluated')
                done.add(step)
                continue
            last = trained.description['config']['steps']
            model = _used(model, trained, weights, reading)
            results = run_tasks(model, tasks, settings, warn)
            if isinstance(run_dir, Path):
                append_evaluation(run_dir, step, results.flat())
            done.add(step)
            yield f'{run_dir.name}@{step}', step, results
        if not new and last not in done:
            if not is_said:
                warn(f'waiting for checkpoints of {path}; Ctrl-C ends the evaluation, not the run')
                is_said = True
            time.sleep(_WAIT)


def _evaluated_steps(run_dir: AnyPath, tasks: Sequence[Task]) -> set[int]:
    """The steps for which `evaluations.jsonl` has all tasks."""
    path = run_dir / EVALUATIONS
    if not path.is_file():
        return set()
    names = {task.name for task in tasks}
    return {
        one['step'] for one in read_metrics(path, warn) if names <= {key.split('/')[1] for key in one if '/' in key}
    }
