"""How each key of another tool's configuration is handled, and the values that follow."""

import dataclasses
import enum
import fnmatch
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pretrax.config.interpolation import escaped
from pretrax.config.problems import shown
from pretrax.errors import UserError

_NUMBER = re.compile(r'[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?')
_NAMES = 2  # of the keys behind a value, in its comment
_MISSING: Any = object()


class Fate(enum.StrEnum):
    """What happens to a key. The value is the heading of its list."""

    TRANSLATED = 'translated'
    CHANGED = 'changed in meaning'
    NO_EQUIVALENT = 'without an equivalent'
    NOT_NEEDED = 'not needed here'
    UNKNOWN = 'unknown'


@dataclasses.dataclass
class Translation:
    """A configuration of pretrax under construction."""

    tool: str  # name of the other tool, as its authors write it
    file: str  # name of its file, for messages
    given: Mapping[str, Any]  # what the file says: key -> value. The key of a nested value is dotted.
    defaults: Mapping[str, Any]  # values of the tool for keys that the file leaves out, as far as they matter
    source: str  # where the tool has these defaults
    values: dict[str, Any] = dataclasses.field(default_factory=dict)  # dotted key of pretrax -> value
    # Dotted key of pretrax -> where its value comes from
    comments: dict[str, str] = dataclasses.field(default_factory=dict)
    # Key of the other tool -> how it is handled, and the reason
    fates: dict[str, tuple[Fate, str]] = dataclasses.field(default_factory=dict)

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """What the file says, or else the default of the tool. Without `default`, one of the two exists."""
        value = self.given.get(key, self.defaults.get(key, default))
        assert value is not _MISSING, key
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The value of a key as a number. Raises UserError."""
        value = self.get(key, default)
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            value = float(value)  # PyYAML reads 1e-4 as text
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
            raise self.mistake(key, value, 'a number')
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """The value of a key as an integer. Raises UserError."""
        value = self.number(key, default)
        if value != int(value):
            raise self.mistake(key, value, 'an integer')
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """The value of a key as true or false. Raises UserError."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.mistake(key, value, 'true or false')
        return value

    def text(self, key: str, default: str = '') -> str:
        """The value of a key as text; '' for null. Raises UserError."""
        value = self.get(key, default)
        if value is not None and not isinstance(value, str):
            raise self.mistake(key, value, 'text')
        return value or ''

    def mistake(self, key: str, value: Any, expected: str) -> UserError:
        return UserError(f'{self.file}: {key} is {shown(value)}; expected {expected}')

    def set(self, target: str, value: Any, *keys: str, note: str = '') -> None:
        """Sets a value of pretrax that follows from these keys. `note` replaces their names in the comment."""
        given = [key for key in keys if key in self.given]
        for key in given:
            self.fates.setdefault(key, (Fate.TRANSLATED, target))
        names = [*(given or keys)]
        more = ', ...' if len(names) > _NAMES else ''
        default = '' if given or not keys else f' (default of {self.source})'
        self.values[target] = escaped(value) if isinstance(value, str) else value
        self.comments[target] = f'{note or ", ".join(names[:_NAMES]) + more}{default}'

    def changed(self, reason: str, *keys: str) -> None:
        """Records that keys are translated with a slightly different meaning. Replaces an earlier record."""
        self._decide(Fate.CHANGED, reason, keys)

    def no_equivalent(self, instead: str, *keys: str) -> None:
        """pretrax has nothing like these keys; `instead` says what to do."""
        self._decide(Fate.NO_EQUIVALENT, instead, keys)

    def not_needed(self, reason: str, *keys: str) -> None:
        """These keys say nothing that a configuration of pretrax has to say."""
        self._decide(Fate.NOT_NEEDED, reason, keys)

    def matching(self, *patterns: str) -> list[str]:
        """Keys of the file that match one of the patterns and are not handled yet."""
        return [
            key
            for key in self.given
            if key not in self.fates and any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
        ]

    def finish(self) -> None:
        """Marks every key that nothing has accounted for as unknown, so that none is dropped silently."""
        reason = f'not a key of {self.tool} that this translation knows; it has no effect here'
        self._decide(Fate.UNKNOWN, reason, [key for key in self.given if key not in self.fates])

    def grouped_keys(self, fate: Fate) -> dict[str, list[str]]:
        """The keys that are handled in this way, grouped by reason, in the order of the file."""
        groups: dict[str, list[str]] = {}
        for key in self.given:
            found, reason = self.fates[key]
            if found is fate:
                groups.setdefault(reason, []).append(key)
        return groups

    def _decide(self, fate: Fate, reason: str, keys: Iterable[str]) -> None:
        for key in keys:
            if key in self.given:
                self.fates[key] = fate, reason


def run_name(*candidates: str) -> str:
    """The first text that is not empty, in the letters that the name of a run may have."""
    text = next(filter(None, candidates), 'translated')
    return re.sub(r'[^A-Za-z0-9._-]+', '-', text).strip('-.')[:100] or 'translated'


POINTS = 32  # with straight lines between them, no rate differs from the cosine by more than 0.1% of the peak


def cosine_points(warmup: int, end: int, steps: int, final: float, after: float) -> list[list[float]]:
    """[[step, multiplier], ...]: half a cosine from 1 at `warmup` to `final` at `end`, then `after` until `steps`.

    Points after the last step are left out, except the first of them.
    """
    share = [number / POINTS for number in range(POINTS + 1)]
    at = [round(warmup + part * (end - warmup)) for part in share]
    height = [final + (1 - final) * 0.5 * (1 + math.cos(math.pi * part)) for part in share]
    points = dict(zip(at, height, strict=True)) | ({end + 1: after} if end < steps else {})
    last = next((step for step in points if step >= steps), steps)
    return [[step, round(value, 6)] for step, value in points.items() if step <= last]
