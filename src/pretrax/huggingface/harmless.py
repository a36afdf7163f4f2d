"""Fields of config.json that a decoder does without, each with the reason (harmless.yaml). Others are refused."""

import fnmatch
from pathlib import Path
from typing import Any

from pretrax.tables import read_table

_TABLES = read_table(Path(__file__).with_suffix('.yaml'))
_HARMLESS = [name for names in _TABLES['harmless'].values() for name in names.split()]
DROPOUT_FIELDS = tuple(_TABLES['dropout'].split())


def dropout_options(model_type: str) -> dict[str, list[str]]:
    """The options for each dropout field of a class."""
    rows = _TABLES['options_of_dropout']
    return {field: options.split() for field, options in rows.get(model_type, rows['others']).items()}


def is_harmless(name: str, value: Any) -> bool:
    """Whether a model that leaves this field out computes the same."""
    if name in _TABLES['at_these_values']:
        return any(type(value) is type(one) and value == one for one in _TABLES['at_these_values'][name])
    return name in DROPOUT_FIELDS or any(fnmatch.fnmatchcase(name, pattern) for pattern in _HARMLESS)
