"""Your own data source: sums such as '12+34=46', generated on the fly, with one token per byte.

A source has `vocab_size` and `batch`. `batch` is a pure function of (seed, step, row), so runs resume exactly and get
the same batches on any number of processes. If the source has a `tokenizer`, the model can also generate text.
"""

import numpy as np

from pretrax import register
from pretrax.data.batches.source import DataRequest, HostBatch, Source, pack_rows


@register('data', 'sums')
class Sums(Source):
    vocab_size = 128
    end_of_text = ord('\n')  # each sum is a document, and ends with a newline

    def __init__(self, request: DataRequest, *, largest: int = 99):
        self.seed, self.length, self.largest, self.tokenizer = request.seed, request.sequence_length, largest, self

    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch:
        tokens = np.array([self.row(step * batch_rows + row) for row in range(rows.start, rows.stop)])
        return pack_rows(tokens, starts=np.roll(tokens == self.end_of_text, 1, axis=1))

    def row(self, number: int) -> list[int]:
        pairs = np.random.default_rng((self.seed, number)).integers(0, self.largest, (self.length, 2), endpoint=True)
        return self.encode(''.join(f'{a}+{b}={a + b}\n' for a, b in pairs))[: self.length + 1]

    def encode(self, text: str) -> list[int]:
        return list(text.encode('ascii', 'replace'))

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode('ascii')
