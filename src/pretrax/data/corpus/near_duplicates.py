"""Finds documents that are nearly equal, by MinHash and locality-sensitive hashing.

    bands, rows = bands_and_rows(0.8)                              # (16, 8)
    keys = [band_keys(documents, 0.8) for documents in shards]     # in parallel; uint64 [documents, bands]
    firsts = clusters(keys)                                        # int64 [documents]; firsts[n] < n: leave out n

The similarity of two documents is the Jaccard index of their sets of 5-grams of words. Words are runs of letters,
digits and underscores, in lower case, and single characters of scripts without spaces (data/corpus/words.py); a text
with fewer than 5 words is one shingle. MinHash (Broder 1997) keeps 128 minima per document. Two documents share each
minimum with a probability equal to their similarity s. They are cut into `bands` bands of `rows` minima. Two documents
that have equal minima in a whole band are near-duplicates: the probability of that is 1 - (1 - s^rows)^bands. Their
similarity is not computed. Clusters are the connected components, as in Lee et al. 2021
(https://arxiv.org/abs/2107.06499), and the first document of each is kept.

A document's keys depend only on its text, so the result does not depend on shards or workers.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from pretrax.data.corpus.words import split_words
from pretrax.system.software import need_extra

N_HASHES = 128
SHINGLE = 5  # words
RECALL = 0.9  # at least this share of the pairs at the threshold is found
_SEED = 1
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that the hash of a shingle depends on all bits of its words


def bands_and_rows(threshold: float) -> tuple[int, int]:
    """The bands and the rows per band: as many rows as still find the pairs at the threshold often enough."""
    shapes = [(N_HASHES // rows, rows) for rows in range(1, N_HASHES + 1)]
    return max((shape for shape in shapes if probability(threshold, *shape) >= RECALL), key=lambda shape: shape[1])


def probability(similarity: float, bands: int, rows: int) -> float:
    """The probability that two documents of this similarity share a band."""
    return 1 - (1 - similarity**rows) ** bands


def algorithm() -> str:
    """The version of the signatures, for fingerprints. Raises UserError if the extra `dedup` is not installed."""
    return f'rensa {_minhash().ALGORITHM_VERSION}, {N_HASHES} hashes, {SHINGLE} words or characters'


def shingles(text: str) -> np.ndarray:
    """The hashes of the word 5-grams of a text, uint64 [shingles]; empty if it has no words."""
    words = split_words(text.lower())
    known = {word: xxhash.xxh3_64_intdigest(word.encode()) for word in set(words)}
    hashes = np.fromiter((known[word] for word in words), np.uint64, len(words))
    n = max(1, len(words) - SHINGLE + 1) if words else 0
    total = np.zeros(n, np.uint64)
    for start in range(min(SHINGLE, len(words))):
        total = total * _FACTOR + hashes[start : start + n]
    return total


def band_keys(texts: Iterable[str | None], threshold: float) -> np.ndarray:
    """The keys of each document, uint64 [documents, bands]; zeros for None and for a text without words.

    Raises UserError if the extra `dedup` is not installed.
    """
    minhash = _minhash()
    bands, rows = bands_and_rows(threshold)
    found = bytearray()
    for text in texts:
        hashes = shingles(text) if text else ()
        if not len(hashes):
            found += bytes(8 * bands)
            continue
        matrix = minhash.digest_matrix_from_flat_token_hashes(hashes, [0, len(hashes)], N_HASHES, _SEED)
        signature = np.array(matrix.to_rows()[0], np.uint32)[: bands * rows].reshape(bands, rows)
        for band in signature:
            found += xxhash.xxh3_64_digest(band.tobytes())
    return np.frombuffer(found, np.uint64).reshape(-1, bands)


def clusters(keys: Sequence[np.ndarray]) -> np.ndarray:
    """The first document of each document's cluster, int64 [documents]; documents are numbered across all shards."""
    from scipy.sparse import coo_matrix, csgraph

    n = sum(map(len, keys))
    firsts = np.arange(n)
    for band in range(keys[0].shape[1] if keys else 0):
        key = np.concatenate([of_shard[:, band] for of_shard in keys])
        order = np.argsort(key, kind='stable')
        equal = (key[order[1:]] == key[order[:-1]]) & (key[order[1:]] != 0)
        if not equal.any():
            continue
        before, after = firsts[order[:-1][equal]], firsts[order[1:][equal]]
        edges = coo_matrix((np.ones(len(before), bool), (before, after)), shape=(n, n))
        component = csgraph.connected_components(edges, directed=False)[1][firsts]
        _, first, number = np.unique(component, return_index=True, return_inverse=True)
        firsts = first[number]
    return firsts


def _minhash():
    need_extra('dedup', 'data.near_duplicates', 'rensa')
    from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]  # it has no stubs

    return RMinHash
