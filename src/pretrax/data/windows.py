"""Batches from a store of tokens: rows are windows of the stream of tokens, in an order that (seed, epoch) permutes.

Window i holds tokens i L to i L + L: its last token is the first of the next window, so that every token of the stream
is a target once. Letters: R rows, L sequence length.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from pretrax.data.flat_tokens import open_split, read_tokenizer_json, splits
from pretrax.data.order import permute
from pretrax.data.source import DataRequest, HostBatch, pack_rows
from pretrax.data.token_store import TokenStore
from pretrax.data.tokenizer import Tokenizer
from pretrax.errors import UserError

# Splits up to this many bytes (uint32 tokens) are read into memory once.
HELD_IN_MEMORY = 256 << 20
STARTS_AT_ONCE = 1 << 20  # documents


class Windows:
    """The windows of one split. `read(window)` gives them by number; `n` is how many there are."""

    def __init__(self, tokens: TokenStore, sequence_length: int):
        self.tokens = tokens
        self.n = (tokens.n_tokens - 1) // sequence_length
        self.n_left_over = tokens.n_tokens - 1 - self.n * sequence_length
        self._length = sequence_length
        in_memory = tokens.n_tokens * 4 <= HELD_IN_MEMORY
        self._held = self._fetch([(0, tokens.n_tokens)]) if in_memory else None
        self.where = 'held in memory' if in_memory else f'read from disk, since they exceed {HELD_IN_MEMORY >> 20} MiB'

    def documents_per_row(self) -> int:
        """The largest number of documents in a window, so that kernels for packed documents know a bound."""
        most, last, in_last = 1, -1, 0
        for start in range(0, self.tokens.n_documents, STARTS_AT_ONCE):
            starts = self.tokens.read_starts(start, min(start + STARTS_AT_ONCE, self.tokens.n_documents))
            starts = starts[starts % self._length != 0].astype(np.int64)  # at a window's edge no further one begins
            windows, counts = np.unique(starts // self._length, return_counts=True)
            if len(windows):
                counts[0] += in_last if windows[0] == last else 0
                most, last, in_last = max(most, 1 + int(counts.max())), int(windows[-1]), int(counts[-1])
        return most

    def read(self, window: np.ndarray) -> HostBatch:
        """window int64 [R] -> the rows of a batch."""
        first = window * self._length
        if self._held is not None:
            (encoded,), counts = self._held
            place = first[:, None] + np.arange(self._length + 1)
            rows, counted = encoded[place], None if counts is None else counts[0][place]
        else:
            encoded, counts = self._fetch([(start, start + self._length + 1) for start in first.tolist()])
            rows, counted = np.stack(encoded), None if counts is None else np.stack(counts)
        return pack_rows(rows >> 1, (rows & 1).astype(bool), counted)

    def _fetch(self, ranges: list[tuple[int, int]]) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        return self.tokens.read(ranges), self.tokens.read_mask(ranges) if self.tokens.has_mask else None


class TokenSource:
    """A `Source` over two stores of tokens: what trains, and what is held out.

    Row `row` of step `step` is number g = step * batch_rows + row of the run: window permute(g mod n) of epoch g div n.
    The number of processes and devices does not enter.
    """

    def __init__(self, train: Windows, held_out: Windows | None, tokenizer: Tokenizer | None, seed: int):
        self.vocab_size = train.tokens.vocab_size
        self.tokenizer = tokenizer
        self.n_tokens = train.tokens.n_tokens
        self.bytes_per_token = train.tokens.bytes_per_target
        self.validation_bytes_per_token = held_out.tokens.bytes_per_target if held_out else None
        self.documents_per_row = max(windows.documents_per_row() for windows in (train, held_out) if windows)
        self.fingerprint = train.tokens.fingerprint
        self._train, self._held_out, self._seed = train, held_out, seed

    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch:
        number = step * batch_rows + _row_numbers(rows, batch_rows)
        return self._train.read(permute(number % self._train.n, self._train.n, self._seed, number // self._train.n))

    @property
    def validation(self) -> Callable[[int, slice, int], HostBatch] | None:
        """(index, rows, batch_rows) -> rows of held-out text, or None where none is held out. The order depends on no
        seed; each window comes once, and rows past the last one have mask 0."""
        return None if self._held_out is None else self._validation

    def _validation(self, index: int, rows: slice, batch_rows: int) -> HostBatch:
        assert self._held_out is not None
        number = index * batch_rows + _row_numbers(rows, batch_rows)
        n = self._held_out.n
        batch = self._held_out.read(permute(np.minimum(number, n - 1), n, seed=0, epoch=np.zeros_like(number)))
        return batch._replace(mask=batch.mask * (number < n).astype(np.float32)[:, None])


def open_tokens(directory: Path, request: DataRequest) -> TokenSource:
    """Open a flat-tokens directory for training. Raises UserError where it is damaged or there is too little."""
    train = open_split(directory, 'train')
    held_out = open_split(directory, 'validation') if 'validation' in splits(directory) else None
    identity = train.manifest.tokenizer
    if held_out and held_out.manifest.tokenizer != identity:
        raise UserError(f'{directory}: train and validation were made by different tokenizers\n  tokenise again')
    content = read_tokenizer_json(directory, identity)
    tokenizer = None if content is None else Tokenizer(content, str(directory), identity.end_of_text)
    return open_stores(train, held_out, tokenizer, request)


def open_stores(
    train: TokenStore, held_out: TokenStore | None, tokenizer: Tokenizer | None, request: DataRequest
) -> TokenSource:
    """A source of batches over stores of tokens of any format, and a word on what an epoch is.

    Raises UserError where there is too little. Without a tokenizer there are batches, but no samples of text.
    """
    windows = _windows(train, 'train', request)
    validation = None if held_out is None else _windows(held_out, 'validation', request)
    request.say(
        f'order: {windows.n:,} windows of {request.sequence_length:,} targets an epoch, in an order from seed '
        f'{request.seed}; {windows.n_left_over:,} tokens at the end do not fill one; tokens {windows.where}'
    )
    request.say(f'validation: {validation.n:,} windows' if validation else 'validation: none, no text is held out')
    return TokenSource(windows, validation, tokenizer, request.seed)


def _row_numbers(rows: slice, batch_rows: int) -> np.ndarray:
    return np.arange(batch_rows, dtype=np.int64)[rows]


def _windows(tokens: TokenStore, split: str, request: DataRequest) -> Windows:
    if tokens.n_tokens > request.sequence_length:
        return Windows(tokens, request.sequence_length)
    shorter = (
        f'batch.sequence_length={tokens.n_tokens - 1}' if tokens.n_tokens > 1 else 'a shorter batch.sequence_length'
    )
    other = 'a larger data.validation (0 holds nothing out)' if split == 'validation' else 'more text'
    raise UserError(
        f'{tokens.name}: the {split} split has {tokens.n_tokens:,} tokens in {tokens.n_documents:,} documents\n'
        f'  one sequence needs {request.sequence_length + 1:,} (batch.sequence_length and one)\n'
        f'  change to {shorter} or less, or give {other}'
    )
