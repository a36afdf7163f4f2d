"""The interface of batches to tokens: one split in any format."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class TokenStore(Protocol):
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

    @property
    def name(self) -> str: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def n_documents(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def largest_token(self) -> int: ...
    @property
    def end_of_text(self) -> int | None: ...
    @property
    def bytes_per_target(self) -> float | None: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def is_remote(self) -> bool: ...
    @property
    def has_mask(self) -> bool: ...

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The values `2 * id + starts_a_document` in each range [start, stop), uint32, read concurrently."""
        ...

    def read_starts(self, start: int, stop: int) -> np.ndarray:
        """The positions of the documents [start, stop) in the token stream, uint64; entry n_documents is its end."""
        ...

    def read_mask(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Whether each token in [start, stop) counts as a target, bool; all True if `has_mask` is False."""
        ...
