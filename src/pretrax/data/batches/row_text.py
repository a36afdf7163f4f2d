"""The rows of a batch as text, document by document."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pretrax.data.batches.source import HostBatch
from pretrax.errors import printable


def row_text(batch: HostBatch, row: int, tokenizer: Any, ids: bool) -> Iterator[str]:
    """Lines that show the documents of a row: their columns, how many of their targets count, and their text.

    Args:
        tokenizer: has `decode(ids)`; None: the ids are shown instead of text.
        ids: also show the ids.
    """
    segments, mask = batch.segments[row], batch.mask[row]
    starts = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist()]
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(segments)], strict=True), start=1):
        here = slice(start, stop)
        counted = int(np.count_nonzero(mask[here]))
        columns = f'columns {start} to {stop - 1}'
        if stop == len(segments) and not counted and not batch.tokens[row, here].any():
            yield f'  {columns}: padding'
            continue
        yield f'  {columns}: document {number} of the row, {counted} of {stop - start} targets count'
        tokens = batch.tokens[row, here].tolist()
        if counted and mask[stop - 1]:
            tokens.append(int(batch.targets[row, stop - 1]))  # the last target is the input of no column
        if ids or tokenizer is None:
            yield f'    ids: {" ".join(map(str, tokens))}'
        if tokenizer is not None:
            yield from (f'    | {line}' for line in printable(tokenizer.decode(tokens)).split('\n'))
