"""Locks for one process at a time, on every machine that shares the file system.

The operating system releases a lock when its process ends, however it ends.
"""

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import IO


class LockedError(Exception):
    """Another process has the lock of a directory. `holder`: 'process PID on HOST', or 'another process'."""

    def __init__(self, holder: str):
        super().__init__(f'locked by {holder}')
        self.holder = holder


def lock(file: IO, wait: bool = False) -> None:
    """Locks an open file until it is closed.

    Raises:
        BlockingIOError: another process has the lock, and `wait` is False.
        OSError: the file system does not support locks, as on some clusters.
    """
    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def lock_directory(
    directory: Path, warn: Callable[[str], None], before_waiting: Callable[[], None] | None = None
) -> IO[str]:
    """Creates a directory and locks it. The holder's identity is written in its file `lock`.

    Args:
        directory: to lock; if the previous holder removes it, it is created again.
        warn: receives the reason if the file system does not support locks; the directory is then not locked.
        before_waiting: called before this process waits for another one; None: it does not wait.

    Returns:
        An open file; closing it releases the lock.

    Raises:
        LockedError: another process has the lock, and `before_waiting` is None.
        OSError: the directory cannot be written.
    """
    path = directory / 'lock'
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open('a+')
        try:
            try:
                lock(file)
            except BlockingIOError:
                if before_waiting is None:
                    file.seek(0)
                    raise LockedError(_holder(file)) from None
                before_waiting()
                lock(file, wait=True)
            except OSError as error:
                warn(error.strerror or str(error))
            if is_at(file, path):
                file.truncate(0)
                os.write(file.fileno(), f'process {os.getpid()} on {socket.gethostname()}\n'.encode())
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def holder_of(directory: Path) -> str | None:
    """The process that has the lock of a directory; None: no process, or the file system does not support locks."""
    path = directory / 'lock'
    if not path.is_file():
        return None
    with path.open() as file:
        try:
            lock(file)
        except BlockingIOError:
            return _holder(file)
        except OSError:
            return None
    return None


def is_at(file: IO, path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _holder(file: IO[str]) -> str:
    return file.read().strip() or 'another process'
