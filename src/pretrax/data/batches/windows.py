"""Rows that are windows of the stream of tokens: every token is used, documents are cut where a row ends.

Window i holds tokens i L to i L + L: its last token is the first of the next window, so that every token of the stream
but the first is a target once. The last window is filled up with padding. Letters: R rows, L sequence length.
"""

import numpy as np

from pretrax.data.batches.block_cache import BlockCache
from pretrax.data.batches.source import HostBatch, pack_rows
from pretrax.data.tokens.token_store import TokenStore

BLOCK = 1 << 19  # tokens that are read together, 2 MiB
_STARTS_AT_ONCE = 1 << 20  # documents


class Windows:
    """The windows of one split; `Rows` of `token_source.py`."""

    density = 1.0  # of the rows, but for a part of the last one

    def __init__(self, tokens: TokenStore, sequence_length: int):
        self.tokens = tokens
        self.n = -(-(tokens.n_tokens - 1) // sequence_length)
        self.block = max(1, BLOCK // sequence_length)
        self.cache = BlockCache(tokens, self.block * sequence_length)
        self._length = sequence_length
        self._n_padded = self.n * sequence_length + 1 - tokens.n_tokens
        self.documents_per_row = self._documents_per_row()

    def __str__(self) -> str:
        padded = f', the last one with {self._n_padded:,} of padding' if self._n_padded else ''
        return f'{self.n:,} windows of the stream of tokens{padded}'

    def read(self, rows: np.ndarray, whole_blocks: bool) -> HostBatch:
        """rows int64 [R] -> the rows of a batch."""
        first = rows * self._length
        stop = np.minimum(first + self._length + 1, self.tokens.n_tokens)
        read = self.cache.read(list(zip(first.tolist(), stop.tolist(), strict=True)), whole_blocks)
        shape = len(rows), self._length + 1
        encoded, counts = np.zeros(shape, np.uint32), np.zeros(shape, bool)
        for row, (these, counted) in enumerate(read):
            n = len(these)
            encoded[row, :n], counts[row, :n] = these, True if counted is None else counted
            encoded[row, n : n + 1] = 1  # padding begins as a document does
        return pack_rows(encoded >> 1, (encoded & 1).astype(bool), counts)

    def _documents_per_row(self) -> int:
        """The largest number of segments in a window, so that kernels for packed documents know a bound."""
        most, last, in_last = 1, -1, 0
        for start in range(0, self.tokens.n_documents, _STARTS_AT_ONCE):
            starts = self.tokens.read_starts(start, min(start + _STARTS_AT_ONCE, self.tokens.n_documents))
            starts = starts[starts % self._length != 0].astype(np.int64)  # at a window's edge no further one begins
            windows, counts = np.unique(starts // self._length, return_counts=True)
            if len(windows):
                counts[0] += in_last if windows[0] == last else 0
                most, last, in_last = max(most, 1 + int(counts.max())), int(windows[-1]), int(counts[-1])
        padding = 1 if self._n_padded > 1 else 0  # the padding of targets alone is no segment
        return max(most, 1 + padding + (in_last if last == self.n - 1 else 0))
