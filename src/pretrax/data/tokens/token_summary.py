"""Statistics and checks of token files: document lengths, first documents, and comparison with a tokenizer."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokens.token_copy import read_documents
from pretrax.data.tokens.token_store import TokenStore

_AT_ONCE = 1 << 20  # documents per read
_EXACT = 1 << 16  # lengths below this are counted individually, so that the median is exact


@dataclass(frozen=True)
class Lengths:
    """Tokens per document; `buckets` are (least, most, documents) per power of two."""

    shortest: int
    median: int
    mean: float
    longest: int
    buckets: list[tuple[int, int, int]]


def lengths(store: TokenStore) -> Lengths:
    """The document lengths of a store, in constant memory."""
    counts = np.zeros(_EXACT + 1, np.int64)  # the last entry counts all longer documents
    by_bits, shortest, longest = np.zeros(64, np.int64), store.n_tokens, 0
    for at in range(0, store.n_documents, _AT_ONCE):
        found = np.diff(store.read_starts(at, min(at + _AT_ONCE, store.n_documents) + 1).astype(np.int64))
        counts += np.bincount(np.minimum(found, _EXACT), minlength=_EXACT + 1)
        by_bits += np.bincount(np.frexp(found.astype(np.float64))[1] - 1, minlength=64)
        shortest, longest = min(shortest, int(found.min())), max(longest, int(found.max()))
    median = int(np.searchsorted(np.cumsum(counts), (store.n_documents + 1) // 2))
    occurring = np.flatnonzero(by_bits)
    buckets = [(1 << bit, (2 << bit) - 1, int(by_bits[bit])) for bit in range(occurring[0], occurring[-1] + 1)]
    return Lengths(shortest, median, store.n_tokens / store.n_documents, longest, buckets)


def first_documents(store: TokenStore, n: int, most: int) -> Iterator[list[int]]:
    """The ids of the first n documents, at most `most` of each."""
    starts = store.read_starts(0, min(n, store.n_documents) + 1).astype(np.int64).tolist()
    for start, stop in itertools.pairwise(starts):
        yield (store.read([(start, min(stop, start + most))])[0] >> 1).tolist()


def tokenized_differently(store: TokenStore, tokenizer: Tokenizer, n: int, most: int) -> tuple[int, list[int]]:
    """Tokenizes the text of n evenly spaced documents again.

    Returns the number of documents compared, and the numbers of those with different tokens. Documents of more than
    `most` tokens are skipped.
    """
    chosen = np.unique(np.linspace(0, store.n_documents - 1, min(n, store.n_documents)).astype(np.int64)).tolist()
    if store.n_documents < _AT_ONCE:
        starts = store.read_starts(0, store.n_documents + 1)
        spans = [starts[number : number + 2].tolist() for number in chosen]
    else:
        spans = [store.read_starts(number, number + 2).tolist() for number in chosen]
    compared = [
        (number, (start, stop)) for number, (start, stop) in zip(chosen, spans, strict=True) if stop - start <= most
    ]
    different = []
    for (number, _), encoded in zip(compared, store.read([span for _, span in compared]), strict=True):
        ids = tokenizer.text_ids((encoded >> 1).tolist())
        if tokenizer.encode(tokenizer.decode(ids)) != ids:
            different.append(number)
    return len(compared), different


def missing_from(
    stores: Iterable[TokenStore], tokenizer: Tokenizer, texts: Iterable[tuple[str, str]]
) -> tuple[int, list[str]]:
    """Tokenizes texts and searches for them in stores.

    Args:
        stores: where to search.
        tokenizer: the tokenizer of the stores.
        texts: (origin, text) pairs.

    Returns the number of texts, and the origins of those that are in no store.
    """
    wanted: dict[bytes, list[str]] = {}
    n = 0
    for origin, text in texts:
        n += 1
        wanted.setdefault(_digest(np.array(tokenizer.encode(text), np.uint32)), []).append(origin)
    for store in stores:
        for documents in read_documents(store):
            for ids in documents.ids():
                wanted.pop(_digest(tokenizer.text_ids(ids)), None)
                if not wanted:
                    return n, []
    return n, [origin for origins in wanted.values() for origin in origins]


def _digest(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(ids.astype('<u4').tobytes(), digest_size=16).digest()
