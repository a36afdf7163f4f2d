"""Locks for one process at a time, on every machine that shares the file system.

The operating system releases a lock when its process ends, however it ends.
"""

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import IO

from pretrax.errors import Report

_UNKNOWN = 'another process'


class LockedError(Exception):
    """Another process has the lock of a directory. `holder`: 'process PID on HOST', or 'another process'."""

    def __init__(self, holder: str):
        super().__init__(f'locked by {holder}')
        self.holder = holder


def lock(file: IO | int, wait: bool = False) -> None:
    """Locks an open file or directory until it is closed.

    Raises:
        BlockingIOError: another process has the lock, and `wait` is False.
        OSError: the file system does not support locks, as on some clusters.
    """
    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


class DirectoryLock(contextlib.AbstractContextManager['DirectoryLock']):
    """A lock of a directory, until it is closed or the process ends."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._written: tuple[Path, str] | None = None  # the file with the identity of the holder, and what it says

    def write(self, path: Path) -> None:
        """Writes the identity of this process into the locked file, which is the first that was opened."""
        text = f'process {os.getpid()} on {socket.gethostname()}\n'
        os.ftruncate(self._descriptors[0], 0)
        os.pwrite(self._descriptors[0], text.encode(), 0)
        self._written = path, text

    def confirm(self) -> None:
        """Raises LockedError if another process has taken the lock, for example from a file server that lost it."""
        if self._written is not None:
            path, text = self._written
            if (holder := _holder(path)) not in (text.strip(), _UNKNOWN):
                raise LockedError(holder)

    def open(self, path: Path, flags: int) -> int:
        """Opens a file or directory to lock. Raises OSError."""
        self._descriptors.append(os.open(path, flags, 0o666))
        return self._descriptors[-1]

    def close(self) -> None:
        """Releases the lock. May be called twice."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_directory(directory: Path, warn: Report, before_waiting: Callable[[], None] | None = None) -> DirectoryLock:
    """Creates a directory and locks it. The holder's identity is written in its file `lock`.

    Both the file and the directory itself are locked, so that a process which removes the file admits no second holder.

    Args:
        directory: to lock; if the previous holder removes it, it is created again.
        warn: receives the reason if the file system does not support locks; the directory is then not locked.
        before_waiting: called before this process waits for another one; None: it does not wait.

    Raises:
        LockedError: another process has the lock, and `before_waiting` is None.
        OSError: the directory cannot be written.
    """
    path = directory / 'lock'
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        held = DirectoryLock()
        try:
            file = held.open(path, os.O_RDWR | os.O_CREAT)
            folder = held.open(directory, os.O_RDONLY)
            try:
                _take(file, path, before_waiting)
            except OSError as error:
                warn(error.strerror or str(error))
            with contextlib.suppress(OSError):  # NFS locks only files
                _take(folder, path, before_waiting)
            if is_at(file, path) and is_at(folder, directory):
                held.write(path)
                return held
        except BaseException:
            held.close()
            raise
        held.close()


def holder_of(directory: Path) -> str | None:
    """The process that has the lock of a directory; None: no process, or the file system does not support locks."""
    path = directory / 'lock'
    with DirectoryLock() as held:
        for place in (path, directory):
            try:
                lock(held.open(place, os.O_RDONLY))
            except BlockingIOError:
                return _holder(path)
            except OSError:  # it does not exist, or cannot be locked
                continue
    return None


def is_locked(path: Path) -> bool:
    """Whether a process has the lock of a file. False if the file does not exist, or cannot be locked."""
    try:
        with path.open('rb') as file:
            lock(file)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_at(file: IO | int, path: Path) -> bool:
    """Whether an open file or directory is still the one at a path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file if isinstance(file, int) else file.fileno()))
    except FileNotFoundError:
        return False


def _take(descriptor: int, path: Path, before_waiting: Callable[[], None] | None) -> None:
    try:
        lock(descriptor)
    except BlockingIOError:
        if before_waiting is None:
            raise LockedError(_holder(path)) from None
        before_waiting()
        lock(descriptor, wait=True)


def _holder(path: Path) -> str:
    """What a lock file says; nothing if it was removed."""
    text = path.read_text(errors='replace') if path.is_file() else ''
    return text.strip() or _UNKNOWN
