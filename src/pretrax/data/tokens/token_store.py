"""The interface of batches to tokens: one split in any format."""

import abc
from collections.abc import Sequence

import numpy as np


class TokenStore(abc.ABC):
    """Read access to a token stream and its document starts. Reading raises UserError if the data is damaged.

    Attributes:
        name: path or URL, for messages.
        n_tokens, n_documents: totals of the stream.
        vocab_size: vocabulary size of the tokenizer; every id is below it.
        largest_token: the largest id in the stream.
        end_of_text: the id that ends every document; None if documents have no such token.
        bytes_per_target: UTF-8 bytes of text per target that counts; None if unknown.
        fingerprint: identifies the tokens.
        is_remote: whether reading takes as long as a request to a bucket.
        has_mask: whether some tokens may not count as targets.
    """

    name: str
    n_tokens: int
    n_documents: int
    vocab_size: int
    largest_token: int
    end_of_text: int | None
    fingerprint: str
    bytes_per_target: float | None = None
    is_remote = False
    has_mask = False

    @abc.abstractmethod
    def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The values `2 * id + starts_a_document` in each range [start, stop), uint32, read concurrently."""

    @abc.abstractmethod
    def read_starts(self, start: int, stop: int) -> np.ndarray:
        """The positions of the documents [start, stop) in the token stream, uint64; entry n_documents is its end."""

    def read_mask(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Whether each token in [start, stop) counts as a target, bool; all True if `has_mask` is False."""
        return [np.ones(stop - start, bool) for start, stop in ranges]
