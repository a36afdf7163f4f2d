"""Batches of text that is tokenized while the run trains. Row g of the run is window g of an endless stream of tokens.

Letters: R rows, L sequence length.
"""

import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Iterator

import numpy as np

from pretrax.data.batches.source import DataRequest, HostBatch, Source, pack_rows
from pretrax.data.batches.token_source import held_out_batch, row_numbers
from pretrax.data.batches.windows import Windows
from pretrax.data.stream.blocks import Block, Blocks
from pretrax.data.stream.places import Places
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokens.token_store import TokenStore

_AHEAD = 2  # blocks that are read ahead
_POLL = 0.5  # seconds


class StreamSource(Source):
    """A `Source` over `Blocks`.

    Args:
        places: where its known blocks start.
        held_out: the tokens for validation; None: no validation.
    """

    def __init__(
        self,
        blocks: Blocks,
        places: Places,
        held_out: TokenStore | None,
        tokenizer: Tokenizer,
        fingerprint: str,
        request: DataRequest,
    ):
        self.vocab_size, self.tokenizer, self.fingerprint = tokenizer.vocab_size, tokenizer, fingerprint
        # Other special tokens occur only where a template writes them
        special = set(tokenizer.special_tokens.values()) - {tokenizer.end_of_text}
        self.largest_token = next(token for token in reversed(range(self.vocab_size)) if token not in special)
        self._length = request.sequence_length
        self._blocks, self._places = blocks, places
        if held_out is not None:
            self.validation = functools.partial(held_out_batch, Windows(held_out, self._length))
            self.validation_bytes_per_token = held_out.bytes_per_target
        self._lock = threading.Lock()
        self._kept: deque[Block] = deque()
        self._reader: BlockReader | None = None
        self._at = 0  # the token at which the reader's next block starts
        self._waiting = False

    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch:
        number = step * batch_rows + row_numbers(rows, batch_rows)
        first, stop = int(number.min()) * self._length, (int(number.max()) + 1) * self._length + 1
        with self._lock:
            encoded, mask = self._read(first, stop)
        windows = (number * self._length - first)[:, None] + np.arange(self._length + 1)
        chosen = encoded[windows]
        counted = None if mask is None else mask[windows]
        return pack_rows(chosen >> 1, (chosen & 1).astype(bool), counted)

    def close(self) -> None:
        """Stops reading ahead."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    @property
    def reading(self) -> str | None:
        return 'and tokenizing text' if self._waiting else None

    def _read(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The tokens [first, stop) of the stream, and whether they count as targets."""
        kept_from = self._kept[0].place.token if self._kept else self._at
        if self._reader is None or first < kept_from or self._places.before(first).token > self._at:
            self.close()
            self._kept.clear()
            place = self._places.before(first)
            self._at = place.token
            self._reader = BlockReader(self._blocks.read(place))
        while not self._kept or self._kept[-1].following.token < stop:
            self._kept.append(self._next())
            while self._kept and self._kept[0].following.token <= first:
                self._kept.popleft()
        starts = [block.place.token for block in self._kept]
        here = [
            (block, slice(max(0, first - start), max(0, stop - start)))
            for block, start in zip(self._kept, starts, strict=True)
        ]
        encoded = np.concatenate([block.encoded[part] for block, part in here])
        if all(block.mask is None for block, _ in here):
            return encoded, None
        masks = [np.ones(len(block.encoded), bool) if block.mask is None else block.mask for block, _ in here]
        return encoded, np.concatenate([mask[part] for mask, (_, part) in zip(masks, here, strict=True)])

    def _next(self) -> Block:
        assert self._reader is not None
        self._waiting = True
        try:
            block = next(self._reader)
        except BaseException:
            self.close()
            raise
        finally:
            self._waiting = False
        self._at = block.following.token
        self._places.add(block.following)
        return block


class BlockReader:
    """Reads blocks ahead in a thread, until `close`. An error is raised when its block is due."""

    def __init__(self, blocks: Iterator[Block]):
        self._ready: queue.Queue[Block | BaseException] = queue.Queue(_AHEAD)
        self._closed = threading.Event()
        threading.Thread(target=self._run, args=(blocks,), name='stream', daemon=True).start()

    def __next__(self) -> Block:
        block = self._ready.get()
        if isinstance(block, BaseException):
            raise block
        return block

    def close(self) -> None:
        """Ends the thread after the block that it reads."""
        self._closed.set()

    def _run(self, blocks: Iterator[Block]) -> None:
        try:
            for block in blocks:
                self._put(block)
                if self._closed.is_set():
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, block: Block | BaseException) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(block, timeout=_POLL)
                return
