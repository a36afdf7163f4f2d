"""The sizes of a training batch, and the numbers that must divide each other.

    batch.tokens         = sequences x batch.sequence_length
    sequences            = devices along r, d and e x sequences per device
    sequences per device = micro-batches x batch.micro

With pipeline stages, the number of micro-batches is a multiple of mesh.p. `mesh` is the size of every axis, as
`resolve_mesh` returns it.

If the batches grow at given steps, this holds for each of their sizes. The rows of the data have the longest sequence
length, and batches follow one another in the data without a gap: a batch of shorter sequences has whole rows, each cut
into equal parts. So no token is skipped or repeated, and where a batch lies depends only on its number.
"""

import math
import re
from collections.abc import Mapping

from pretrax.config.batch_sizes import BatchSize
from pretrax.config.schema import Batch
from pretrax.errors import UserError

SEQUENCE_AXES = ('r', 'd', 'e')  # the mesh axes that shard the sequences of a batch


def tokens_before(batch: Batch, number: int) -> int:
    """Tokens of all batches before the one with this number."""
    sizes = batch.sizes
    stops = [*list(sizes)[1:], number]
    return sum(
        max(0, min(stop, number) - first) * size.tokens
        for (first, size), stop in zip(sizes.items(), stops, strict=True)
    )


def rows_before(batch: Batch, number: int) -> int:
    """Rows of the data before the batch with this number."""
    return tokens_before(batch, number) // batch.largest.sequence_length


def rows_of(batch: Batch, number: int) -> tuple[int, int, int]:
    """The first row of the data in a batch, its number of rows, and the sequences that each row is cut into."""
    size, longest = batch.at(number), batch.largest.sequence_length
    return rows_before(batch, number), size.tokens // longest, longest // size.sequence_length


def same_until(old: Batch, new: Batch, number: int) -> bool:
    """Whether the batches before the one with this number are the same ones, and the next one follows them."""
    same_rows = old.largest.sequence_length == new.largest.sequence_length or not number
    return same_rows and all(
        old.at(first)._replace(micro=None) == new.at(first)._replace(micro=None)
        for first in {*old.sizes, *new.sizes}
        if first < number
    )


def common_sequences(batch: Batch) -> int:
    """The largest number that divides the sequences of every step."""
    return math.gcd(*(size.sequences for size in batch.sizes.values()))


def sequence_shards(mesh: Mapping[str, int]) -> int:
    """The number of parts that the sequences of a batch are sharded into."""
    return math.prod(mesh[axis] for axis in SEQUENCE_AXES)


