"""The summary that `pretrax train` prints at the end: the result, a sample, the files, and commands to try next."""

import contextlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from pretrax.cli._output import next_command
from pretrax.config import RunConfig, printable_override, shown_samples
from pretrax.config.batch import common_sequences
from pretrax.errors import Report, UserError
from pretrax.infer.sample import check_can_sample, most_new_tokens, sample
from pretrax.observe.step_lines import SampleLog
from pretrax.run.result import Result
from pretrax.run.watch import exit_code
from pretrax.storage import AnyPath
from pretrax.storage.locate import working_directory
from pretrax.view.report import FILE, write_report


def conclude(result: Result, arguments: list[str], say: Report) -> int:
    """Prints the summary of a run. Returns the exit code of the process."""
    for line in summary(result, arguments):
        say(line)
    return exit_code(result.stopped)


def summary(result: Result, arguments: list[str]) -> list[str]:
    """The lines of the summary. `arguments` are those of the command that ran; the next commands vary them."""
    config, run = result.run.config, result.run
    step = int(result.state.step)
    directory = shlex.quote(str(config.run_dir))
    if result.stopped:
        lines = ['', f'Stopped at step {step} of {config.steps}. The checkpoint is complete.']
    else:
        measured = {'validation loss': result.validation.get('val_loss'), 'loss': result.metrics.get('loss')}
        losses = [f', {name} {value:.4f}' for name, value in measured.items() if value is not None]
        lines = ['', f'Done: {step} steps' + ''.join(losses[:1])]
    if count := result.metrics.get('steps_without_targets'):
        lines.append(
            f'WARNING: {count:,.0f} of {step:,} steps had nothing to learn: no token of their batches is a target'
        )
    if result.verdict:
        lines.append(f'WARNING: {result.verdict}')
    model, tokenizer = run.recipe.model, run.source.tokenizer
    writes = _allowed(lambda: check_can_sample(model, run.source))
    if writes and most_new_tokens(model, tokenizer, config.sample.prompts):
        texts = sample(model, result.state.weights, tokenizer, config.sample)
        samples = shown_samples(run.shown_prompts, run.sample.prompts, texts)
        if result.stopped or not run.sample.every:  # else the last step has written samples
            _keep_samples(config.run_dir, step, samples)
        lines += ['', 'The model writes:', *(f'    {line}' for line in samples[0][1].splitlines())]
    return [
        *lines,
        '',
        f'{directory}/metrics.jsonl   every logged step',
        f'{directory}/checkpoints/{step}   the whole state',
        f'{directory}/config.yaml   every value and where it came from',
        '',
        'Try next:',
        *(f'    {next_command(command)}   # {what}' for command, what in _next(result, arguments, writes)),
        *(
            [f'report: {directory}/report.html']
            if (working_directory(config.run_dir) / 'report.html').is_file()
            else []
        ),
    ]


def _keep_samples(run_dir: AnyPath, step: int, samples: Sequence[tuple[str, str]]) -> None:
    """Adds the last samples to the files and the report of a run on a disk, if it has a report."""
    if jax.process_index() == 0 and isinstance(run_dir, Path) and (run_dir / FILE).is_file():
        with contextlib.closing(SampleLog(run_dir, step - 1, say=lambda message: None)) as log:
            log.write(step, *zip(*samples, strict=True))
        write_report(run_dir)


def _next(result: Result, arguments: list[str], writes: bool) -> list[tuple[str, str]]:
    """Commands that work after this run, each with its purpose."""
    config, run = result.run.config, result.run
    directory = shlex.quote(str(config.run_dir))
    commands = []
    if writes and most_new_tokens(run.recipe.model, run.source.tokenizer, ['class ']):
        plugins = ''.join(f' --plugin {shlex.quote(plugin)}' for plugin in config.plugins)
        commands.append((f"pretrax generate {directory} --prompt 'class '{plugins}", 'more text'))
    bucket = config.federation.bucket
    if result.stopped or bucket is None:
        more = {} if result.stopped else {'steps': str(2 * config.steps)}
        commands.append((_again(config, arguments, more), 'continues'))
    plot = (f'pretrax plot {directory}', 'the loss as a curve')
    if bucket is not None:  # an island with other values would be refused
        status = f'pretrax federation status {shlex.quote(str(bucket))}'
        return [*commands, (status, 'all islands and their rounds'), plot]
    if config.data.name == 'text' and getattr(config.data.options, 'text', None) == 'stdlib':
        commands.append((_again(config, arguments, {'name': 'mine', 'data.text': 'path/to/*.txt'}), 'your own text'))
    arch = run.recipe.model.arch
    on_eight = {'r': 1, 'd': 4, 'e': 1, 'c': 1, 't': 2, 'p': 1}
    if (
        run.mesh.devices.flat[0].platform == 'cpu'
        and run.mesh.size != 8
        and common_sequences(config.batch) % 4 == 0
        and arch is not None
        and _allowed(lambda: arch.check_mesh(on_eight, run.size.sequence_length))
    ):
        mesh = {f'mesh.{axis}': str(on_eight[axis]) for axis in 'rdt'}
        commands.append((_again(config, arguments, {'name': 'eight', **mesh}), '8 simulated devices'))
    return [*commands, plot]


def _again(config: RunConfig, arguments: list[str], changes: Mapping[str, str]) -> str:
    """The command with other values."""
    typed = arguments[:1] == ['train']
    changes = dict(changes)
    if 'name' in changes and (not typed or config.run_dir.as_posix() != f'runs/{config.name}'):
        changes['run_dir'] = str(config.run_dir.parent / changes['name'])  # this run_dir does not follow the name
    given = arguments if typed else ['train', str(config.run_dir / 'config.yaml')]
    replaced = {*changes} | ({'mesh'} if 'mesh.d' in changes else set())
    pairs = zip(given, ['', *given], strict=False)  # each word and the one before it
    kept = [
        word
        for word, before in pairs
        if not word.startswith('--') and before != '--compiled' and word.partition('=')[0] not in replaced
    ]
    kept = [word for override in kept if (word := printable_override(override))]
    return shlex.join(['pretrax', *kept, *(f'{key}={value}' for key, value in changes.items())])


def _allowed(check: Callable[[], None]) -> bool:
    try:
        check()
    except UserError:
        return False
    return True
