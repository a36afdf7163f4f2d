"""Batches from stores of tokens: which rows a step has, on any number of processes, and who reads them.

Row `row` of step `step` has the number g = step * batch_rows + row in the run. It is row `Order(g)` of the split: a pure
function of the seed and g. Letters: R rows, L sequence length.
"""

from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from pretrax.data.batches.block_cache import MEMORY, BlockCache
from pretrax.data.batches.order import Order
from pretrax.data.batches.packing import PackedDocuments
from pretrax.data.batches.source import DataRequest, HostBatch, Source
from pretrax.data.batches.windows import Windows
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokens.flat_tokens import open_split, read_tokenizer_json, splits
from pretrax.data.tokens.token_store import TokenStore
from pretrax.errors import UserError

type Packing = Literal['concatenate', 'whole', 'best_fit']

# A process that needs a smaller part of every batch reads its rows alone: of whole blocks it would use too little.
SHARE_FOR_BLOCKS = 1 / 8


class Rows(Protocol):
    """What a split looks like under one packing; str() describes it.

    Attributes:
        tokens: the split.
        n: rows of an epoch.
        block: so many consecutive rows are best read together.
        documents_per_row: at most so many segments in a row, that of padding included.
        density: the part of all places that is not padding.
        cache: through which the tokens are read.
    """

    tokens: TokenStore
    n: int
    block: int
    documents_per_row: int
    density: float
    cache: BlockCache

    def read(self, rows: np.ndarray, whole_blocks: bool) -> HostBatch:
        """rows int64 [R], each in range(n) -> the rows of a batch."""
        ...


class TokenSource(Source):
    """A `Source` over the rows of what trains and of what is held out."""

    def __init__(self, train: Rows, held_out: Rows | None, tokenizer: Tokenizer | None, seed: int):
        self.train, self.held_out = train, held_out
        self.vocab_size = train.tokens.vocab_size
        self.tokenizer = tokenizer
        self.n_tokens = train.tokens.n_tokens
        self.bytes_per_token = train.tokens.bytes_per_target
        self.validation_bytes_per_token = held_out.tokens.bytes_per_target if held_out else None
        self.documents_per_row = max(rows.documents_per_row for rows in (train, held_out) if rows)
        self.fingerprint = train.tokens.fingerprint
        self.validation = None if held_out is None else self._validation
        self._order = Order(train.n, train.block, seed)

    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch:
        number = row_numbers(rows, batch_rows)
        return self.rows(step * batch_rows + number, len(number) >= SHARE_FOR_BLOCKS * batch_rows)

    def rows(self, number: np.ndarray, whole_blocks: bool) -> HostBatch:
        """Rows by their numbers in the run, int64 [R]; `whole_blocks` reads what lies around them as well."""
        return self.train.read(self._order(number), whole_blocks)

    def _validation(self, index: int, rows: slice, batch_rows: int) -> HostBatch:
        """Each held-out row once, in an order that does not depend on the seed; rows past the last one have mask 0."""
        assert self.held_out is not None
        number = row_numbers(rows, batch_rows)
        share = len(number) >= SHARE_FOR_BLOCKS * batch_rows
        number += index * batch_rows
        n = self.held_out.n
        batch = self.held_out.read(Order(n, self.held_out.block, seed=0)(np.minimum(number, n - 1)), share)
        return batch._replace(mask=batch.mask * (number < n).astype(np.float32)[:, None])

    @property
    def reading(self) -> str | None:
        """What is being read at this moment, for the report of a stall."""
        caches = [rows.cache for rows in (self.train, self.held_out) if rows]
        return next((cache.reading for cache in caches if cache.reading), None)


def open_tokens(directory: Path, request: DataRequest, packing: Packing = 'concatenate') -> TokenSource:
    """Open a flat-tokens directory for training. Raises UserError where it is damaged or there is too little."""
    train = open_split(directory, 'train')
    held_out = open_split(directory, 'validation') if 'validation' in splits(directory) else None
    identity = train.manifest.tokenizer
    if held_out and held_out.manifest.tokenizer != identity:
        raise UserError(f'{directory}: train and validation were made by different tokenizers\n  tokenise again')
    content = read_tokenizer_json(directory, identity)
    tokenizer = None if content is None else Tokenizer(content, str(directory), identity.end_of_text)
    return open_stores(train, held_out, tokenizer, request, packing)


def open_stores(
    train: TokenStore,
    held_out: TokenStore | None,
    tokenizer: Tokenizer | None,
    request: DataRequest,
    packing: Packing = 'concatenate',
) -> TokenSource:
    """A source of batches over stores of tokens of any format, and a word on what an epoch is.

    Raises UserError where there is too little. Without a tokenizer there are batches, but no samples of text.
    """
    rows = _rows(train, 'train', request, packing)
    validation = None if held_out is None else _rows(held_out, 'validation', request, packing)
    memory = 'held in memory' if rows.cache.is_whole else f'read in blocks, of which {MEMORY >> 20} MiB stay in memory'
    request.say(f'order: an epoch is {rows}, in an order from seed {request.seed}; tokens {memory}')
    request.say(f'validation: {validation}' if validation else 'validation: none, no text is held out')
    return TokenSource(rows, validation, tokenizer, request.seed)


def row_numbers(rows: slice, batch_rows: int) -> np.ndarray:
    """int64: the rows of a batch that a slice takes."""
    return np.arange(batch_rows, dtype=np.int64)[rows]


def _rows(tokens: TokenStore, split: str, request: DataRequest, packing: Packing) -> Rows:
    n_targets = tokens.n_tokens - (1 if packing == 'concatenate' else tokens.n_documents)
    if n_targets >= request.sequence_length:
        if packing == 'concatenate':
            return Windows(tokens, request.sequence_length)
        return PackedDocuments(tokens, request.sequence_length, packing, request.directory, request.say)
    shorter = f'batch.sequence_length={n_targets}' if n_targets > 0 else 'a shorter batch.sequence_length'
    other = 'a larger data.validation (0 holds nothing out)' if split == 'validation' else 'more text'
    raise UserError(
        f'{tokens.name}: the {split} split has {tokens.n_tokens:,} tokens in {tokens.n_documents:,} documents\n'
        f'  one sequence needs {request.sequence_length + 1:,} (batch.sequence_length and one)\n'
        f'  change to {shorter} or less, or give {other}'
    )
