"""The rows of one island of a federation. Row k of share i of N is row k N + i of the order that all islands share.

So no row belongs to two islands, whatever their batches, meshes and speeds.
"""

import operator
from collections.abc import Iterator

import numpy as np

from pretrax.data.batches.source import HostBatch, Source


class Share(Source):
    """A `Source` of every `count`-th row of another source, from row `index` on. Validation has all rows.

    Args:
        source: of the rows of all islands.
        index: the share, in range(count).
    """

    def __init__(self, source: Source, index: int, count: int):
        self.source, self.index, self.count = source, index, count
        for name in Source.__annotations__:
            setattr(self, name, getattr(source, name))
        # A source of a user need not accept slices with a step
        self._reads_strides = type(source).batch.__module__.startswith('pretrax.')

    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch:
        parts = [self.source.batch(step, part, batch_rows * self.count) for part in self._parts(rows, batch_rows)]
        return parts[0] if len(parts) == 1 else HostBatch(*map(np.concatenate, zip(*parts, strict=True)))

    def row_sources(self, step: int, rows: slice, batch_rows: int) -> np.ndarray:
        parts = self._parts(rows, batch_rows)
        return np.concatenate([self.source.row_sources(step, part, batch_rows * self.count) for part in parts])

    def _parts(self, rows: slice, batch_rows: int) -> Iterator[slice]:
        """The slices of the batch of all islands that together are some rows of this island's batch."""
        own = range(self.index, batch_rows * self.count, self.count)[rows]
        if self._reads_strides:
            yield slice(own.start, own.stop, own.step)
        else:
            yield from (slice(row, row + 1) for row in own)


for _name in ('source_names', 'reading', 'validation_parts', 'tokenizer_sha256', 'tokenizer_begin'):
    setattr(Share, _name, property(operator.attrgetter(f'source.{_name}')))
