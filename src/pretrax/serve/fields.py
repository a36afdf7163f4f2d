"""Fields and values of other servers that ask this one for nothing, and those that it refuses, with the reasons.

The fields that the server has are those of serve/bodies.py; fields.yaml has the others.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

from pretrax.tables import read_table


@dataclasses.dataclass(frozen=True)
class Field:
    """How a field is read."""

    reason: str = ''  # why its other values are refused; empty: the server has the field
    neutral: tuple[Any, ...] | None = ()  # values that ask for nothing; None: all do
    same_as: str = ''  # another field; its value asks for nothing


_TABLES: dict[str, dict[str, Field]] = {
    kind: {
        name: Field(neutral=None)
        if about == 'unused'
        else Field(about.get('reason', ''), tuple(about.get('neutral', ())), about.get('same_as', ''))
        for name, about in table.items()
    }
    for kind, table in read_table(Path(__file__).with_suffix('.yaml')).items()
}
EVERYWHERE = _TABLES['everywhere']
COMPLETION = EVERYWHERE | _TABLES['generation'] | _TABLES['completion']
CHAT = EVERYWHERE | _TABLES['generation'] | _TABLES['chat']
EMBEDDING = EVERYWHERE | _TABLES['embedding']
MESSAGE, PART, STREAM_OPTIONS = (_TABLES[kind] for kind in ('message', 'part', 'stream_options'))
TOOLS = MESSAGE['tool_calls'].reason


def asked(body: Any, fields: Mapping[str, Field]) -> Any:
    """The fields of a JSON object that ask for something; another value as it is.

    Raises:
        PydanticCustomError: a field asks for something that this server does not do.
    """
    if not isinstance(body, dict):
        return body
    left = {name: value for name, value in body.items() if value is not None}
    for name, field in fields.items():
        if name not in left:
            continue
        neutral = (*(field.neutral or ()), left.get(field.same_as))
        if field.neutral is None or any(_same(left[name], value) for value in neutral):
            del left[name]
        elif field.reason:
            raise PydanticCustomError('unsupported', '{reason}', {'field': name, 'reason': field.reason})
    return left


def _same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal; 0 is not false."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
