"""What was measured on this machine and is remembered: small JSON files in the user's cache directory."""

import json
import os
import pathlib
import tempfile
from typing import Any

from pretrax.machine.atomic import write_file


def own_directory() -> pathlib.Path:
    """`~/.cache/pretrax`; `XDG_CACHE_HOME` is respected. Relative where the user, such as a container's, has no home."""
    return pathlib.Path(os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')) / 'pretrax'


def cache_directory() -> pathlib.Path:
    """The same, or one for temporary files: for numbers, which others may write."""
    own = own_directory()
    return own if own.is_absolute() else pathlib.Path(tempfile.gettempdir()) / 'pretrax'


def read_entries(path: pathlib.Path) -> dict[str, Any]:
    """What a file remembers by its keys; nothing if there is no file, or it is not readable, or it is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_entries(path: pathlib.Path, entries: dict[str, Any]) -> str:
    """Keep the entries and say where; a place that cannot be written costs a measurement each time, not the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(entries, indent=1).encode())
    except OSError as error:
        return f'not kept ({path}: {error.strerror})'
    return f'kept in {path}'
