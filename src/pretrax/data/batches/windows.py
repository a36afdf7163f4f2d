"""Rows that are windows of the token stream: every token is used, and documents are cut at the end of a row.

Window i holds the tokens i L to i L + L. Its last token is the first of the next window, so every token of the stream
except the first is a target once. The last window is padded. Letters: R rows, L sequence length.
"""

import numpy as np

from pretrax.data.batches.block_cache import BlockCache
from pretrax.data.batches.source import HostBatch, pack_rows
from pretrax.data.tokens.token_store import TokenStore

BLOCK = 1 << 19  # tokens read together, 2 MiB
_STARTS_AT_ONCE = 1 << 20  # documents


class Windows:
    """The windows of one split, a `SplitRows` of `token_source.py`."""

    density = 1.0  # except for the padding of the last row

    def __init__(self, tokens: TokenStore, sequence_length: int):
        self.tokens = tokens
        self.n = -(-(tokens.n_tokens - 1) // sequence_length)
        self.block = max(1, BLOCK // sequence_length)
        self.cache = BlockCache(tokens, self.block * sequence_length)
        self._length = sequence_length
        self._n_padded = self.n * sequence_length + 1 - tokens.n_tokens
        self.documents_per_row = self._documents_per_row()

    def __str__(self) -> str:
        padded = f', the last one with {self._n_padded:,} tokens of padding' if self._n_padded else ''
        return f'{self.n:,} windows of the token stream{padded}'

    def read(self, rows: np.ndarray, whole_blocks: bool) -> HostBatch:
        """Reads the rows with the numbers `rows`, int64 [R]."""
        first = rows * self._length
        stop = np.minimum(first + self._length + 1, self.tokens.n_tokens)
        read = self.cache.read(list(zip(first.tolist(), stop.tolist(), strict=True)), whole_blocks)
        shape = len(rows), self._length + 1
        encoded = np.empty(shape, np.uint32)
        mask = np.zeros(shape, bool) if self.tokens.has_mask or (stop == self.tokens.n_tokens).any() else None
        for row, (these, counted) in enumerate(read):
            n = len(these)
            encoded[row, :n] = these
            encoded[row, n : n + 1], encoded[row, n + 1 :] = 1, 0  # padding starts like a document
            if mask is not None:
                mask[row, :n] = True if counted is None else counted
        return pack_rows(encoded >> 1, (encoded & 1).astype(bool), mask)

    def _documents_per_row(self) -> int:
        """The largest number of segments in a window, an upper bound that attention kernels need."""
        most, last, in_last = 1, -1, 0
        for start in range(0, self.tokens.n_documents, _STARTS_AT_ONCE):
            starts = self.tokens.read_starts(start, min(start + _STARTS_AT_ONCE, self.tokens.n_documents))
            starts = starts[starts % self._length != 0].astype(
                np.int64
            )  # a start at the edge of a window adds no segment
            windows, counts = np.unique(starts // self._length, return_counts=True)
            if len(windows):
                counts[0] += in_last if windows[0] == last else 0
                most, last, in_last = max(most, 1 + int(counts.max())), int(windows[-1]), int(counts[-1])
        padding = 1 if self._n_padded > 1 else 0  # a single padded position is only a target, so it adds no segment
        return max(most, 1 + padding + (in_last if last == self.n - 1 else 0))
