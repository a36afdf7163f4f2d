"""Several sources in one run: which source each row is from, as a pure function of its number in the run.

The weights of the sources, functions of the step, make treads: stretches of the run in which the shares are constant.
Each tread has whole numbers of rows of each source, and the sources alternate in it as evenly as whole rows can. What is
stored is a short table of treads, so any step is found at once, and every row of a source comes in its turn.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from pretrax.data.batches.source import BatchFunction, DataRequest, HostBatch, Source
from pretrax.data.batches.token_source import SHARE_FOR_BLOCKS, TokenSource, row_numbers
from pretrax.errors import UserError

type Schedule = Sequence[tuple[int, float]]  # (step, weight), linear in between and constant outside
type Exhausted = Literal['repeat', 'stop', 'drop']

RAMP = 256  # treads of a ramp between two steps of a schedule, or one for each step where that is less
PERIOD = 1 << 20  # rows after which a longer tread repeats: weights are kept to one part in a million


class Tread(NamedTuple):
    """Rows of the run in which sources alternate in one pattern.

    Attributes:
        first: number of its first row.
        before: rows of each source before it.
        counts: rows of each source in a period; the pattern repeats as long as the tread lasts.
    """

    first: int
    before: list[int]
    counts: list[int]


class Assignment:
    """The source of every row of a run, and the row's number among those of its source.

    Args:
        names: of the sources, for messages.
        weights: of the sources, by step, in places a row offers (those of padding included).
        rows: rows that each source has. When they are used up: it begins again ('repeat'), the run cannot go on
            ('stop'), or the others share its part in proportion to their weights ('drop'), until there is none.
        batch_rows: rows a step.

    Attributes:
        end: the number of rows after which nothing is left; None where there is no end.
    """

    def __init__(
        self, names: Sequence[str], weights: Sequence[Schedule], rows: Sequence[int], exhausted: Exhausted,
        batch_rows: int,
    ):  # fmt: skip
        self._names, self._limits, self._exhausted = names, rows, exhausted
        self._treads: list[Tread] = []
        self.end: int | None = None
        self._before = [0] * len(names)
        self._owed = [0.0] * len(names)  # what is due to each source by its shares and was no whole row
        edges = _edges(weights)
        for start, stop in zip(edges, [*edges[1:], None], strict=True):
            middle = start if stop is None else (start + stop - 1) / 2
            shares = [_weight(schedule, middle) for schedule in weights]
            if not any(shares):
                raise UserError(f'data.mixture: at step {start} all weights are 0\n  give one source a weight')
            self._lay(start * batch_rows, None if stop is None else stop * batch_rows, shares)
            if self.end is not None:
                break
        self._firsts = np.array([tread.first for tread in self._treads])

    def __call__(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [R], numbers of rows in the run -> the source of each, and its number in the source, int64 [R].

        Raises UserError past `end`.
        """
        if self.end is not None and number.size and number.max() >= self.end:
            raise UserError(self.ends())
        source, index = np.empty_like(number), np.empty_like(number)
        which = np.searchsorted(self._firsts, number, side='right') - 1
        for at in np.unique(which).tolist():
            here, tread = np.flatnonzero(which == at), self._treads[at]
            period, place = np.divmod(number[here] - tread.first, sum(tread.counts))
            source[here], index[here] = _deal(place, tread.counts)
            index[here] += np.array(tread.before)[source[here]] + period * np.array(tread.counts)[source[here]]
        return source, index

    def counts(self, number: int) -> list[int]:
        """How many of the first `number` rows of the run are from each source."""
        tread = self._treads[max(0, int(np.searchsorted(self._firsts, number, side='right')) - 1)]
        return _counts(tread, number - tread.first)

    def ends(self) -> str:
        """Why there is no more after `end`."""
        assert self.end is not None
        counts = zip(self._names, self.counts(self.end), self._limits, strict=True)
        used = ' and '.join(name for name, n, limit in counts if n >= limit)
        return f'data.mixture: {used} used up after {self.end:,} rows (data.exhausted={self._exhausted})'

    def _lay(self, first: int, stop: int | None, shares: list[float]) -> None:
        """One tread for rows first to stop, or several where sources are used up on the way."""
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
            tread = Tread(first, self._before, counts)
            self._treads.append(tread)
            if self._exhausted != 'repeat' and (empty := self._first_row_too_many(tread, stop)) is not None:
                if self._exhausted == 'stop':
                    self.end = first + empty
                    return
                self._before = _counts(tread, empty)
                self._owed = [0.0] * len(shares)
                first += empty
                continue
            if stop is not None:
                self._before = _counts(tread, stop - first)
                exact = stop - first == period
                self._owed = [a + b - c if exact else 0.0 for a, b, c in zip(due, owed, counts, strict=True)]
            return

    def _first_row_too_many(self, tread: Tread, stop: int | None) -> int | None:
        """The first row of a tread that is from a source with no row left, None where there is none."""

        def too_many(n: int) -> bool:
            return any(used > limit for used, limit in zip(_counts(tread, n), self._limits, strict=True))

        low, high = (
            0,
            min(
                ((limit - before) // count + 2) * sum(tread.counts)
                for before, count, limit in zip(tread.before, tread.counts, self._limits, strict=True)
                if count
            ),
        )
        high = high if stop is None else min(high, stop - tread.first)
        if not too_many(high):
            return None
        while high - low > 1:  # too_many(high), not too_many(low)
            middle = (low + high) // 2
            low, high = (low, middle) if too_many(middle) else (middle, high)
        return low


class Member(NamedTuple):
    """A source of a mixture: its weight by tokens, over the steps."""

    name: str
    weight: Schedule
    source: TokenSource


class Mixture(Source):
    """A `Source` that takes each row from one of its members; every member keeps its own order and epochs.

    A row with padding has fewer tokens, so a member's share of the rows is its weight over the density of its rows.
    Validation is of each member apart, `validation_parts`: its share of the tokens at the end of the schedule, and its
    batches.
    """

    def __init__(self, members: Sequence[Member], exhausted: Exhausted):
        self.members = members
        sources = [member.source for member in members]
        _check_tokenizers(members)
        self.vocab_size = max(source.vocab_size for source in sources)
        self.tokenizer = next((source.tokenizer for source in sources if source.tokenizer), None)
        self.n_tokens = sum(source.train.tokens.n_tokens for source in sources)
        self.documents_per_row = max(source.documents_per_row or 1 for source in sources)
        self.fingerprint = ' '.join(f'{member.name}:{member.source.fingerprint}' for member in members)
        self._exhausted: Exhausted = exhausted
        self.assignment = functools.lru_cache(self._assignment)
        last = [member.weight[-1][1] for member in members]
        constant = all(len({weight for _, weight in member.weight}) == 1 for member in members)
        # The tokens that a step mixes stand for so many bytes; no one number does where the weights change.
        self.bytes_per_token = _mean([s.bytes_per_token for s in sources], last) if constant else None
        held_out = [(w, member) for w, member in zip(last, members, strict=True) if member.source.validation and w]
        total = math.fsum(weight for weight, _ in held_out)
        self._validation_parts: dict[str, tuple[float, BatchFunction]] = {
            member.name: (weight / total, member.source.validation)
            for weight, member in held_out
            if member.source.validation
        }
        self.validation_bytes_per_token = _mean(
            [member.source.validation_bytes_per_token for _, member in held_out], [weight for weight, _ in held_out]
        )

    def _assignment(self, batch_rows: int) -> Assignment:
        weights = [
            [(step, weight / member.source.train.density) for step, weight in member.weight] for member in self.members
        ]
        names = [member.name for member in self.members]
        return Assignment(names, weights, [m.source.train.n for m in self.members], self._exhausted, batch_rows)

    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch:
        number = row_numbers(rows, batch_rows)
        whole_blocks = len(number) >= SHARE_FOR_BLOCKS * batch_rows
        source, index = self.assignment(batch_rows)(step * batch_rows + number)
        places = [np.flatnonzero(source == at) for at in range(len(self.members))]
        parts = [
            member.source.rows(index[here], whole_blocks)
            for member, here in zip(self.members, places, strict=True)
            if len(here)
        ]
        back = np.argsort(np.concatenate([here for here in places if len(here)]))
        return HostBatch(*(np.concatenate(arrays)[back] for arrays in zip(*parts, strict=True)))

    @property
    def validation_parts(self) -> Mapping[str, tuple[float, BatchFunction]]:
        return self._validation_parts

    @property
    def reading(self) -> str | None:
        """What is being read at this moment, for the report of a stall."""
        return next((found for member in self.members if (found := member.source.reading)), None)


def open_mixture(members: Sequence[Member], exhausted: Exhausted, request: DataRequest) -> Mixture:
    """A mixture of open sources, and a word on how far each goes.

    Raises UserError where the sources do not go together, or the run has more steps than they have rows.
    """
    mixture = Mixture(members, exhausted)
    if request.steps is None or request.batch_rows is None:
        return mixture
    assignment = mixture.assignment(request.batch_rows)
    n_rows = request.steps * request.batch_rows
    if assignment.end is not None and n_rows > assignment.end:
        raise UserError(
            f'{assignment.ends()}\n  the run needs {n_rows:,}: {request.steps:,} steps of {request.batch_rows:,}\n'
            f'  use steps={assignment.end // request.batch_rows} or less, data.exhausted=repeat, or more text'
        )
    for member, n in zip(members, assignment.counts(n_rows), strict=True):
        request.say(
            f'mixture: {member.name}: {n / n_rows:.1%} of the rows of the run, {n:,} rows, '
            f'{n / member.source.train.n:.2f} epochs'
        )
    return mixture


def _check_tokenizers(members: Sequence[Member]) -> None:
    known = [(member.name, member.source.tokenizer) for member in members if member.source.tokenizer]
    for name, tokenizer in known[1:]:
        if tokenizer.sha256 != known[0][1].sha256:
            raise UserError(
                f'data.mixture: {known[0][0]} and {name} were tokenised by different tokenizers\n'
                '  tokenise them with one: data.tokenizer=path/to/tokenizer.json'
            )


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value and weight]
    if len(known) < sum(weight > 0 for weight in weights) or not known:
        return None
    return math.fsum(value * weight for value, weight in known) / math.fsum(weight for _, weight in known)


