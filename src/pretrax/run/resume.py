"""Checks before a run is resumed: one process at a time, a writable directory, the same configuration and data."""

import contextlib
import errno
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from pretrax.checkpoint import DamagedError, memory_directory, newest_description, read_description, steps_in
from pretrax.checkpoint.agreement import from_process_0
from pretrax.config import RunConfig, diff, from_manifest, may_change_on_resume, registry
from pretrax.config.batch import same_until
from pretrax.errors import OF_THE_SYSTEM, Report, UserError, disk_fix
from pretrax.run.saving import had_checkpoints
from pretrax.storage import AnyPath
from pretrax.storage.connection import BucketError
from pretrax.storage.locate import working_directory
from pretrax.system.locks import DirectoryLock, LockedError, lock_directory

_BATCH_SIZES = ('batch.tokens', 'batch.sequence_length')


@contextlib.contextmanager
def lock_run(directory: pathlib.Path, report: Report = print, name: AnyPath | None = None) -> Iterator[DirectoryLock]:
    """Locks the run directory; `name`: as the user calls it, if it is the working directory of a run in a bucket.

    Raises:
        UserError: another process trains the run, or the directory cannot be written.
    """

    def warn(reason: str) -> None:
        report(
            f'WARNING: {directory} cannot be locked ({reason}), so nothing prevents a second process from training '
            'this '
            'run; start it only once'
        )

    seconds = lock_patience()
    began, is_waiting = time.monotonic(), False
    while True:
        try:
            with writable(directory):
                lock = lock_directory(directory, warn)
            break
        except LockedError as locked:
            if time.monotonic() - began >= seconds:
                raise being_trained(name or directory, locked.holder) from None
            if not is_waiting:
                report(f'{directory} is locked by {locked.holder}; waiting up to {seconds:.0f} s, since it may be lost')
            is_waiting = True
            time.sleep(0.2)
    with lock:
        yield lock


def lock_patience() -> float:
    """Seconds to wait for the lock of a run.

    `pretrax launch node` sets PRETRAX_LOCK_SECONDS: a file server holds the lock of a host that is
    lost for a while, usually 90 s, and a host that is cut off may train for as long as it does not miss the others.
    """
    return float(os.environ.get('PRETRAX_LOCK_SECONDS', 0))


def being_trained(directory: AnyPath, holder: str) -> UserError:
    """The error for a run that another process trains."""
    return UserError(f'{directory} is being trained by {holder}\nstop that process first, or use another name=')


@contextlib.contextmanager
def writable(directory: AnyPath) -> Iterator[None]:
    """Turns errors of the disk into UserErrors. Failed saves and metrics during training are not raised at all."""
    try:
        yield
    except OSError as error:
        # A directory under /proc cannot be created: "No such file or directory".
        is_refused = error.errno == errno.ENOENT and error.filename == str(directory)
        if not (error.errno in OF_THE_SYSTEM or is_refused) or isinstance(error, BucketError):
            raise
        path = pathlib.Path(os.path.abspath(str(error.filename2 or error.filename or directory)))
        if isinstance(directory, pathlib.Path) and not path.is_relative_to(directory.absolute()):  # of the data
            raise UserError(f'{path}: {error.strerror}\n{disk_fix(error)}') from error
        raise UserError(
            f'run_dir: {directory} cannot be used: {error.strerror} ({path})\n{disk_fix(error)}: run_dir=PATH'
        ) from error


def check_init_from(run_dir: AnyPath, model: str, start: str | None) -> None:
    """Checks that a run finds the weights that it starts from, unless it resumes.

    Args:
        run_dir: of the run; one with a checkpoint needs no `start`.
        model: the name of its model.
        start: the path in `init_from`.

    Raises:
        UserError: there is no checkpoint to start from.
    """
    if start is not None and _newest_description(run_dir) is None:
        registry.section_of_checkpoint('model', model, start)


