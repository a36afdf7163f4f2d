"""Batches from token stores.

Row `row` of step `step` has the number g = step * batch_rows + row in the run. It is row `Order(g)` of the split, a
pure function of the seed and g on any number of processes. Letters: R rows, L sequence length.
"""

import contextlib
import functools
import threading
from collections import deque
from typing import Literal, Protocol

import numpy as np

from pretrax.data.batches.block_cache import MEMORY, BlockCache
from pretrax.data.batches.order import Order
from pretrax.data.batches.packing import PackedDocuments
from pretrax.data.batches.row_targets import report_rows_without_targets
from pretrax.data.batches.source import DataRequest, HostBatch, Source
from pretrax.data.batches.windows import Windows
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokens.block_files import BlockFiles
from pretrax.data.tokens.flat_tokens import open_split, read_tokenizer_json, splits
from pretrax.data.tokens.token_store import TokenStore
from pretrax.errors import UserError
from pretrax.storage import AnyPath

type Packing = Literal['concatenate', 'whole', 'best_fit']

# A process that needs a smaller share of every batch reads single rows, since it would use little of each block.
SHARE_FOR_BLOCKS = 1 / 8


class SplitRows(Protocol):
    """The rows of a split under one packing; str() describes them."""

    tokens: TokenStore  # the split
    n: int  # rows per epoch
    block: int  # consecutive rows that are best read together
    documents_per_row: int  # the largest number of segments in a row, padding included
    density: float  # the fraction of token positions that is not padding
    cache: BlockCache

    def read(self, rows: np.ndarray, whole_blocks: bool) -> HostBatch:
        """Reads the rows with the numbers `rows`, int64 [R], each in range(n)."""
        ...


