"""Token stores in memory, and documents as a writer of flat-tokens takes them."""

from collections.abc import Sequence

import numpy as np


class ArrayStore:
    """A `TokenStore` of documents of the given lengths, whose ids count up through the stream from 1.

    Attributes:
        ranges: every range of tokens that was read, in order.
    """

    name = 'an array'
    end_of_text = None
    bytes_per_target = None

    def __init__(self, lengths: Sequence[int], mask: np.ndarray | None = None):
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64)
        self.n_tokens, self.n_documents = int(self.starts[-1]), len(lengths)
        self.vocab_size, self.largest_token = self.n_tokens + 1, self.n_tokens
        self.fingerprint = f'{list(lengths)}'
        self.has_mask, self.is_remote = mask is not None, False
        self.encoded = 2 * np.arange(1, self.n_tokens + 1, dtype=np.uint32)
        self.encoded[self.starts[:-1].astype(int)] += 1
        self.mask = np.ones(self.n_tokens, bool) if mask is None else mask
        self.ranges: list[tuple[int, int]] = []

    def read(self, ranges):
        self.ranges += ranges
        assert all(0 <= start < stop <= self.n_tokens for start, stop in ranges)
        return [self.encoded[start:stop] for start, stop in ranges]

    def read_starts(self, start, stop):
        assert 0 <= start < stop <= self.n_documents + 1
        return self.starts[start:stop]

    def read_mask(self, ranges):
        return [self.mask[start:stop] for start, stop in ranges]


def encode_documents(documents, masks=None) -> tuple[np.ndarray, np.ndarray | None]:
    """The values `2 * id + starts_a_document` of documents, and whether each token counts as a target."""
    ends = np.cumsum([len(ids) for ids in documents])
    encoded = np.concatenate([np.asarray(ids, np.uint32) for ids in documents]) << 1
    encoded[np.append(0, ends[:-1])] |= 1
    return encoded, None if masks is None else np.concatenate([np.asarray(mask, bool) for mask in masks])
