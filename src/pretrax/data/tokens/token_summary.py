"""What token files hold, in numbers: how long documents are, what they say, whether their tokenizer made them."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokens.token_copy import read_documents
from pretrax.data.tokens.token_store import TokenStore

_AT_ONCE = 1 << 20  # documents
_EXACT = 1 << 16  # lengths below this are counted one by one, so that the median is exact


@dataclass(frozen=True)
class Lengths:
    """Tokens in a document: `buckets` are (least, most, documents) of each power of two, from the first that occurs."""

    shortest: int
    median: int
    mean: float
    longest: int
    buckets: list[tuple[int, int, int]]


def lengths(store: TokenStore) -> Lengths:
    """How long the documents of a store are, in memory that does not grow with it."""
    counts = np.zeros(_EXACT + 1, np.int64)  # the last is for all longer ones
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
    """The ids of the first n documents, at most so many of each."""
    starts = store.read_starts(0, min(n, store.n_documents) + 1).astype(np.int64).tolist()
    for start, stop in itertools.pairwise(starts):
        yield (store.read([(start, min(stop, start + most))])[0] >> 1).tolist()


def tokenised_differently(store: TokenStore, tokenizer: Tokenizer, n: int, most: int) -> tuple[int, list[int]]:
    """How many of n documents, evenly chosen, were looked at, and the numbers of those whose text the tokenizer makes
    other tokens of. Documents of more than `most` tokens are passed over."""
    chosen = np.unique(np.linspace(0, store.n_documents - 1, min(n, store.n_documents)).astype(np.int64)).tolist()
    looked_at, different = 0, []
    for number in chosen:
        start, stop = store.read_starts(number, number + 2).tolist()
        if stop - start > most:
            continue
        ids = (store.read([(start, stop)])[0] >> 1).tolist()
        if ids[-1] == store.end_of_text:
            ids.pop()
        looked_at += 1
        if tokenizer.encode(tokenizer.decode(ids)) != ids:
            different.append(number)
    return looked_at, different


def missing_from(
    stores: Iterable[TokenStore], tokenizer: Tokenizer, texts: Iterable[tuple[str, str]]
) -> tuple[int, list[str]]:
    """Tokenise (place, text) and look for the documents in stores: how many texts there were, and the places of those
    that no store holds as they are."""
    wanted: dict[bytes, list[str]] = {}
    n = 0
    for place, text in texts:
        n += 1
        wanted.setdefault(_digest(np.array(tokenizer.encode(text), np.uint32)), []).append(place)
    for store in stores:
        for documents in read_documents(store):
            for ids in documents.ids():
                wanted.pop(_digest(ids[:-1] if ids[-1] == store.end_of_text else ids), None)
                if not wanted:
                    return n, []
    return n, [place for places in wanted.values() for place in places]


def _digest(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(ids.astype('<u4').tobytes(), digest_size=16).digest()
