"""The sizes of the batches of a run, which may grow at given steps.

    [[0, 131072], [1000, 262144]]   # 131072 for the first 1000 steps, then 262144

It is a list, not a mapping, so that a schedule on the command line replaces that of a file as a whole.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from pretrax.config.problems import Problem

type ByStep = tuple[tuple[int, int], ...]  # (step, value from this step on)


class BatchSize(NamedTuple):
    """The size of a batch, over all devices."""

    tokens: int
    sequence_length: int
    micro: int | Literal['auto'] | None

    @property
    def sequences(self) -> int:
        return self.tokens // self.sequence_length


def batch_sizes(
    tokens: int | ByStep, sequence_length: int | ByStep, micro: int | Literal['auto'] | None
) -> dict[int, BatchSize]:
    """{number of a batch: the size of that batch and those after it}, ascending. The last size is the largest."""
    all_tokens, lengths = _changes(tokens), _changes(sequence_length)
    steps = sorted({step for step, _ in (*all_tokens, *lengths)})
    return {step: BatchSize(_at(all_tokens, step), _at(lengths, step), micro) for step in steps}


def problems_of(
    tokens: int | ByStep, sequence_length: int | ByStep, micro: int | Literal['auto'] | None
) -> Iterator[Problem]:
    """What is wrong with the section `batch:`."""
    found = [*_problems_of_steps('tokens', tokens), *_problems_of_steps('sequence_length', sequence_length)]
    if found:
        yield from found
        return
    longest = _changes(sequence_length)[-1][1]
    for step, length in _changes(sequence_length):
        if longest % length:
            yield Problem(
                ('sequence_length',),
                f'is {length} from step {step} on, which does not divide the longest ({longest})',
                f'nearest: {_nearest_divisor(longest, length)}; shorter sequences are equal parts of the longest ones, '
                'so that no token is skipped or repeated',
            )
    is_plain = isinstance(tokens, int) and isinstance(sequence_length, int)
    for step, n in _changes(tokens):
        if n % longest:
            near = [m for m in (n // longest * longest, -(-n // longest) * longest) if m]
            when, which = ('', '') if is_plain else (f' from step {step} on', 'the longest ')
            yield Problem(
                ('tokens',),
                f'is {n}{when}; expected a multiple of {which}batch.sequence_length ({longest})',
                f'nearest: {" or ".join(map(str, near))}'
                + (f'; or batch.sequence_length={_nearest_divisor(n, longest)}' if is_plain else ''),
            )
            return
    for step, size in batch_sizes(tokens, sequence_length, micro).items():
        if isinstance(micro, int) and micro > size.sequences:
            when = '' if is_plain else f' from step {step} on'
            yield Problem(
                ('micro',),
                f'is {micro} sequences; expected at most {size.sequences}, the sequences of a step{when}',
                f'a step has {size.tokens} tokens / {size.sequence_length} = {size.sequences} sequences',
            )
            return


def _nearest_divisor(number: int, to: int) -> int:
    """The divisor of a number that is nearest to another one."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return min({*small, *(number // n for n in small)}, key=lambda n: (abs(n - to), n))


def _problems_of_steps(key: str, value: int | ByStep) -> Iterator[Problem]:
    changes = _changes(value)
    if changes[0][0] != 0:
        yield Problem(
            (key,),
            f'begins at step {changes[0][0]}; expected a value from step 0 on',
            f'write [[0, {changes[0][1]}], ...]',
        )
    for (step, old), (later, new) in itertools.pairwise(changes):
        if later <= step:
            yield Problem(
                (key,), f'has step {later} after step {step}; expected [[step, value], ...] by ascending steps'
            )
        elif new < old:
            yield Problem(
                (key,), f'shrinks from {old} to {new} at step {later}; a batch may only grow', f'write at least {old}'
            )


def _changes(value: int | ByStep) -> ByStep:
    return ((0, value),) if isinstance(value, int) else value


def _at(changes: ByStep, step: int) -> int:
    return next(value for first, value in reversed(changes) if first <= step)
