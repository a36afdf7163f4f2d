"""The data components without text: `synthetic`, random tokens, for benchmarks of everything but data loading; and
`tokenizer`, for runs with imported weights, which can generate but not train.

data: {name: synthetic, vocab_size: 50304}
"""

from typing import Annotated

import numpy as np
from pydantic import Field

from pretrax.data.batches.source import DataRequest, HostBatch, Source, pack_rows
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokenizers.tokenizer_files import TOKENIZER_JSON, named_begin
from pretrax.errors import UserError


class SyntheticSource(Source):
    """Documents of one length, with tokens from Zipf's law: the probability of token k is proportional to 1 / (k + 1).

    Each row depends only on the seed and its number in the run.
    """

    def __init__(self, request: DataRequest, vocab_size: int, document_length: int):
        self.vocab_size = vocab_size
        self.fingerprint = f'synthetic {vocab_size} {document_length}'
        self.validation = self._held_out
        self.documents_per_row = -(-request.sequence_length // document_length)
        self._seed, self._length, self._document = request.seed, request.sequence_length, document_length
        # Sampled with the inverse of the cumulative distribution, which is exponential for 1 / x.
        self._spread = np.log(vocab_size + 1)

    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch:
        return self._rows(0, step * batch_rows + np.arange(batch_rows)[rows])

    def _held_out(self, index: int, rows: slice, batch_rows: int) -> HostBatch:
        return self._rows(1, index * batch_rows + np.arange(batch_rows)[rows])

    def _rows(self, split: int, numbers: np.ndarray) -> HostBatch:
        uniform = np.stack(
            [
                np.random.default_rng([self._seed, split, number]).random(self._length + 1, np.float32)
                for number in numbers.tolist()
            ]
        )
        tokens = np.minimum(np.exp(uniform * self._spread) - 1, self.vocab_size - 1).astype(np.int32)
        starts = np.zeros(tokens.shape, bool)
        starts[:, :: self._document] = True
        return pack_rows(tokens, starts)


def open_synthetic(
    request: DataRequest,
    *,
    vocab_size: Annotated[int, Field(description='number of token ids')],
    document_length: Annotated[int | None, Field(description='tokens of a document; null: a row is one')] = None,
) -> SyntheticSource:
    """Random tokens from Zipf's law, for benchmarks of everything but data loading."""
    document_length = request.sequence_length + 1 if document_length is None else document_length
    if vocab_size < 2 or document_length < 1:
        raise UserError(
            f'data: vocab_size={vocab_size}, document_length={document_length}\n'
            '  expected vocab_size >= 2 and document_length >= 1'
        )
    request.say(f"data: synthetic tokens from Zipf's law, {vocab_size:,} ids; no files are read")
    return SyntheticSource(request, vocab_size, document_length)


class TokenizerOnly(Source):
    """A tokenizer without text, of a run that `pretrax import` wrote: it generates, and cannot train.

    `tokenizer` is None if the imported checkpoint had no tokenizer.json.
    """

    documents_per_row = 1
    largest_token = -1  # it has no tokens to train on

    def __init__(
        self,
        request: DataRequest,
        *,
        vocab_size: Annotated[int | None, Field(description='number of token ids, if there is no tokenizer')] = None,
        begin_of_text: Annotated[
            bool | str | None,
            Field(
                description="what begins a text: null: the tokens that tokenizer.json adds; true, false, or a token's "
                'name'
            ),
        ] = None,
        end_of_text: Annotated[
            int | None, Field(description='id that ends a text; null: that of a token with one of the usual names')
        ] = None,
    ):
        self._directory = request.directory
        path = request.directory / TOKENIZER_JSON
        self.tokenizer = Tokenizer(path.read_bytes(), str(path), end_of_text) if path.is_file() else None
        if self.tokenizer is not None:
            self.tokenizer.before_text = named_begin(request.directory, self.tokenizer.token_id)
            self.tokenizer.begin_with(begin_of_text)
            self.vocab_size = self.tokenizer.vocab_size
        elif vocab_size is not None:
            self.vocab_size = vocab_size
        else:
            raise UserError(f'{path}: no such file, and data.vocab_size is not given\n  set data.vocab_size')

    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch:
        raise UserError(
            f'{self._directory.parent} has weights and a tokenizer, but no text to train on\n'
            f'to train these weights, use another run with init_from: {self._directory.parent}'
        )