def sequences_per_device(batch: BatchSize, mesh: Mapping[str, int]) -> int:
    """Sequences per step and device. Raises UserError if they do not divide evenly."""
    n, shards = batch.sequences, sequence_shards(mesh)
    if n % shards:
        axes = [axis for axis in SEQUENCE_AXES if mesh[axis] > 1 or axis in 'rd']
        sizes = ' x '.join(f'{axis}={mesh[axis]}' for axis in axes)
        unit = _least_sequences(batch, mesh)
        nearest = [m for m in (n // unit * unit, -(-n // unit) * unit) if m]
        tokens = ' or '.join(f'batch.tokens={m * batch.sequence_length}' for m in nearest)
        raise UserError(
            f'batch: {n} sequences per step cannot be sharded evenly over mesh {sizes} = {shards} devices\n'
            f'use {tokens}, or a mesh whose {" x ".join(axes)} divides {n}'
        )
    return n // shards


def _least_sequences(batch: BatchSize, mesh: Mapping[str, int]) -> int:
    """A step needs a multiple of these sequences: on each device, one micro-batch for each stage."""
    micro = batch.micro if isinstance(batch.micro, int) else 1
    return sequence_shards(mesh) * mesh['p'] * micro


def micro_batch_sizes(per_device: int, stages: int) -> list[int]:
    """The possible values of batch.micro, ascending, for some sequences per device and pipeline stages."""
    return [n for n in range(1, per_device + 1) if per_device % n == 0 and per_device // n % stages == 0]


def micro_batch_size(batch: BatchSize, mesh: Mapping[str, int]) -> int:
    """Sequences per micro-batch and device: batch.micro, or its default.

    The default is all sequences at once. With a pipeline it is the largest micro-batch that leaves at least four
    micro-batches per stage, so that the pipeline bubble stays below a fifth.

    Raises:
        UserError: the sequences do not divide evenly into such micro-batches, or batch.micro is still 'auto'.
    """
    per_device, stages, micro = sequences_per_device(batch, mesh), mesh['p'], batch.micro
    sizes = micro_batch_sizes(per_device, stages)
    if not sizes:
        unit = _least_sequences(batch, mesh)
        enough = -(-batch.sequences // unit) * unit
        raise UserError(
            f'batch: {per_device} sequences per device do not fill mesh.p = {stages} stages: the number of '
            f'micro-batches must be a multiple of {stages}\n'
            f'use batch.tokens={enough * batch.sequence_length} for {enough} sequences, or a smaller mesh.p'
        )
    if micro == 'auto':
        raise UserError(
            'batch.micro: `pretrax train` measures auto before the run\n'
            'in a program, use config = pretrax.plan.auto.settled(config, print)'
        )
    if micro is None:
        if stages == 1:
            return per_device
        return next((n for n in reversed(sizes) if per_device // n >= 4 * stages), sizes[0])
    if micro not in sizes:
        problem = f'does not divide the {per_device} sequences per device'
        if per_device % micro == 0:
            problem = (
                f'makes {per_device // micro} micro-batches per device, not a multiple of mesh.p = {stages} stages'
            )
        nearest = min(reversed(sizes), key=lambda n: abs(n - micro))
        raise UserError(f'batch.micro = {micro} {problem}\nuse batch.micro={nearest}')
    return micro


def check_batch(batch: Batch, mesh: Mapping[str, int]) -> None:
    """Raises UserError if a batch of any size cannot be sharded over a mesh; batch.micro may still be 'auto'."""
    for first, size in batch.sizes.items():
        try:
            _check_size(size, mesh)
        except UserError as error:
            if len(batch.sizes) == 1:
                raise
            text = str(error)
            if isinstance(batch.tokens, tuple):  # a plain number would replace the schedule
                text = re.sub(r'batch\.tokens=(\d+)', rf'batch.tokens with [{first}, \1]', text)
            raise UserError(f'from step {first} on, {text}') from error


def _check_size(batch: BatchSize, mesh: Mapping[str, int]) -> None:
    sequences_per_device(batch, mesh)
    if batch.sequence_length % mesh['c']:
        parts = [n for n in range(2, mesh['c']) if mesh['c'] % n == 0]  # a ring has two chunks for each device
        fits = max((n for n in parts if batch.sequence_length % (2 * mesh['t'] * n) == 0), default=1)
        raise UserError(
            f'batch.sequence_length = {batch.sequence_length} is not divisible by mesh.c = {mesh["c"]}\n'
            f'use mesh.c={fits}'
        )
    if batch.micro != 'auto':
        micro_batch_size(batch, mesh)


def describe_batch(batch: Batch, mesh: Mapping[str, int]) -> str:
    """'4,096 tokens = 16 sequences x 256; 8 per device, 2 passes of 4', for each size."""
    last = next(reversed(batch.sizes))
    return '; '.join(
        (f'from step {first:,}{" (largest)" if first == last else ""}: ' if last else '') + _describe_size(size, mesh)
        for first, size in batch.sizes.items()
    )


def _describe_size(batch: BatchSize, mesh: Mapping[str, int]) -> str:
    per_device, micro = sequences_per_device(batch, mesh), micro_batch_size(batch, mesh)
    count = per_device // micro
    noun = 'micro-batches' if mesh['p'] > 1 else 'pass' if count == 1 else 'passes'
    return (
        f'{batch.tokens:,} tokens = {batch.sequences} sequences x {batch.sequence_length}; '
        f'{per_device} per device, {count} {noun} of {micro}'
    )
