"""Assigns each row of a run to one of several sources, as a pure function of the row's number in the run.

The weights of the sources are functions of the step. They divide the run into phases, in which the shares are constant.
Each phase has a whole number of rows of each source, and interleaves the sources as evenly as whole rows allow. Only a
short table of phases is stored, so any step is found without a search through the run, and the rows of each source come
in order.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from pretrax.errors import UserError

type WeightSchedule = Sequence[tuple[int, float]]  # (step, weight) pairs; linear in between, constant outside
type Exhausted = Literal['repeat', 'stop', 'drop']

RAMP = 256  # phases of a ramp between two steps of a schedule; one per step if the ramp has fewer steps
PERIOD = 1 << 20  # rows after which a longer phase repeats: weights are exact to one part in a million


class Phase(NamedTuple):
    """Consecutive rows of the run that interleave the sources in one pattern."""

    first: int  # number of the first row
    before: list[int]  # rows of each source before the phase
    counts: list[int]  # rows of each source in a period; the pattern repeats to the end of the phase


class Assignment:
    """The source of every row of a run, and the row's number in its source.

    Args:
        weights: weight of each source by step, counted in token positions, padding included.
        rows: number of rows in each source.
        exhausted: what happens when a source is used up: it starts again ('repeat'), the run ends ('stop'), or its
            share goes to the others in proportion to their weights, until all are used up ('drop').
        rows_before: step -> rows of all steps before it.

    Attributes:
        end: the number of rows in the run until the sources are used up; None if they never are.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[WeightSchedule],
        rows: Sequence[int],
        exhausted: Exhausted,
        rows_before: Callable[[int], int],
    ):
        self._names, self._limits, self._exhausted = names, rows, exhausted
        self._phases: list[Phase] = []
        self.end: int | None = None
        self._before = [0] * len(names)
        self._owed = [0.0] * len(names)  # rows due to each source by its share and not yet assigned, below one row
        edges = _edges(weights)
        for start, stop in zip(edges, [*edges[1:], None], strict=True):
            middle = start if stop is None else (start + stop - 1) / 2
            shares = [_weight(schedule, middle) for schedule in weights]
            if not any(shares):
                raise UserError(f'data.mixture: all weights are 0 at step {start}\n  give one source a weight above 0')
            self._add_phases(rows_before(start), None if stop is None else rows_before(stop), shares)
            if self.end is not None:
                break
        self._firsts = np.array([phase.first for phase in self._phases])

    def __call__(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each row, and the row's number in that source, both int64 [R].

        Args:
            number: int64 [R], numbers of the rows in the run.

        Raises:
            UserError: a row is past `end`.
        """
        if self.end is not None and number.size and number.max() >= self.end:
            raise UserError(self.why_it_ends())
        source, index = np.empty_like(number), np.empty_like(number)
        which = np.searchsorted(self._firsts, number, side='right') - 1
        for at in np.unique(which).tolist():
            here, phase = np.flatnonzero(which == at), self._phases[at]
            period, position = np.divmod(number[here] - phase.first, sum(phase.counts))
            source[here], index[here] = _deal(position, phase.counts)
            index[here] += np.array(phase.before)[source[here]] + period * np.array(phase.counts)[source[here]]
        return source, index

    def counts(self, number: int) -> list[int]:
        """How many of the first `number` rows of the run are from each source."""
        phase = self._phases[max(0, int(np.searchsorted(self._firsts, number, side='right')) - 1)]
        return _counts(phase, number - phase.first)

    def why_it_ends(self) -> str:
        """The message for a run that needs more than `end` rows."""
        assert self.end is not None
        counts = zip(self._names, self.counts(self.end), self._limits, strict=True)
        used = ' and '.join(name for name, n, limit in counts if n >= limit)
        return f'data.mixture: {used} used up after {self.end:,} rows (data.exhausted={self._exhausted})'

    def _add_phases(self, first: int, stop: int | None, shares: list[float]) -> None:
        """Adds one phase for the rows [first, stop), or several if sources are used up within them."""
        while True:
            if self._exhausted == 'drop':
                shares = [
                    0.0 if used >= limit else share
                    for share, used, limit in zip(shares, self._before, self._limits, strict=True)
                ]
            if not any(shares):
                self.end = first
                return
            period = PERIOD if stop is None else min(PERIOD, stop - first)
            due = [share / math.fsum(shares) * period for share in shares]
            owed = [old if share else 0.0 for old, share in zip(self._owed, shares, strict=True)]
            counts = _apportion([a + b for a, b in zip(due, owed, strict=True)], shares, period)
            phase = Phase(first, self._before, counts)
            self._phases.append(phase)
            if self._exhausted != 'repeat' and (empty := self._first_missing_row(phase, stop)) is not None:
                if self._exhausted == 'stop':
                    self.end = first + empty
                    return
                self._before = _counts(phase, empty)
                self._owed = [0.0] * len(shares)
                first += empty
                continue
            if stop is not None:
                self._before = _counts(phase, stop - first)
                exact = stop - first == period
                self._owed = [a + b - c if exact else 0.0 for a, b, c in zip(due, owed, counts, strict=True)]
            return

    def _first_missing_row(self, phase: Phase, stop: int | None) -> int | None:
        """The first row of a phase whose source has no row left; None if there is no such row."""

        def is_exhausted(n: int) -> bool:
            return any(used > limit for used, limit in zip(_counts(phase, n), self._limits, strict=True))

        low = 0
        high = min(
            ((limit - before) // count + 2) * sum(phase.counts)
            for before, count, limit in zip(phase.before, phase.counts, self._limits, strict=True)
            if count
        )
        high = high if stop is None else min(high, stop - phase.first)
        if not is_exhausted(high):
            return None
        while high - low > 1:  # bisection: is_exhausted(high) and not is_exhausted(low)
            middle = (low + high) // 2
            low, high = (low, middle) if is_exhausted(middle) else (middle, high)
        return low


def _edges(weights: Sequence[WeightSchedule]) -> list[int]:
    """The steps at which phases start."""
    knots = sorted({0, *(step for schedule in weights for step, _ in schedule)})
    edges = []
    for start, stop in itertools.pairwise(knots):
        ramps = any(_weight(schedule, start) != _weight(schedule, stop) for schedule in weights)
        phases = min(RAMP, stop - start) if ramps else 1
        edges += [start + (stop - start) * phase // phases for phase in range(phases)]
    return [*edges, knots[-1]]


def _weight(schedule: WeightSchedule, step: float) -> float:
    steps, weights = zip(*schedule, strict=True)
    return float(np.interp(step, steps, weights))


def _apportion(due: list[float], shares: list[float], period: int) -> list[int]:
    """Rounds `due` to whole numbers that add up to `period`, by the largest-remainder method."""
    counts = [max(0, math.floor(value)) if share else 0 for value, share in zip(due, shares, strict=True)]
    while (left := period - sum(counts)) > 0:
        open_to = [at for at, share in enumerate(shares) if share]
        for at in sorted(open_to, key=lambda at: counts[at] - due[at])[:left]:
            counts[at] += 1
    while sum(counts) > period:
        counts[max((at for at, n in enumerate(counts) if n), key=lambda at: counts[at] - due[at])] -= 1
    return counts


def _before[T: (int, np.ndarray)](n: T, left: int, total: int) -> T:
    """How many of the first n rows of a node go left if `left` of `total` do; the error is at most a half."""
    return (n * left + total // 2) // total


def _deal(n: np.ndarray, counts: Sequence[int], first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The source of each row n in range(sum(counts)), and its number there; halves the list of sources recursively."""
    if len(counts) == 1:
        return np.full_like(n, first), n
    middle = len(counts) // 2
    left, total = sum(counts[:middle]), sum(counts)
    if total == 0:
        return np.full_like(n, first), n
    before = _before(n, left, total)
    goes = _before(n + 1, left, total) > before
    a = _deal(np.where(goes, before, 0), counts[:middle], first)
    b = _deal(np.where(goes, 0, n - before), counts[middle:], first + middle)
    return np.where(goes, a[0], b[0]), np.where(goes, a[1], b[1])


def _counts(phase: Phase, n: int) -> list[int]:
    """The number of rows of each source before row n of a phase."""
    period, rest = divmod(n, sum(phase.counts))

    def dealt(n: int, counts: list[int]) -> list[int]:
        if len(counts) == 1 or not n:
            return [n] + [0] * (len(counts) - 1)
        middle = len(counts) // 2
        left = _before(n, sum(counts[:middle]), sum(counts))
        return dealt(left, counts[:middle]) + dealt(n - left, counts[middle:])

    within = dealt(rest, phase.counts)
    return [a + period * b + c for a, b, c in zip(phase.before, phase.counts, within, strict=True)]
