"""The user's cache directory: small JSON files, and the removal of files that were not used for long."""

import contextlib
import json
import os
import pathlib
import stat
import tempfile
from typing import Any

from pretrax.system.atomic import write_file
from pretrax.system.json_file import read_entries as read_entries


def own_directory() -> pathlib.Path:
    """`~/.cache/pretrax`, or below `XDG_CACHE_HOME`. Relative if the user has no home, as in some containers."""
    return pathlib.Path(os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')) / 'pretrax'


def cache_directory() -> pathlib.Path:
    """The cache directory, or a temporary directory of this user if the user has no home.

    Only for numbers, since other users may write there.
    """
    own = own_directory()
    return own if own.is_absolute() else pathlib.Path(tempfile.gettempdir()) / f'pretrax-{os.getuid()}'


def write_entries(path: pathlib.Path, entries: dict[str, Any]) -> str:
    """Writes the entries. Returns where they are kept, or why they are not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(entries, indent=1).encode())
    except OSError as error:
        return f'not kept ({path}: {error.strerror})'
    return f'kept in {path}'


def oldest_first(directory: pathlib.Path) -> list[tuple[pathlib.Path, int]]:
    """The files in a directory and below it, and their sizes in bytes, least recently used first."""
    files = []
    for path in directory.rglob('*'):
        try:
            status = path.lstat()
        except OSError:  # another process has removed it
            continue
        if stat.S_ISREG(status.st_mode):
            files.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    return [(path, size) for _, size, path in sorted(files)]


def remove(path: pathlib.Path) -> None:
    """Removes a file, unless it is gone or not ours to remove."""
    with contextlib.suppress(OSError):
        path.unlink()
