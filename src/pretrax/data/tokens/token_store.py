"""What batches are made of: the tokens of one split, whoever wrote them and wherever they lie."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class TokenStore(Protocol):
    """Read access to a stream of tokens and to where its documents start. Reading raises UserError where it is damaged.

    Attributes:
        name: what messages call it (a path or an address).
        n_tokens, n_documents: of the whole stream.
        vocab_size: every id is below it.
        end_of_text: the id that ends a document, None where documents end without one.
        bytes_per_target: UTF-8 bytes of text per target that counts, None where the format does not say.
        fingerprint: differs where the tokens differ.
        has_mask: whether `read_mask` says anything.
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
    def end_of_text(self) -> int | None: ...
    @property
    def bytes_per_target(self) -> float | None: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def has_mask(self) -> bool: ...

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The values `2 * id + starts_a_document` in each [start, stop), uint32, all read at once."""
        ...

    def read_starts(self, start: int, stop: int) -> np.ndarray:
        """Where documents start to stop - 1 begin in the stream of tokens, uint64; after the last comes the end."""
        ...

    def read_mask(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Whether each token in [start, stop) counts as a target, bool; all True where `has_mask` is False."""
        ...
