"""Curves of a run that may have millions of lines, with a bounded number of points each.

While a key has at most `MOST_POINTS` numbers, each point is a number of the file. With more, a point stands for 2, 4,
8, ... numbers that follow each other: for their mean, minimum and maximum.
"""

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from pretrax.view.record.columns import Columns

MOST_POINTS = 4096
MOST_KEYS = 500
TIME = 'time'  # the curve with the time of each line, in seconds since 1970
_NAMED = 100  # nonfinite numbers of a curve that are kept


class Points(NamedTuple):
    """Arrays of the same length."""

    steps: np.ndarray  # int64, of the last number of each point
    # means, lows, highs: float64, of the finite numbers of each point; NaN: it has none
    means: np.ndarray
    lows: np.ndarray
    highs: np.ndarray
    finite: np.ndarray  # int64, how many numbers of each point are finite

    def part(self, where: slice) -> 'Points':
        return Points(*(array[where] for array in self))


type Change = dict[str, Any]  # from `Curve.change`


class Curve:
    """The numbers of one key.

    Attributes:
        per_point: how many numbers a point stands for; the last point may stand for fewer.
        count: how many numbers there are.
        nonfinite: (step, 'nan', 'inf' or '-inf') of the newest numbers that are not finite.
        nonfinite_count: how many numbers are not finite.
        changed: index of the first point that has changed since it was last set to None; None: no point has changed.
    """

    def __init__(self) -> None:
        self.per_point, self.count, self.nonfinite_count = 1, 0, 0
        self.changed: int | None = None
        self.last = float('nan')  # the newest number
        self.points = Points(np.zeros(0, np.int64), np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
        self.nonfinite: deque[tuple[int, str]] = deque(maxlen=_NAMED)

    def extend(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Appends numbers: int64 steps and float64 values of the same length."""
        if not len(steps):
            return
        nonfinite = np.flatnonzero(~np.isfinite(values))
        self.nonfinite_count += len(nonfinite)
        for index in nonfinite[-_NAMED:]:
            self.nonfinite.append((int(steps[index]), str(float(values[index]))))
        self.last = float(values[-1])
        while self.count + len(steps) > MOST_POINTS * self.per_point:
            self._halve()
        room = len(self.points.steps) * self.per_point - self.count  # of the last point
        starts = np.maximum(np.arange(room - self.per_point if room else 0, len(steps), self.per_point), 0)
        new, old = _points(steps, values, starts), self.points
        if room:
            joined = _combined(old.part(slice(-1, None)), new.part(slice(0, 1)))
            old, new = old.part(slice(0, -1)), _concatenated(joined, new.part(slice(1, None)))
        self.changed = len(old.steps) if self.changed is None else min(self.changed, len(old.steps))
        self.points = _concatenated(old, new)
        self.count += len(steps)

    def replaces(self, other: 'Curve') -> None:
        """Sets `changed` to the first point that differs from the curve that this one replaces."""
        self.changed = 0
        if self.per_point == other.per_point:
            lengths = len(self.points.steps), len(other.points.steps)
            length = min(lengths)
            pairs = [(a[:length], b[:length]) for a, b in zip(self.points, other.points, strict=True)]
            differ = np.any([~((a == b) | ((a != a) & (b != b))) for a, b in pairs], axis=0)
            is_same = not differ.any()
            self.changed = None if is_same and len(set(lengths)) == 1 else length if is_same else int(np.argmax(differ))

    def change(self, start: int) -> Change:
        """The points from an index on, which replace those that a client has from there on; None: not finite.

        `low` and `high` are empty while each point is one number. `nonfinite` counts those of the whole curve.
        """
        points = self.points.part(slice(start, None))
        one_each = self.per_point == 1
        return {
            'start': start,
            'per_point': self.per_point,
            'step': points.steps.tolist(),
            'value': _numbers(points.means),
            'low': [] if one_each else _numbers(points.lows),
            'high': [] if one_each else _numbers(points.highs),
            'nonfinite': list(self.nonfinite),
        }

    def _halve(self) -> None:
        """Makes one point of two."""
        even = len(self.points.steps) // 2 * 2
        pairs = _combined(self.points.part(slice(0, even, 2)), self.points.part(slice(1, even, 2)))
        self.points = _concatenated(pairs, self.points.part(slice(even, None)))
        self.per_point *= 2
        self.changed = 0


class Curves:
    """The curves of a run, by key. With more than `MOST_KEYS`, the first ones. 'time' is the time of each line."""

    def __init__(self) -> None:
        self.by_key: dict[str, Curve] = {}
        self.lines = self.skipped = 0  # lines of metrics, and other lines
        self.last_step: int | None = None

    def extend(self, columns: Columns) -> None:
        """Appends lines."""
        self.lines += len(columns.steps)
        self.skipped += columns.skipped
        if len(columns.steps):
            self.last_step = int(columns.steps[-1])
        for key, column in columns.items():
            if key in self.by_key or len(self.by_key) < MOST_KEYS:
                self.by_key.setdefault(key, Curve()).extend(column.steps, column.values)
        known = np.isfinite(columns.times)
        if known.any():
            self.by_key.setdefault(TIME, Curve()).extend(columns.steps[known], columns.times[known])

    def replaces(self, other: 'Curves') -> None:
        """Finds the points that differ from the curves that these replace."""
        for key, curve in self.by_key.items():
            if key in other.by_key:
                curve.replaces(other.by_key[key])

    def changes(self) -> dict[str, Change]:
        """The points that changed since the last call, by key."""
        found = {key: curve.change(curve.changed) for key, curve in self.by_key.items() if curve.changed is not None}
        for key in found:
            self.by_key[key].changed = None
        return found

    def whole(self) -> dict[str, Change]:
        """All points, by key."""
        return {key: curve.change(0) for key, curve in self.by_key.items()}


def _points(steps: np.ndarray, values: np.ndarray, starts: np.ndarray) -> Points:
    """One point for the numbers from each start to the next one."""
    is_finite = np.isfinite(values)
    finite = np.add.reduceat(is_finite.astype(np.int64), starts)
    with np.errstate(over='ignore', invalid='ignore'):
        sums = np.add.reduceat(np.where(is_finite, values, 0.0), starts)
        means = np.where(finite > 0, sums / np.maximum(finite, 1), np.nan)
    known = np.where(is_finite, values, np.nan)
    ends = np.append(starts[1:], len(steps)) - 1
    return Points(steps[ends], means, np.fmin.reduceat(known, starts), np.fmax.reduceat(known, starts), finite)


def _combined(first: Points, second: Points) -> Points:
    """Points that stand for the numbers of two points each."""
    finite = first.finite + second.finite
    with np.errstate(over='ignore', invalid='ignore'):
        sums = sum(np.where(one.finite > 0, one.means * one.finite, 0.0) for one in (first, second))
        means = np.where(finite > 0, sums / np.maximum(finite, 1), np.nan)
    return Points(second.steps, means, np.fmin(first.lows, second.lows), np.fmax(first.highs, second.highs), finite)


def _concatenated(first: Points, second: Points) -> Points:
    return Points(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))


def _numbers(values: np.ndarray) -> list[float | None]:
    return [value if -np.inf < value < np.inf else None for value in values.tolist()]