def check_unchanged(config: RunConfig, allow_changes: bool, report: Report) -> None:
    """Checks that a run resumes with its own configuration; keys that do not affect the training may change.

    Raises:
        UserError: the configuration has changed, the checkpoints are gone, or the run directory holds weights without
            a training state.
    """
    description = _newest_description(config.run_dir)
    if description is None:
        from_process_0('checkpoints', lambda: _check_not_lost(config.run_dir))
        return
    made = next((word for word in ('imported', 'averaged') if word in description), None)
    if made:
        raise UserError(
            f'{config.run_dir} holds weights that were {made}, and no training state to resume\n'
            f'train from these weights under another name: init_from: {config.run_dir}'
        )
    began, number = from_manifest(description['config']), description['batch']
    members = getattr(config.data.options, 'mixture', None) or ()
    weights_change = any(len(member.schedule) > 1 for member in members)  # their rows would move with later batches
    may_grow = same_until(began.batch, config.batch, number) and not weights_change
    every = diff(began, config)
    changes = [
        (key, old, new)
        for key, old, new in every
        if not may_change_on_resume(key) and not (key in _BATCH_SIZES and may_grow)
    ]
    if changes and not allow_changes:
        shown = [f'    {key}: {old} -> {new}' for key, old, new in changes[:5]]
        more = [f'    and {len(changes) - 5} more'] if len(changes) > 5 else []
        head = f'{config.run_dir} was trained with another configuration:'
        why = (
            [_why_batches_are_fixed(number, weights_change)]
            if any(key in _BATCH_SIZES for key, _, _ in changes)
            else []
        )
        fix = 'use another name=, or resume with the new configuration: --allow-changes'
        raise UserError('\n'.join([head, *shown, *more, *why, fix]))
    for key, old, new in [change for change in every if change in changes or change[0] in ('steps', *_BATCH_SIZES)]:
        report(f'changed since the run began: {key}: {old} -> {new}')


def _why_batches_are_fixed(number: int, weights_change: bool) -> str:
    if weights_change:
        return 'sizes of batches may not change, because the weights of the mixture change at given steps'
    return (
        f'batches may change from batch {number} on, counted from 0; the longest sequence, and batches before, may not'
    )


def _check_not_lost(run_dir: AnyPath) -> None:
    """Raises UserError if the run had checkpoints and has none: starting at step 0 would erase its metrics."""
    checkpoints, metrics = run_dir / 'checkpoints', working_directory(run_dir) / 'metrics.jsonl'
    if not steps_in(checkpoints) and had_checkpoints(run_dir) and metrics.is_file() and metrics.stat().st_size:
        raise UserError(
            f'{checkpoints} has no checkpoint, but {metrics} has steps of this run\n'
            f'restore {checkpoints} from a backup, or move {metrics} away to start at step 0'
        )


def check_same_data(
    run_dir: AnyPath, description: dict[str, Any], fingerprint: str | None, allow_changes: bool
) -> None:
    """Raises UserError if the text or the tokenizer has changed, which the configuration may not show."""
    if description['data'] != fingerprint and not allow_changes:
        older = (
            '\nif the tokenizer adds tokens before a text: an older pretrax did not; '
            'data.begin_of_text=false --allow-changes'
        )
        raise UserError(
            f'{run_dir} was trained on other tokens: the text or the tokenizer has changed since\n'
            'use another name=, or resume with the new tokens: --allow-changes'
            + ('' if 'begin_of_text' in description else older)
        )


def _newest_description(run_dir: AnyPath) -> dict[str, Any] | None:
    """The description of the newest checkpoint or piece in memory; `batch`: the number of the next batch.

    With several processes, process 0 looks for it: a bucket or a shared disk would answer all others the same.
    """

    def find() -> dict[str, Any] | None:
        in_memory, held = newest_description(memory_directory()) or (0, None)
        for step in reversed(steps_in(run_dir / 'checkpoints')):
            if step < in_memory:
                break
            with contextlib.suppress(DamagedError):  # `restore_newest` reports it
                return {'batch': step, **read_description(run_dir / 'checkpoints', step)}
        return held

    return from_process_0('checkpoints', find)
