"""Mixtures: several sources in one run, each with a weight that may change over the steps."""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pretrax.data.batches.assignment import Assignment, Exhausted, WeightSchedule
from pretrax.data.batches.source import BatchFunction, DataRequest, HostBatch, Source
from pretrax.data.batches.token_source import SHARE_FOR_BLOCKS, TokenSource, row_numbers
from pretrax.errors import UserError


class Member(NamedTuple):
    """A source of a mixture, with its share of the tokens over the steps."""

    name: str
    weight: WeightSchedule
    source: TokenSource


class Mixture(Source):
    """A `Source` that takes each row from one of its members. Every member has its own order and epochs.

    A row with padding has fewer tokens, so a member's share of the rows is its weight divided by the density of its
    rows. Each member is validated separately, with its share of the tokens at the end of the schedule as its weight.

    `rows_before`: step -> rows of all steps before it; None: every step has the `batch_rows` of the batch that is read.
    """

    def __init__(
        self, members: Sequence[Member], exhausted: Exhausted, rows_before: Callable[[int], int] | None = None
    ):
        self.members = members
        sources = [member.source for member in members]
        known = [(member.name, member.source.tokenizer) for member in members if member.source.tokenizer]
        for name, tokenizer in known[1:]:
            if tokenizer.sha256 != known[0][1].sha256:
                raise UserError(
                    f'data.mixture: {known[0][0]} and {name} were tokenized by different tokenizers\n'
                    '  tokenize both with the same one: data.tokenizer=path/to/tokenizer.json'
                )
        self.vocab_size = max(source.vocab_size for source in sources)
        self.largest_token = max(member.source.largest_token or 0 for member in members)
        self.tokenizer = next((source.tokenizer for source in sources if source.tokenizer), None)
        self.n_tokens = sum(source.train.tokens.n_tokens for source in sources)
        self.documents_per_row = max(source.documents_per_row or 1 for source in sources)
        self.fingerprint = ' '.join(f'{member.name}:{member.source.fingerprint}' for member in members)
        self._exhausted: Exhausted = exhausted
        self._rows_before = rows_before
        self.assignment = functools.lru_cache(self._assignment)
        last = [member.weight[-1][1] for member in members]
        constant = all(len({weight for _, weight in member.weight}) == 1 for member in members)
        # If the weights change, no single number describes the run.
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
        return Assignment(
            names,
            weights,
            [m.source.train.n for m in self.members],
            self._exhausted,
            self._rows_before or batch_rows.__mul__,
        )

    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch:
        number = row_numbers(rows, batch_rows)
        whole_blocks = len(number) >= SHARE_FOR_BLOCKS * batch_rows
        source, index = self.assignment(batch_rows)(step * batch_rows + number)
        positions = [np.flatnonzero(source == at) for at in range(len(self.members))]
        parts = [
            member.source.rows(index[here], whole_blocks)
            for member, here in zip(self.members, positions, strict=True)
            if len(here)
        ]
        back = np.argsort(np.concatenate([here for here in positions if len(here)]))
        return HostBatch(*(np.concatenate(arrays)[back] for arrays in zip(*parts, strict=True)))

    @property
    def source_names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    def row_sources(self, step: int, rows: slice, batch_rows: int) -> np.ndarray:
        return self.assignment(batch_rows)(step * batch_rows + row_numbers(rows, batch_rows))[0]

    @property
    def validation_parts(self) -> Mapping[str, tuple[float, BatchFunction]]:
        return self._validation_parts

    @property
    def reading(self) -> str | None:
        return next((found for member in self.members if (found := member.source.reading)), None)


def open_mixture(members: Sequence[Member], exhausted: Exhausted, request: DataRequest) -> Mixture:
    """Opens a mixture, and prints the share and the number of epochs of each source.

    Raises UserError if the sources have different tokenizers, or too few rows for the run.
    """
    mixture = Mixture(members, exhausted, request.rows_before)
    for one, other in itertools.permutations(members, 2):
        held_out = one.source.held_out
        if held_out is not None and held_out.tokens.fingerprint == other.source.train.tokens.fingerprint:
            request.say(f'validation: the tokens of {one.name} are also those that {other.name} trains on')
    begins = {m.name: m.source.tokenizer.shown_begin for m in members if m.source.tokenizer}
    if len(set(begins.values())) > 1:
        first, begin = next(iter(begins.items()))
        others = ', '.join(f'of {name} with {other}' for name, other in begins.items() if other != begin)
        request.say(f'mixture: documents of {first} begin with {begin}, as prompts do, and those {others}')
    if request.steps is None or request.rows_before is None:
        return mixture
    n_rows = request.rows_before(request.steps)
    assignment = mixture.assignment(n_rows)
    if assignment.end is not None and n_rows > assignment.end:
        most = bisect.bisect_right(range(request.steps), assignment.end, key=request.rows_before) - 1
        raise UserError(
            f'{assignment.why_it_ends()}\n'
            f'  the run needs {n_rows:,} in {request.steps:,} steps\n'
            f'  use steps={most} or less, data.exhausted=repeat, or more text'
        )
    for member, n in zip(members, assignment.counts(n_rows), strict=True):
        request.say(
            f'mixture: {member.name}: {n / n_rows:.1%} of the rows, {n:,} rows, {n / member.source.train.n:.2f} epochs'
        )
    return mixture


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value and weight]
    if len(known) < sum(weight > 0 for weight in weights) or not known:
        return None
    return math.fsum(value * weight for value, weight in known) / math.fsum(weight for _, weight in known)
