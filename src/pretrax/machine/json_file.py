"""Reading JSON files that may be missing."""

import json
from typing import Any

from pretrax.errors import UserError


def read_settings(path: Any) -> dict[str, Any]:
    """The JSON object in a file, on a disk or in a bucket; {} if there is no file. Raises UserError if it is no object."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f'{path}: not readable as JSON: {error}') from None
    if not isinstance(found, dict):
        raise UserError(f'{path}: expected a JSON object, not {type(found).__name__}')
    return found