class TokenSource(Source):
    """A `Source` of the rows of a training split, and of a validation split if there is one."""

    def __init__(self, train: SplitRows, held_out: SplitRows | None, tokenizer: Tokenizer | None, seed: int):
        self.train, self.held_out = train, held_out
        self.vocab_size = train.tokens.vocab_size
        self.tokenizer = tokenizer
        self.largest_token = max(rows.tokens.largest_token for rows in (train, held_out) if rows)
        self.n_tokens = train.tokens.n_tokens
        self.bytes_per_token = train.tokens.bytes_per_target
        self.validation_bytes_per_token = held_out.tokens.bytes_per_target if held_out else None
        self.documents_per_row = max(rows.documents_per_row for rows in (train, held_out) if rows)
        self.fingerprint = train.tokens.fingerprint
        self.validation = None if held_out is None else functools.partial(held_out_batch, held_out)
        self._order = Order(train.n, train.block, seed)
        self._read_before: deque[int] = deque(maxlen=4 * self._order.window)  # blocks that were read ahead
        self._reader: threading.Thread | None = None

    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch:
        number = row_numbers(rows, batch_rows)
        return self.rows(step * batch_rows + number, len(number) >= SHARE_FOR_BLOCKS * batch_rows)

    def rows(self, number: np.ndarray, whole_blocks: bool) -> HostBatch:
        """Reads the rows with these numbers in the run, int64 [R]; `whole_blocks` caches the blocks around them."""
        batch = self.train.read(self._order(number), whole_blocks)
        if whole_blocks and self.train.tokens.is_remote and not self.train.cache.is_whole:
            self._read_ahead(number)
        return batch

    def _read_ahead(self, number: np.ndarray) -> None:
        """Reads the blocks of rows that come half a window later into memory, in a thread.

        All blocks of a window of the order are new at its start, so without this every window would start with a wait.
        """
        if self._reader is not None and self._reader.is_alive():
            return
        later = self._order(number + self._order.window * self._order.block // 2)
        blocks, first_of_each = np.unique(later // self._order.block, return_index=True)
        rows = later[first_of_each][~np.isin(blocks, self._read_before)]
        if not len(rows):
            return
        self._read_before.extend((rows // self._order.block).tolist())

        def read() -> None:
            with contextlib.suppress(UserError):  # it is raised again when the rows are due
                self.train.read(rows, True)

        self._reader = threading.Thread(target=read, name='read-ahead', daemon=True)
        self._reader.start()

    @property
    def reading(self) -> str | None:
        caches = [rows.cache for rows in (self.train, self.held_out) if rows]
        return next((cache.reading for cache in caches if cache.reading), None)


def open_tokens(
    directory: AnyPath, request: DataRequest, packing: Packing = 'concatenate', cache: BlockFiles | None = None
) -> TokenSource:
    """Opens a flat-tokens directory for training; `cache` keeps what is read from a bucket.

    Raises UserError if the tokens are damaged or too few.
    """
    train = open_split(directory, 'train', cache)
    held_out = open_split(directory, 'validation', cache) if 'validation' in splits(directory) else None
    identity = train.manifest.tokenizer
    if held_out and held_out.manifest.tokenizer != identity:
        raise UserError(
            f'{directory}: train and validation were made by different tokenizers\n  tokenize the text again'
        )
    content = read_tokenizer_json(directory, identity)
    tokenizer = None if content is None else identity.tokenizer(content, str(directory))
    return open_stores(train, held_out, tokenizer, request, packing)


def open_stores(
    train: TokenStore,
    held_out: TokenStore | None,
    tokenizer: Tokenizer | None,
    request: DataRequest,
    packing: Packing = 'concatenate',
) -> TokenSource:
    """Opens token stores of any format for training, and prints the size of an epoch.

    Raises UserError if a split is shorter than one sequence, or no training row has a target.
    """
    rows = _rows(train, 'train', request, packing)
    validation = None if held_out is None else _rows(held_out, 'validation', request, packing)
    memory = 'held in memory' if rows.cache.is_whole else f'read in blocks, {MEMORY >> 20} MiB cached in memory'
    request.say(f'order: an epoch is {rows}, shuffled with seed {request.seed}; tokens {memory}')
    if train.has_mask:
        report_rows_without_targets(
            train.name,
            lambda numbers: rows.read(numbers, True),
            rows.n,
            request.sequence_length,
            request.say,
            request.batch_rows,
        )
    request.say(f'validation: {validation}' if validation else 'validation: none, no text is held out')
    if held_out is not None and held_out.fingerprint == train.fingerprint:
        request.say('validation: the same tokens as those to train on, so its loss is not that of new text')
    return TokenSource(rows, validation, tokenizer, request.seed)


def held_out_batch(held_out: SplitRows, index: int, rows: slice, batch_rows: int) -> HostBatch:
    """Each held-out row once, in an order that does not depend on the seed; rows past the last one have mask 0."""
    number = row_numbers(rows, batch_rows)
    share = len(number) >= SHARE_FOR_BLOCKS * batch_rows
    number += index * batch_rows
    n = held_out.n
    batch = held_out.read(Order(n, held_out.block, seed=0)(np.minimum(number, n - 1)), share)
    return batch._replace(mask=batch.mask * (number < n).astype(np.float32)[:, None])


def row_numbers(rows: slice, batch_rows: int) -> np.ndarray:
    """The numbers of the rows that a slice selects, int64."""
    return np.arange(batch_rows, dtype=np.int64)[rows]


def _rows(tokens: TokenStore, split: str, request: DataRequest, packing: Packing) -> SplitRows:
    n_targets = tokens.n_tokens - (1 if packing == 'concatenate' else tokens.n_documents)
    if n_targets >= request.sequence_length:
        if packing == 'concatenate':
            return Windows(tokens, request.sequence_length)
        return PackedDocuments(tokens, request.sequence_length, packing, request.directory, request.say)
    shorter = f'batch.sequence_length={n_targets}' if n_targets > 0 else 'a shorter batch.sequence_length'
    other = 'a larger data.validation (0: no validation)' if split == 'validation' else 'more text'
    raise UserError(
        f'{tokens.name}: the {split} split has {tokens.n_tokens:,} tokens in {tokens.n_documents:,} documents\n'
        f'  one sequence needs {request.sequence_length + 1:,} tokens (batch.sequence_length + 1)\n'
        f'  use {shorter} or less, or give {other}'
    )
