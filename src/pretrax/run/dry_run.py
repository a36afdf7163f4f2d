"""`pretrax train --dry-run`: does everything that a training does before its first step, and leaves nothing behind.

Configuration, data, mesh, model, state and step are made as `train` makes them, so that they fail here if they would
fail there. Nothing is written in the run directory, no tracker is started, and the run is not locked.
"""

import os
import pathlib
import shutil
import tempfile
import time

import jax

from pretrax.config import RunConfig
from pretrax.errors import Report, UserError
from pretrax.machine.locks import holder_of
from pretrax.run.compiled_step import LoadStep, compile_step
from pretrax.run.processes import exiting_on_error
from pretrax.run.resume import being_trained, check_unchanged
from pretrax.run.setup import Run, prepare_and_report
from pretrax.run.start import restore_or_start
from pretrax.scale.memory import memory_of, size, temporaries_of


@exiting_on_error
def dry_run(
    config: RunConfig,
    *,
    allow_changes: bool = False,
    verbose: bool = False,
    report: Report = print,
    saved: LoadStep | None = None,
) -> None:
    """Reports what `train` would do, up to its first step.

    Args:
        config, allow_changes, verbose: as for `train`.
        report: receives each line.
        saved: loads a step that was compiled before, as `compiled` of `train`.

    Raises:
        UserError: `train` would raise it too.
    """
    if (holder := holder_of(config.run_dir)) is not None:
        raise being_trained(config.run_dir, holder)
    parent = _check_writable(config.run_dir)
    check_unchanged(config, allow_changes, report)
    with tempfile.TemporaryDirectory(prefix='pretrax-dry-run-') as scratch:
        elsewhere = pathlib.Path(scratch)
        _link_data(config.run_dir / 'data', elsewhere / 'data')
        moved = config.model_copy(update={'run_dir': elsewhere})
        run, _ = prepare_and_report(moved, lambda text: report(text.replace(scratch, '...')), verbose)
        with jax.set_mesh(run.mesh):
            _start(config, run, allow_changes, report, saved, parent)


def _start(
    config: RunConfig,
    run: Run,
    allow_changes: bool,
    report: Report,
    saved: LoadStep | None,
    parent: pathlib.Path,
) -> None:
    """Makes or restores the state, reads a batch, and compiles the step."""
    directory = config.run_dir / 'checkpoints'
    start = restore_or_start(run, directory, allow_changes, report)
    first, number = int(start.state.step), int(start.state.batch)
    began = time.perf_counter()
    batch = run.batch(number)
    seconds = time.perf_counter() - began
    report(f'batch {number}: {run.rows} sequences x {config.batch.sequence_length}, read in {seconds:.1f} s')
    step = compile_step(run, start.state, batch, saved)
    report(str(step))
    if step.call.memory_analysis() is not None:  # not every backend has it
        needed, temporaries = size(memory_of(step.call)), size(temporaries_of(step.call))
        report(f'memory: {needed} per device according to the compiler, {temporaries} of them temporaries')
    whole = sum(x.nbytes for x in jax.tree.leaves(start.state))
    report(f'checkpoints: {directory}, {size(whole)} each; {size(shutil.disk_usage(parent).free)} free')
    trackers = [name for name in ('tensorboard', 'wandb', 'mlflow') if getattr(config.log, name)]
    if trackers:
        report(f'trackers: {" and ".join(trackers)} would be started')
    if first >= config.steps:
        outcome = f'all {config.steps} steps are done, so the run would not train'
    elif start.step:
        outcome = f'the run would resume from step {start.step}, checkpoint {directory / str(start.step)}'
    else:
        outcome = f'the run would start at step {first}'
    report(f'dry run: no problem found; {outcome}. Nothing was written in {config.run_dir}')


def _check_writable(directory: pathlib.Path) -> pathlib.Path:
    """The nearest existing parent of the run directory. Raises UserError if files cannot be created there."""
    for wanted in (directory / 'checkpoints', directory):
        parent = next(p for p in (wanted.absolute(), *wanted.absolute().parents) if p.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            problem = 'is not writable' if parent.is_dir() else 'is a file'
            raise UserError(
                f'run_dir: {directory} cannot be written: {parent} {problem}\n'
                'change its permissions, or use another directory: run_dir=PATH'
            )
    return parent


def _link_data(data: pathlib.Path, links: pathlib.Path) -> None:
    """Links the tokens that the run has prepared into another directory, where missing ones may be created."""
    kinds = ('tokens-', 'survey-')
    for path in (path for kind in kinds for path in data.rglob(f'{kind}*')):
        parents = path.relative_to(data).parts[:-1]
        if not any(part.startswith(('.', *kinds)) for part in parents):  # else a part of one, or unfinished
            link = links / path.relative_to(data)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.absolute(), target_is_directory=True)