def _edges(weights: Sequence[Schedule]) -> list[int]:
    """The steps at which treads begin."""
    knots = sorted({0, *(step for schedule in weights for step, _ in schedule)})
    edges = []
    for start, stop in itertools.pairwise(knots):
        ramps = any(_weight(schedule, start) != _weight(schedule, stop) for schedule in weights)
        treads = min(RAMP, stop - start) if ramps else 1
        edges += [start + (stop - start) * tread // treads for tread in range(treads)]
    return [*edges, knots[-1]]


def _weight(schedule: Schedule, step: float) -> float:
    steps, weights = zip(*schedule, strict=True)
    return float(np.interp(step, steps, weights))


def _apportion(due: list[float], shares: list[float], period: int) -> list[int]:
    """Whole numbers that add up to `period`, each as near to what is due as can be, by largest remainder."""
    counts = [max(0, math.floor(value)) if share else 0 for value, share in zip(due, shares, strict=True)]
    while (left := period - sum(counts)) > 0:
        open_to = [at for at, share in enumerate(shares) if share]
        for at in sorted(open_to, key=lambda at: counts[at] - due[at])[:left]:
            counts[at] += 1
    while sum(counts) > period:
        counts[max((at for at, n in enumerate(counts) if n), key=lambda at: counts[at] - due[at])] -= 1
    return counts


def _before[T: (int, np.ndarray)](n: T, left: int, total: int) -> T:
    """How many of the first n rows of a node go left, when `left` of `total` do: never off by more than a half."""
    return (n * left + total // 2) // total


def _deal(n: np.ndarray, counts: Sequence[int], first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows n, each in range(sum(counts)), dealt to sources by halving the list of sources again and again."""
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


def _counts(tread: Tread, n: int) -> list[int]:
    """The rows of each source before row n of a tread."""
    period, rest = divmod(n, sum(tread.counts))

    def dealt(n: int, counts: list[int]) -> list[int]:
        if len(counts) == 1 or not n:
            return [n] + [0] * (len(counts) - 1)
        middle = len(counts) // 2
        left = _before(n, sum(counts[:middle]), sum(counts))
        return dealt(left, counts[:middle]) + dealt(n - left, counts[middle:])

    within = dealt(rest, tread.counts)
    return [a + period * b + c for a, b, c in zip(tread.before, tread.counts, within, strict=True)]
