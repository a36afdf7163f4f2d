"""Going on with a run: one process at a time, from the newest readable checkpoint, with what it was trained with."""

import contextlib
import errno
import fcntl
import os
import pathlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

from pretrax.checkpoint import read_description, steps_in
from pretrax.config import RunConfig, diff, from_values, is_harmless
from pretrax.errors import UserError

Say = Callable[[str], None]

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)


@contextlib.contextmanager
def only_one(directory: pathlib.Path, say: Say = print) -> Iterator[None]:
    """Holds the run's directory. The system gives it free when the process ends, in whatever way.

    Raises:
        UserError: another process has it, or it cannot be written.
    """
    with writable(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / 'lock').open('a+')
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UserError(
                f'{directory} is being trained by {lock.read().strip() or "another process"}\n'
                'stop that one first, or give another name='
            ) from None
        except OSError as error:  # some cluster file systems have no locks
            say(
                f'WARNING: {directory} cannot be locked ({error.strerror}): nothing keeps a second run out of it; '
                'start it only once'
            )
        with writable(directory):
            lock.truncate(0)
            os.write(lock.fileno(), f'process {os.getpid()} on {socket.gethostname()}\n'.encode())
        yield


@contextlib.contextmanager
def writable(directory: pathlib.Path) -> Iterator[None]:
    """What the run cannot do without being able to write is told as the user's to mend. Once it trains, saves and lines
    of metrics that fail are no reason to end."""
    try:
        yield
    except OSError as error:
        if error.errno not in _OF_THE_DISK:
            raise
        what = error.filename or directory
        raise UserError(
            f'run_dir: {directory} cannot be written: {error.strerror} ({what})\n'
            'make room or give leave to write, or give another one: run_dir=PATH'
        ) from error


def check_unchanged(config: RunConfig, allow_changes: bool, say: Say) -> None:
    """A run goes on only with the configuration that it began with, but for what does not touch the training."""
    before = _description(config.run_dir / 'checkpoints')
    if before is None:
        return
    made = next((word for word in ('imported', 'averaged') if word in before), None)
    if made:
        raise UserError(
            f'{config.run_dir} holds weights that were {made}, and no state of a training to go on with\n'
            f'train from them under another name, with text: init_from: {config.run_dir}'
        )
    every = diff(from_values(before['config']), config)
    changes = [(key, old, new) for key, old, new in every if not is_harmless(key)]
    if changes and not allow_changes:
        shown = [f'    {key}: {old} -> {new}' for key, old, new in changes[:5]]
        more = [f'    and {len(changes) - 5} more'] if len(changes) > 5 else []
        raise UserError(
            '\n'.join([f'{config.run_dir} was trained with another configuration:', *shown, *more,
                       'give another name=, or --allow-changes to go on with the new one'])
        )  # fmt: skip
    for key, old, new in [*changes, *(change for change in every if change[0] == 'steps')]:
        say(f'changed since the run began: {key}: {old} -> {new}')


def check_same_data(
    config: RunConfig, description: dict[str, Any], fingerprint: str | None, allow_changes: bool
) -> None:
    """The text behind a path may change without the configuration changing; a run notices."""
    if description['data'] != fingerprint and not allow_changes:
        raise UserError(
            f'{config.run_dir} was trained on other tokens: the text or the tokenizer has changed since\n'
            'give another name=, or --allow-changes to go on with the new ones'
        )


def _description(directory: pathlib.Path) -> dict | None:
    """That of the newest checkpoint whose description is readable."""
    for step in reversed(steps_in(directory)):
        with contextlib.suppress(UserError):  # `restore_newest` tells of it
            return read_description(directory, step)
    return None
