"""What a user may set, declared once: options of the command line, and settings that files and requests have too.

Neither typer nor pydantic is imported before it is used.
"""

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any

REQUIRED: Any = dataclasses.MISSING


def option(help_text: str, *names: str, default: Any = None, **more: Any) -> Any:
    """A field of a dataclass, or the default of a parameter, that is an option of a verb (`cli/_options.py`).

    Its name is that of the field, unless one of `names` begins with two dashes. Named after its field, an option that
    is false by default has no opposite. `more` are other arguments of `typer.Option`. An option whose default is
    `REQUIRED` has to be given.
    """
    return dataclasses.field(default=default, metadata={'option': (names, {'help': help_text, **more})})


def argument(help_text: str, *, default: Any = REQUIRED, **more: Any) -> Any:
    """Like `option`, but an argument without a name; `more`: other arguments of `typer.Argument`."""
    return dataclasses.field(default=default, metadata={'argument': {'help': help_text, **more}})


@dataclasses.dataclass(frozen=True)
class Setting:
    """The meaning and the range of a number, in an `Annotated` type. Pydantic reads the range."""

    meaning: str  # the help of the option, and the description of the key
    expected: str  # the range in words
    # ge, gt, le: the least value, a value below all others, and the largest value; None: no such bound
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    kind: type[int] | type[float] = float  # int, or float for finite numbers

    __is_annotated_types_grouped_metadata__ = True  # pydantic asks `__iter__` for its own constraints

    def __iter__(self) -> Iterator[Any]:
        from pydantic import Field

        finite = False if self.kind is float else None
        yield from Field(ge=self.ge, gt=self.gt, le=self.le, allow_inf_nan=finite).metadata

    def accepts(self, value: Any) -> bool:
        """Whether a value from JSON or from a command line is in the range; a boolean is not a number."""
        is_number = isinstance(value, int | self.kind) and not isinstance(value, bool) and math.isfinite(value)
        return (
            is_number
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (value <= self.le if self.le is not None else self.kind is float or value < 2**63)
        )


def setting_of(annotation: Any) -> Setting | None:
    """The setting of `Annotated[T, Setting(...)]`, or of such a type or None; None if there is none."""
    for each in (annotation, *typing.get_args(annotation)):
        for metadata in getattr(each, '__metadata__', ()):
            if isinstance(metadata, Setting):
                return metadata
    return None
