"""Files and directories that appear whole or not at all.

Each is written under a hidden name next to its final one, `.NAME.partial-HOST-PID`, and then renamed. With `sync` it is
on the disk before it is renamed, so that a crash of the machine leaves the old content or the new one.
"""

import contextlib
import glob
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO


@contextlib.contextmanager
def new_file(path: Path, sync: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which replaces `path` when the block ends without an error. Raises OSError."""
    remove_abandoned(path.parent, path.name)
    partial = partial_path(path)
    try:
        with partial.open('wb') as file:
            yield file
            if sync:
                sync_file(file)
        partial.replace(path)
        if sync:
            sync_directory(path.parent)
    except OSError as error:
        if error.filename is None:  # raised by a write
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(path: Path, sync: bool = False, keep_existing: bool = False) -> Iterator[Path]:
    """A directory to write files in, which becomes `path` when the block ends without an error. Raises OSError.

    Args:
        path: does not exist, or is an empty directory.
        sync: puts the files on the disk too.
        keep_existing: if another process has created `path` first, its directory stays; otherwise this is an error.
    """
    remove_abandoned(path.parent, path.name)
    partial = partial_path(path)
    shutil.rmtree(partial, ignore_errors=True)  # of an earlier process with this number: containers reuse numbers
    try:
        partial.mkdir(parents=True)
        yield partial
        if sync:
            _sync_tree(partial)
        rename_directory(partial, path, keep_existing)
        if sync:
            sync_directory(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_file(path: Path, content: bytes, sync: bool = False) -> None:
    """Writes a whole file, or leaves the old one. Raises OSError."""
    with new_file(path, sync) as file:
        file.write(content)


def rename_directory(partial: Path, path: Path, keep_existing: bool) -> None:
    """Gives a directory its final name, unless another process was first and `keep_existing`."""
    try:
        partial.rename(path)
    except OSError:
        if not (keep_existing and path.is_dir()):
            raise


def partial_path(path: Path) -> Path:
    """The name that this process writes `path` under."""
    return path.with_name(f'.{path.name}.partial-{socket.gethostname()}-{os.getpid()}')


def remove_abandoned(directory: Path, name: str = '*') -> None:
    """Removes what killed processes of this machine have left half-written in a directory, of this name or of any."""
    for path in directory.glob(f'.{name if name == "*" else glob.escape(name)}.partial-{socket.gethostname()}-*'):
        pid = path.name.rpartition('-')[2]
        if pid.isdigit() and not _is_alive(int(pid)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def sync_file(file: IO) -> None:
    """Puts the content of an open file on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Puts the names in a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(directory: Path) -> None:
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            with open(os.path.join(folder, name), 'rb') as file:
                os.fsync(file.fileno())
        sync_directory(Path(folder))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True
