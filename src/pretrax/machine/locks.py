"""One process at a time in a directory, on every machine that sees it; the system lets go of the lock of a dead one."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from pretrax.errors import UserError


@contextlib.contextmanager
def only_one(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Make a directory and hold it. Others wait; when the holder removes it, the next one makes it again."""
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            stream = (directory / 'lock').open('w')
        except OSError as error:
            raise UserError(f'{directory.parent}: cannot write the tokens: {error.strerror}') from error
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f'tokens: another process works in {directory}; waiting for it')
                fcntl.flock(stream, fcntl.LOCK_EX)
            except OSError as error:  # some cluster file systems have no locks; two processes would do the same twice
                say(
                    f'tokens: {directory} cannot be locked ({error.strerror}); do not tokenise the same text twice at once'
                )
            if _is_still(directory / 'lock', stream.fileno()):
                yield
                return


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
