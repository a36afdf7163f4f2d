"""Samples a corpus to train a tokenizer: the excerpts of documents with the smallest hashes.

The sample depends only on the documents, not on their order or on the number of workers.
"""

import heapq
from collections.abc import Sequence

from pretrax.data.corpus.corpus import Shard
from pretrax.data.corpus.selection import RowCounts
from pretrax.data.tokenize.encode_shard import Progress, n_bytes_of, text_hash
from pretrax.data.tokenize.engines import Engine

SAMPLE_CHARACTERS = 16 << 20  # the most text that a tokenizer is trained on
EXCERPT = 1 << 16  # characters per excerpt

type _Heap = list[tuple[int, str]]  # the excerpt with the largest hash is removed first


def sample(engine: Engine, shards: Sequence[Shard], progress: Progress) -> tuple[RowCounts, int, list[str]]:
    """Returns the row counts, the bytes of text, and the sampled excerpts of all shards."""
    rows, n_bytes, chosen = RowCounts(), 0, []
    calls = [(shard, SAMPLE_CHARACTERS, EXCERPT) for shard in shards]
    found: list[tuple[int, RowCounts]] = []
    for number, (of_rows, of_bytes, of_chosen) in engine.unordered(sample_of, calls, progress):
        found.append((number, of_rows))
        n_bytes += of_bytes
        for entry in of_chosen:
            heapq.heappush(chosen, entry)
        n_chosen = sum(len(excerpt) for _, excerpt in chosen)
        while n_chosen > SAMPLE_CHARACTERS:
            n_chosen -= len(heapq.heappop(chosen)[1])
    for _, of_rows in sorted(found, key=lambda entry: entry[0]):
        rows += of_rows
    return rows, n_bytes, [excerpt for _, excerpt in chosen]


def sample_of(shard: Shard, most: int, excerpt_size: int, progress: Progress) -> tuple[RowCounts, int, _Heap]:
    """`sample` for one shard."""
    rows, n_bytes, reported, n_chosen = RowCounts(), 0, 0, 0
    chosen: _Heap = []
    for document in shard.documents(rows):
        text = document.text
        n_bytes += n_bytes_of(text)
        for start in range(0, len(text), excerpt_size):
            excerpt = text[start : start + excerpt_size]
            heapq.heappush(chosen, (-text_hash(excerpt), excerpt))
            n_chosen += len(excerpt)
            while n_chosen > most:
                n_chosen -= len(heapq.heappop(chosen)[1])
        if n_bytes - reported > 1 << 22:
            progress(n_bytes - reported, 0)
            reported = n_bytes
    return rows, n_bytes, chosen
