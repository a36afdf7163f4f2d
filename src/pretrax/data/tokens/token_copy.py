"""Documents from token files into new flat-tokens: merge, split, shuffle and convert are ways to choose and order them.

Whatever goes in comes out: the counts of both sides are compared before a directory gets its name, and its manifest says
what it was made of.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokens.flat_tokens import FlatTokens, TokenizerIdentity
from pretrax.data.tokens.flat_tokens_writer import Writer, create
from pretrax.data.tokens.token_store import TokenStore
from pretrax.errors import UserError

AT_ONCE = 1 << 22  # tokens, unless one document has more
_STARTS_AT_ONCE = 1 << 16
_SAMPLE = 32  # documents

type Say = Callable[[str], None]


class Documents(NamedTuple):
    """Whole documents, one after another.

    encoded uint32, `2 * id + starts_a_document`; mask bool, whether each token counts, None where all do; lengths int64
    [documents].
    """

    encoded: np.ndarray
    mask: np.ndarray | None
    lengths: np.ndarray

    def chosen(self, which: np.ndarray) -> 'Documents':
        """The documents for which `which`, bool [documents], is true."""
        kept = np.repeat(which, self.lengths)
        return Documents(self.encoded[kept], None if self.mask is None else self.mask[kept], self.lengths[which])

    def reordered(self, order: np.ndarray) -> 'Documents':
        """The documents in another order: number order[i] becomes number i."""
        starts = np.append(0, np.cumsum(self.lengths))[order]
        lengths = self.lengths[order]
        before = np.repeat(np.append(0, np.cumsum(lengths)[:-1]) - starts, lengths)
        place = np.arange(len(self.encoded)) - before
        return Documents(self.encoded[place], None if self.mask is None else self.mask[place], lengths)

    def ids(self) -> Iterator[np.ndarray]:
        """The ids of each document, uint32."""
        at = 0
        for length in self.lengths.tolist():
            yield self.encoded[at : at + length] >> 1
            at += length


def read_documents(store: TokenStore, say: Say | None = None) -> Iterator[Documents]:
    """All documents of a store, about AT_ONCE tokens at a time."""
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
    """How many bytes of text documents stand for, where the tokenizer tells; see `Counts`."""

    def __init__(self, tokenizer: Tokenizer | None, end_of_text: int | None, store: TokenStore):
        self._lengths = None
        if tokenizer is None:
            return
        lengths = np.array([tokenizer.byte_length(token) for token in range(tokenizer.vocab_size)], np.int64)
        if end_of_text is not None:
            lengths[end_of_text] = 0
        # Not so where a token's text depends on its neighbours: then nothing is said rather than something near.
        n = min(store.n_documents, _SAMPLE)
        starts = store.read_starts(0, n + 1).tolist()
        for encoded in store.read(list(itertools.pairwise(starts))):
            ids = encoded >> 1
            ids = ids[:-1] if end_of_text is not None and ids[-1] == end_of_text else ids
            if len(tokenizer.decode(ids.tolist()).encode()) != lengths[ids].sum():
                return
        self._lengths = lengths

    def count(self, documents: Documents) -> tuple[int, int] | None:
        """(bytes, predicted bytes), None where that is not known."""
        if self._lengths is None:
            return None
        lengths = self._lengths[documents.encoded >> 1]
        targets = (documents.encoded & 1) == 0
        if documents.mask is not None:
            targets &= documents.mask
        return int(lengths.sum()), int(lengths[targets].sum())


class Output:
    """The splits of a new flat-tokens directory, and what each is made of."""

    def __init__(self, writer: Writer):
        self._writer = writer
        self._waiting: dict[str, Documents] = {}  # the last ones get the bytes of all
        self._bytes: dict[str, tuple[int, int] | None] = {}

    def append(self, split: str, documents: Documents, n_bytes: tuple[int, int] | None) -> None:
        """Add documents to a split; n_bytes as of `TextBytes.count`."""
        if not len(documents.lengths):
            return
        if split in self._waiting:
            before = self._waiting[split]
            self._writer.append_encoded(split, before.encoded, before.mask, n_bytes=0, predicted_bytes=0)
        so_far = self._bytes.get(split, (0, 0))
        self._bytes[split] = (
            None if so_far is None or n_bytes is None else (so_far[0] + n_bytes[0], so_far[1] + n_bytes[1])
        )
        self._waiting[split] = documents

    def finish(self) -> None:
        for split, documents in self._waiting.items():
            n_bytes, predicted = self._bytes[split] or (None, None)
            self._writer.append_encoded(
                split, documents.encoded, documents.mask, n_bytes=n_bytes, predicted_bytes=predicted
            )


@contextlib.contextmanager
def output(
    out: Path,
    inputs: list[TokenStore],
    identity: TokenizerIdentity,
    tokenizer: Tokenizer | None,
    how: dict[str, Any],
    say: Say,
) -> Iterator[Output]:
    """A new flat-tokens directory for all documents of some stores.

    Args:
        how: what is done to them, for the manifest.

    Raises UserError where the directory exists, and where not all that went in came out.
    """
    refuse_existing(out)
    of = [
        {'path': store.name, 'fingerprint': store.fingerprint, 'documents': store.n_documents, 'tokens': store.n_tokens}
        for store in inputs
    ]
    content = None if tokenizer is None else tokenizer.content
    with create(out, identity, content, how | {'inputs': of}) as writer:
        made = Output(writer)
        yield made
        made.finish()
        counts = list(writer.counts.values())
        for what, before, after in (
            ('documents', sum(store.n_documents for store in inputs), sum(count.documents for count in counts)),
            ('tokens', sum(store.n_tokens for store in inputs), sum(count.tokens for count in counts)),
            ('targets', sum(map(_n_targets, inputs)), sum(count.targets for count in counts)),
        ):
            if before != after:
                raise UserError(
                    f'{out}: not written: {before:,} {what} were there, and {after:,} came out\n'
                    '  a file changed while it was read: start again when the files are at rest'
                )
    for split, count in writer.counts.items():
        say(f'{out}: {split} {count.documents:,} documents, {count.tokens:,} tokens')
    say(f'{out}: as many came out as went in, {sum(count.documents for count in counts):,} documents')


def refuse_existing(out: Path) -> None:
    """Raises UserError where something has the name of what is to be written."""
    if out.exists():
        raise UserError(f'{out}: there is something of this name already\n  give another --out, or remove it')
    standing = next(parent for parent in out.absolute().parents if parent.exists())
    if not standing.is_dir():
        raise UserError(f'{out}: cannot write there: {standing} is a file')


def _n_targets(store: TokenStore) -> int:
    return store.manifest.counts.targets if isinstance(store, FlatTokens) else store.n_tokens - store.n_documents
