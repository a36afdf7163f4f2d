"""`pretrax train --dry-run`: does everything that a training does before its first step, and leaves nothing behind.

Configuration, data, mesh, model, state and step are made as `train` makes them, so that they fail here if they would
fail there. Nothing is written in the run directory, no tracker is started, and the run is not locked.
"""

import pathlib
import shutil
import tempfile
import time

import jax

from pretrax.amounts import size
from pretrax.config import RunConfig
from pretrax.cost.memory import memory_of, temporaries_of
from pretrax.errors import Report, UserError
from pretrax.run.compiled_step import LoadStep, compile_step
from pretrax.run.contracts import check_behavior
from pretrax.run.processes import exiting_on_error, join_processes
from pretrax.run.resume import check_unchanged
from pretrax.run.setup import Run, prepare_and_report
from pretrax.run.start import restore_or_start
from pretrax.run.start_check import check_directory, check_start
from pretrax.run.validation import Evaluation
from pretrax.storage import BucketPath
from pretrax.storage.locate import working_directory


def dry_run(
    config: RunConfig,
    *,
    allow_changes: bool = False,
    verbose: bool = False,
    report: Report = print,
    saved: LoadStep | None = None,
) -> None:
    """Reports what `train` would do with these arguments, up to its first step. Raises UserError if `train` would."""
    with exiting_on_error(config.faults.heartbeat_seconds):
        join_processes(config.processes, config.run_dir, config.faults.heartbeat_seconds)
        check_start(config, report, allow_changes=allow_changes)
        local, trackers = working_directory(config.run_dir), config.log.trackers()
        if trackers:
            report(f'trackers: {" and ".join(trackers)} would be started')
        check_unchanged(config, allow_changes, report)
        with tempfile.TemporaryDirectory(prefix='pretrax-dry-run-') as scratch:
            elsewhere = pathlib.Path(scratch)
            _link_data(local / 'data', elsewhere / 'data')
            moved = config.model_copy(update={'run_dir': elsewhere})
            run, _ = prepare_and_report(moved, lambda text: report(text.replace(scratch, '...')), verbose)
            if any(path.is_file() and not path.is_symlink() for path in (elsewhere / 'data').rglob('*')):
                check_directory(local, local / 'data')
            with jax.set_mesh(run.mesh):
                _start(config, run, allow_changes, report, saved, check_directory(local, local / 'checkpoints'))


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
    start = restore_or_start(run, directory, (), allow_changes, report)
    check_behavior(run, start.state)
    first, number = int(start.state.step), int(start.state.batch)
    began = time.perf_counter()
    batch = run.batch(number)
    seconds = time.perf_counter() - began
    rows, length = batch.tokens.shape
    report(f'batch {number}: {rows} sequences x {length}, read in {seconds:.1f} s')
    step = compile_step(run, start.state, saved)
    report(str(step))
    if step.call.memory_analysis() is not None:  # not every backend has it
        needed, temporaries = size(memory_of(step.call)), size(temporaries_of(step.call))
        report(f'memory: {needed} per device according to the compiler, {temporaries} of them temporaries')
    evaluation = Evaluation.create(run, report)
    if evaluation is not None and evaluation.has_losses:
        loss = evaluation.losses(start.state.weights, batches=1).get('val_loss')
        if loss is not None:
            report(f'evaluation: val_loss {loss:.4f} on one batch of {config.eval.batches}')
    whole, free = sum(x.nbytes for x in jax.tree.leaves(start.state)), shutil.disk_usage(parent).free
    if isinstance(directory, BucketPath):
        report(f'checkpoints: {directory}, {size(whole)} each')
    elif free < whole:
        raise UserError(
            f'run_dir: {config.run_dir} has room for {size(free)}, and one checkpoint has {size(whole)}\n'
            'make room, or use another directory: run_dir=PATH'
        )
    else:
        report(f'checkpoints: {directory}, {size(whole)} each; {size(free)} free')
    if first >= config.steps:
        outcome = f'all {config.steps} steps are done, so the run would not train'
    elif start.step:
        outcome = f'the run would resume from step {start.step}, checkpoint {directory / str(start.step)}'
    else:
        outcome = f'the run would start at step {first}'
    report(f'dry run: no problem found; {outcome}. Nothing was written in {config.run_dir}')


def _link_data(data: pathlib.Path, links: pathlib.Path) -> None:
    """Links the tokens that the run has prepared into another directory, where missing ones may be created."""
    kinds = ('tokens-', 'survey-')
    for path in (path for kind in kinds for path in data.rglob(f'{kind}*')):
        parents = path.relative_to(data).parts[:-1]
        if not any(part.startswith(('.', *kinds)) for part in parents):  # else a part of one, or unfinished
            link = links / path.relative_to(data)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.absolute(), target_is_directory=True)
