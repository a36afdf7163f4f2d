"""Reads JSON from untrusted files: its size and depth are bounded before anything walks through it."""

import itertools
import json
from typing import Any

from pretrax.errors import UserError

LARGEST = 256 << 20  # bytes; the largest published tokenizer.json has 33 MB
DEEPEST = 100  # objects and lists inside one another
_PIECE = 1 << 20  # bytes of one read


def parse_json(content: str | bytes) -> Any:
    """The value in a text. Raises ValueError if it is not JSON, larger than `LARGEST`, or deeper than `DEEPEST`."""
    if len(content) > LARGEST:
        raise ValueError(f'larger than {LARGEST >> 20} MiB')
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(f'nested deeper than {DEEPEST} levels') from None
    level = [value]
    for _ in range(DEEPEST + 1):
        containers = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [below for container in containers for below in container if isinstance(below, dict | list)]
        if not level:
            return value
    raise ValueError(f'nested deeper than {DEEPEST} levels')


def read_json(path: Any) -> dict[str, Any]:
    """The JSON object in a file, on a disk or in a bucket. Raises UserError if there is none."""
    try:
        with path.open('rb') as file:
            pieces = iter(lambda: file.read(_PIECE), b'')  # a larger read would claim memory for all of it at once
            found = parse_json(b''.join(itertools.islice(pieces, LARGEST // _PIECE + 1)))
    except (OSError, ValueError) as error:
        raise UserError(f'{path}: not readable as JSON: {error}') from None
    if not isinstance(found, dict):
        raise UserError(f'{path}: expected a JSON object, not {type(found).__name__}')
    return found


def read_entries(path: Any) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no file, or if it is damaged."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_settings(path: Any) -> dict[str, Any]:
    """Reads the settings in a file; {} if there is no file."""
    return read_json(path) if path.is_file() else {}
