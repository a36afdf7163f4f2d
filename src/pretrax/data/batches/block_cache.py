"""Reads a token store in whole blocks, and keeps the most recently used blocks in memory.

The order of rows stays within a few blocks for a while (`order.py`), so each block is read once. A split that fits in
memory is a single block, read when the run starts.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from pretrax.data.tokens.token_store import TokenStore

MEMORY = 256 << 20  # bytes of tokens (uint32) kept for one split
_READ_AT_ONCE = 16 << 20  # bytes
_REQUESTED_AT_ONCE = 64 << 20  # of a bucket, which answers many requests in the time of one

# `2 * id + starts_a_document` of each token, uint32, and whether the token counts as a target; None: all count.
type Tokens = tuple[np.ndarray, np.ndarray | None]


class BlockCache:
    """Reads ranges of tokens. Several threads may use it at once.

    Args:
        block: tokens per block. A block also holds the token after it, the last target of its last row.

    Attributes:
        is_whole: whether the whole split is in memory.
        reading: what is being read at this moment, for the message about a stall; otherwise None.
    """

    def __init__(self, store: TokenStore, block: int):
        self.store = store
        self.is_whole = store.n_tokens * 4 <= MEMORY
        self.reading: str | None = None
        self._block = store.n_tokens if self.is_whole else block
        self._n_kept = max(1, MEMORY // (4 * block))
        self._kept: OrderedDict[int, Future[Tokens]] = OrderedDict()  # a block that is being read is here too
        self._lock = threading.Lock()
        if self.is_whole:  # damaged files are reported now, before training starts
            self.read([(0, 1)])

    def read(self, ranges: Sequence[tuple[int, int]], whole_blocks: bool = True) -> list[Tokens]:
        """The tokens of each range [start, stop). Without `whole_blocks`, missing ranges are read but not cached."""
        # The last token of a range may be the one after its block.
        blocks = [(start // self._block, max(start, stop - 2) // self._block) for start, stop in ranges]
        wanted = {number for first, last in blocks for number in range(first, last + 1)}
        futures: dict[int, Future[Tokens]] = {}
        with self._lock:
            missing = sorted(wanted - self._kept.keys())
            whole_blocks = whole_blocks or self.is_whole or not missing
            if whole_blocks:
                self._kept |= {number: Future() for number in missing}
                for number in wanted:
                    self._kept.move_to_end(number)
                futures = {number: self._kept[number] for number in wanted}
                while len(self._kept) > max(self._n_kept, len(wanted)):
                    self._kept.popitem(last=False)
        if not whole_blocks:
            return self._fetch(ranges)
        self._read_blocks({number: futures[number] for number in missing})
        here = {number: future.result() for number, future in futures.items()}
        return [self._cut(here, *within, *place) for within, place in zip(blocks, ranges, strict=True)]

    def _read_blocks(self, missing: dict[int, Future[Tokens]]) -> None:
        """Reads blocks; other threads wait for their futures. Blocks that cannot be read are not kept."""
        n_bytes = _REQUESTED_AT_ONCE if self.store.is_remote else _READ_AT_ONCE
        at_once = max(1, n_bytes // (4 * self._block))
        try:
            for numbers in itertools.batched(missing, at_once):
                found = self._fetch([self._range(number) for number in numbers])
                for number, tokens in zip(numbers, found, strict=True):
                    missing[number].set_result(tokens)
        except BaseException as error:
            left = {number: future for number, future in missing.items() if not future.done()}
            with self._lock:
                for number, future in left.items():
                    if self._kept.get(number) is future:
                        del self._kept[number]
            for future in left.values():
                future.set_exception(error)
            raise

    def _range(self, number: int) -> tuple[int, int]:
        return number * self._block, min((number + 1) * self._block + 1, self.store.n_tokens)

    def _cut(self, here: dict[int, Tokens], first: int, last: int, start: int, stop: int) -> Tokens:
        parts = []
        for number in range(first, last + 1):
            begin = number * self._block
            encoded, mask = here[number]
            part = slice(max(start - begin, 0), stop - begin if number == last else self._block)
            parts.append((encoded[part], mask if mask is None else mask[part]))
        if first == last:
            return parts[0]
        encoded, mask = zip(*parts, strict=True)
        return np.concatenate(encoded), None if mask[0] is None else np.concatenate(mask)

    def _fetch(self, ranges: Sequence[tuple[int, int]]) -> list[Tokens]:
        self.reading = f'tokens {ranges[0][0]:,} to {ranges[-1][1]:,} of {self.store.name}'
        try:
            encoded = self.store.read(ranges)
            mask = self.store.read_mask(ranges) if self.store.has_mask else [None] * len(ranges)
        finally:
            self.reading = None
        return list(zip(encoded, mask, strict=True))
