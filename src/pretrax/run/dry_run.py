"""`pretrax train --dry-run`: does everything that a training does before its first step, and leaves nothing behind.

Configuration, data, mesh, model, state and step are made as `train` makes them, so that they fail here if they would
fail there. Nothing is written in the run directory, no tracker is started, and the run is not locked.
"""

import os
import pathlib
import shutil
import tempfile
import time
import uuid

import jax

from pretrax.amounts import size
from pretrax.config import RunConfig
from pretrax.cost.memory import memory_of, temporaries_of
from pretrax.errors import Report, UserError
from pretrax.observe.trackers import check_trackers
from pretrax.run.compiled_step import LoadStep, compile_step
from pretrax.run.contracts import check_behavior
from pretrax.run.processes import exiting_on_error, join_processes
from pretrax.run.resume import being_trained, check_init_from, check_unchanged
from pretrax.run.setup import Run, prepare_and_report
from pretrax.run.start import restore_or_start
from pretrax.run.validation import Evaluation
from pretrax.run.watch import stacks_on_timer
from pretrax.storage import BucketPath, lease
from pretrax.storage.working_directory import working_directory
from pretrax.system.locks import holder_of


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
        local = working_directory(config.run_dir)
        if (holder := holder_of(local)) is not None:
            raise being_trained(config.run_dir, holder)
        if isinstance(config.run_dir, BucketPath):
            _check_bucket(config.run_dir, report)
        parent = _check_writable(config, local)
        trackers = check_trackers(config.log.trackers())
        if trackers:
            report(f'trackers: {" and ".join(trackers)} would be started')
        check_init_from(config.run_dir, config.model.name, config.start)
        check_unchanged(config, allow_changes, report)
        with tempfile.TemporaryDirectory(prefix='pretrax-dry-run-') as scratch:
            elsewhere = pathlib.Path(scratch)
            _link_data(local / 'data', elsewhere / 'data')
            moved = config.model_copy(update={'run_dir': elsewhere})
            run, _ = prepare_and_report(moved, lambda text: report(text.replace(scratch, '...')), verbose)
            if any(path.is_file() and not path.is_symlink() for path in (elsewhere / 'data').rglob('*')):
                _check_directory(local, local / 'data')
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


def _check_bucket(run_dir: BucketPath, report: Report) -> None:
    """Raises UserError if no object can be written below a run directory. Reports who has the run."""
    probe = run_dir / f'.probe-{uuid.uuid4().hex}'
    try:
        if holder := lease.holder_of(run_dir / lease.FILE):
            report(f'WARNING: {holder}, or was until it was lost: `train` waits to find out')
        probe.write_bytes(b'probe')
        probe.unlink()
    except OSError as error:
        raise UserError(f'run_dir: {run_dir} cannot be used: {error.strerror} ({error.filename})') from error


def _check_writable(config: RunConfig, run_dir: pathlib.Path) -> pathlib.Path:
    """The nearest existing parent of the checkpoints. Raises UserError if a file of the run cannot be written."""
    trackers = {'tb': config.log.tensorboard, 'wandb': config.log.wandb, 'profile': config.log.profile}
    for name in ('', 'stacks', *(name for name, is_on in trackers.items() if is_on)):
        _check_directory(run_dir, run_dir / name)
    with stacks_on_timer(config.faults.stack_trace_to):
        pass  # they can be written
    for name in ('lock', 'config.yaml', 'startup.txt', 'metrics.jsonl', 'attempts.jsonl', 'stacks/process-0.txt'):
        path = run_dir / name
        if path.is_dir():
            raise _unwritable(run_dir, path, 'is a directory')
        if path.exists() and not os.access(path, os.R_OK | os.W_OK):
            raise _unwritable(run_dir, path, 'is not writable')
    return _check_directory(run_dir, run_dir / 'checkpoints')


def _check_directory(run_dir: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """The nearest existing parent of a directory. Raises UserError if no file can be created there."""
    parent = next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise _unwritable(run_dir, parent, 'is a file')
    try:
        tempfile.TemporaryFile(dir=parent).close()  # permissions do not suffice: the disk may be read-only or full
    except OSError as error:
        raise _unwritable(run_dir, parent, f'is not writable: {error.strerror}') from error
    return parent


def _unwritable(run_dir: pathlib.Path, path: pathlib.Path, problem: str) -> UserError:
    return UserError(
        f'run_dir: {run_dir} cannot be written: {path} {problem}\n'
        'change its permissions, or use another directory: run_dir=PATH'
    )


def _link_data(data: pathlib.Path, links: pathlib.Path) -> None:
    """Links the tokens that the run has prepared into another directory, where missing ones may be created."""
    kinds = ('tokens-', 'survey-')
    for path in (path for kind in kinds for path in data.rglob(f'{kind}*')):
        parents = path.relative_to(data).parts[:-1]
        if not any(part.startswith(('.', *kinds)) for part in parents):  # else a part of one, or unfinished
            link = links / path.relative_to(data)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.absolute(), target_is_directory=True)
