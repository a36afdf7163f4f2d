"""The data component `synthetic`: random tokens, for benchmarks of everything but data loading.

data: {name: synthetic, vocab_size: 50304}
"""

from typing import Annotated

import numpy as np
from pydantic import Field

from pretrax.data.batches.source import DataRequest, HostBatch, Source, pack_rows
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
