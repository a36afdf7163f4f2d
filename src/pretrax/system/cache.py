"""Caches measurements of this machine in small JSON files in the user's cache directory."""

import json
import os
import pathlib
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
