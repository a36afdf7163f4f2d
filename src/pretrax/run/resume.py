"""Going on with a run: one process at a time, from the newest readable checkpoint, with what it was trained with."""

import contextlib
import errno
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from pretrax.checkpoint import read_description, steps_in
from pretrax.config import RunConfig, diff, from_values, is_harmless
from pretrax.errors import UserError
from pretrax.machine.locks import LockedError, lock_directory

Say = Callable[[str], None]

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)


@contextlib.contextmanager
def only_one(directory: pathlib.Path, say: Say = print) -> Iterator[None]:
    """Locks the run's directory.

    Raises:
        UserError: another process trains in it, or it cannot be written.
    """

    def warn(reason: str) -> None:
        say(f'WARNING: {directory} cannot be locked ({reason}), so a second run could write in it too: start only one')

    try:
        with writable(directory):
            lock = lock_directory(directory, warn)
    except LockedError as locked:
        raise being_trained(directory, locked.holder) from None
    with lock:
        yield


def being_trained(directory: pathlib.Path, holder: str) -> UserError:
    """The error for a run that another process trains."""
    return UserError(f'{directory} is being trained by {holder}\nstop that process first, or give another name=')


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
