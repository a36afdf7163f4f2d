"""Copies documents from token files to new flat-tokens: the basis of merge, split, shuffle and convert.

The output must have the same numbers of documents, tokens and targets as the inputs, otherwise it is not written. Its
manifest lists the inputs.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokens.flat_tokens import FlatTokens, TokenizerIdentity
from pretrax.data.tokens.flat_tokens_writer import create, refuse_existing
from pretrax.data.tokens.token_store import TokenStore
from pretrax.errors import Report, UserError
from pretrax.storage import AnyPath

AT_ONCE = 1 << 22  # tokens per read, unless one document has more
_STARTS_AT_ONCE = 1 << 16
_SAMPLE = 32  # documents


class Documents(NamedTuple):
    """Consecutive whole documents."""

    encoded: np.ndarray  # uint32 [tokens], `2 * id + starts_a_document`
    mask: np.ndarray | None  # bool [tokens], whether each token counts as a target; None: all count
    lengths: np.ndarray  # int64 [documents], tokens per document

    def chosen(self, which: np.ndarray) -> 'Documents':
        """The documents selected by `which`, bool [documents]."""
        kept = np.repeat(which, self.lengths)
        return Documents(self.encoded[kept], None if self.mask is None else self.mask[kept], self.lengths[which])

    def reordered(self, order: np.ndarray) -> 'Documents':
        """The documents in another order: document order[i] becomes document i."""
        starts = np.append(0, np.cumsum(self.lengths))[order]
        lengths = self.lengths[order]
        before = np.repeat(np.append(0, np.cumsum(lengths)[:-1]) - starts, lengths)
        at = np.arange(len(self.encoded)) - before
        return Documents(self.encoded[at], None if self.mask is None else self.mask[at], lengths)

    def ids(self) -> Iterator[np.ndarray]:
        """The ids of each document, uint32."""
        at = 0
        for length in self.lengths.tolist():
            yield self.encoded[at : at + length] >> 1
            at += length


def read_documents(store: TokenStore, say: Report | None = None) -> Iterator[Documents]:
    """Yields all documents of a store, about AT_ONCE tokens per read."""
    began = said = time.perf_counter()
    at = 0
    while at < store.n_documents:
        starts = store.read_starts(at, min(at + _STARTS_AT_ONCE, store.n_documents) + 1).astype(np.int64)
        n = max(1, int(np.searchsorted(starts, starts[0] + AT_ONCE, side='right')) - 1)
        span = (int(starts[0]), int(starts[n]))
        [encoded] = store.read([span])
        yield Documents(encoded, store.read_mask([span])[0] if store.has_mask else None, np.diff(starts[: n + 1]))
        at += n
        if say and (now := time.perf_counter()) - said > 10:
            said = now
            say(f'{store.name}: {span[1] / store.n_tokens:.0%} after {now - began:.0f} s')


class TextBytes:
    """Counts the bytes of text of documents, if the tokenizer allows it; see `TokenCounts`."""

    def __init__(self, tokenizer: Tokenizer | None, store: TokenStore):
        self._lengths = None
        if tokenizer is None:
            return
        lengths = tokenizer.text_lengths  # without special tokens: `decode` writes their names
        # If the text of a token depends on its neighbors, the byte counts are unknown.
        n = min(store.n_documents, _SAMPLE)
        starts = store.read_starts(0, n + 1).tolist()
        for encoded in store.read(list(itertools.pairwise(starts))):
            ids = tokenizer.text_ids(encoded >> 1)
            ids = ids[~np.isin(ids, [*tokenizer.special_tokens.values()])]
            if len(tokenizer.decode(ids.tolist()).encode()) != lengths[ids].sum():
                return
        self._lengths = lengths

    def count(self, documents: Documents) -> tuple[int, int] | None:
        """(bytes, predicted bytes); None if unknown."""
        if self._lengths is None:
            return None
        lengths = self._lengths[documents.encoded >> 1]
        targets = (documents.encoded & 1) == 0
        if documents.mask is not None:
            targets &= documents.mask
        return int(lengths.sum()), int(lengths[targets].sum())


@contextlib.contextmanager
def output(
    out: AnyPath,
    inputs: list[TokenStore],
    identity: TokenizerIdentity,
    tokenizer: Tokenizer | None,
    how: dict[str, Any],
    say: Report,
) -> Iterator[Callable[[str, Documents, tuple[int, int] | None], None]]:
    """Writes a new flat-tokens directory with all documents of some stores. Yields what appends them to a split.

    Args:
        tokenizer: None if unknown.
        how: the operation and its options, for the manifest.

    Raises:
        UserError: the directory exists, or its totals differ from those of the inputs.
    """
    refuse_existing(out)
    sources = [
        {'path': store.name, 'fingerprint': store.fingerprint, 'documents': store.n_documents, 'tokens': store.n_tokens}
        for store in inputs
    ]
    content = None if tokenizer is None else tokenizer.content
    with create(out, identity, content, how | {'inputs': sources}) as writer:

        def append(split: str, documents: Documents, n_bytes: tuple[int, int] | None) -> None:
            if len(documents.lengths):
                text, predicted = n_bytes or (None, None)
                writer.append(split, documents.encoded, documents.mask, n_bytes=text, predicted_bytes=predicted)

        yield append
        counts = list(writer.counts.values())
        for what, before, after in (
            ('documents', sum(store.n_documents for store in inputs), sum(count.documents for count in counts)),
            ('tokens', sum(store.n_tokens for store in inputs), sum(count.tokens for count in counts)),
            ('targets', sum(map(_n_targets, inputs)), sum(count.targets for count in counts)),
        ):
            if before != after:
                raise UserError(
                    f'{out}: not written: {before:,} {what} in the inputs, {after:,} in the output\n'
                    '  a file changed during the copy; start again when nothing writes to the files'
                )
    for split, count in writer.counts.items():
        say(f'{out}: {split} {count.documents:,} documents, {count.tokens:,} tokens')
    say(f'{out}: all {sum(count.documents for count in counts):,} documents of the inputs are in the output')


def _n_targets(store: TokenStore) -> int:
    return store.manifest.counts.targets if isinstance(store, FlatTokens) else store.n_tokens - store.n_documents
