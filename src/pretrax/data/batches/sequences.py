"""Reads batches whose sizes may change: any consecutive rows of a run, each cut into equal sequences.

A `Source` numbers the rows of a run by batches of one size: row r of batch i of R rows is row i R + r. Rows from any
row on are therefore read as several smaller batches, parts, whose size divides both the first row and the number of
rows.
Letters: R rows, L length of a row, S sequences, l = L / pieces.
"""

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from pretrax.data.batches.share import Share
from pretrax.data.batches.source import HostBatch, Source
from pretrax.errors import UserError


def read_sequences(source: Source, first: int, count: int, pieces: int, sequences: slice) -> HostBatch:
    """Some sequences of a batch.

    Args:
        source: gives rows of length L.
        first: the first row of the batch, by its number in the run.
        count: R, rows of the batch.
        pieces: into how many sequences each row is cut; it divides L.
        sequences: which of the R * pieces sequences.

    Returns:
        Arrays [S, l]. In a sequence, segments begin with 1 and positions with 0, as in a row of its own.
    """
    start, stop, _ = sequences.indices(count * pieces)
    rows = slice(start // pieces, -(-stop // pieces))
    parts = [source.batch(*part) for part in _parts(first, count, rows)]
    batch = parts[0] if len(parts) == 1 else HostBatch(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    if pieces == 1:
        return batch
    skipped = start - rows.start * pieces
    return HostBatch(*(array[skipped : skipped + stop - start] for array in _cut(batch, pieces)))


def sources_of_sequences(source: Source, first: int, count: int, pieces: int, sequences: slice) -> np.ndarray:
    """The number in `source.source_names` of the source of each sequence, int64 [S]; the arguments are the same."""
    start, stop, _ = sequences.indices(count * pieces)
    rows = slice(start // pieces, -(-stop // pieces))
    of_rows = np.concatenate([source.row_sources(*part) for part in _parts(first, count, rows)])
    return of_rows[np.arange(start, stop) // pieces - rows.start]


def check_row_order(source: Source, name: str, sizes: Iterable[tuple[int, int]]) -> None:
    """Checks that a source gives the same rows in batches of different sizes. Reads at most eight rows per size.

    Args:
        sizes: (first row, number of rows) of the first batch of each size.

    Raises:
        UserError: the rows differ.
    """
    why, way_out = 'batches grow', ', or do not let batch.tokens grow'
    if isinstance(source, Share) and source.count > 1:
        why, way_out = 'islands may have batches of any size', ''
        sizes = [(0, source.count), *((first * source.count, count * source.count) for first, count in sizes)]
        source = source.source
    for small, large in itertools.pairwise(sorted({math.gcd(*size) for size in sizes})):
        n = min(small, large - small, 4)
        one, other = source.batch(1, slice(0, n), small), source.batch(0, slice(small, small + n), large)
        if not all(map(np.array_equal, one, other)):
            kind = type(source).__name__
            raise UserError(
                f'data.name={name}: {why}, but {kind} numbers the rows of batches of {small} and of {large} '
                f'rows differently\nrow {small} of the run is row 0 of batch 1 of {small} rows, and row {small} of '
                f'batch 0 of {large} rows\nmake each row from its number step * batch_rows + row{way_out}'
            )


def _parts(first: int, count: int, rows: slice) -> Iterator[tuple[int, slice, int]]:
    """The arguments of `Source.batch` for the rows `rows` of the `count` rows from `first` on."""
    size = math.gcd(first, count)
    for at in range(rows.start // size * size, rows.stop, size):
        yield (first + at) // size, slice(max(0, rows.start - at), min(size, rows.stop - at)), size


def _cut(batch: HostBatch, pieces: int) -> HostBatch:
    """Cuts every row into equal sequences, in order: [R, L] -> [R * pieces, L / pieces]."""
    cut = HostBatch(*(array.reshape(len(array) * pieces, -1) for array in batch))
    is_first = cut.segments == cut.segments[:, :1]
    return cut._replace(
        segments=cut.segments - cut.segments[:, :1] + 1,
        positions=cut.positions - np.where(is_first, cut.positions[:, :1], 0),
    )
