"""A sample of a corpus to train a tokenizer on: the pieces of documents with the smallest hashes.

It depends on the documents alone, not on their order or on how many workers look at them.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from pretrax.data.corpus.corpus import Counts, Shard
from pretrax.data.tokenize.engines import Engine
from pretrax.data.tokenize.pieces import Progress, n_bytes_of, text_hash

# A tokenizer is trained on at most so much text, in pieces that the hash of each chooses from all documents.
SAMPLE_CHARACTERS = 16 << 20
PIECE = 1 << 16

type _Heap = list[tuple[int, str]]  # the piece with the largest hash leaves first


def sample(engine: Engine, shards: Sequence[Shard], progress: Progress) -> tuple[Counts, int, list[str]]:
    """Rows, bytes of text and the chosen pieces of a corpus in shards."""
    rows, n_bytes, chosen = Counts(), 0, []
    calls = [(shard, SAMPLE_CHARACTERS, PIECE) for shard in shards]
    found: list[tuple[int, Counts]] = []
    for number, (of_rows, of_bytes, of_chosen) in engine.unordered(sample_of, calls, progress):
        found.append((number, of_rows))
        n_bytes += of_bytes
        for entry in of_chosen:
            heapq.heappush(chosen, entry)
        _shrink(chosen, SAMPLE_CHARACTERS)
    for _, of_rows in sorted(found, key=lambda entry: entry[0]):
        rows += of_rows
    return rows, n_bytes, [piece for _, piece in chosen]


def sample_of(shard: Shard, most: int, piece_size: int, progress: Progress) -> tuple[Counts, int, _Heap]:
    """The same of one shard."""
    rows, n_bytes, told, n_chosen = Counts(), 0, 0, 0
    chosen: _Heap = []
    for document in shard.documents(rows):
        text = document.text
        n_bytes += n_bytes_of(text)
        for start in range(0, len(text), piece_size):
            piece = text[start : start + piece_size]
            heapq.heappush(chosen, (-text_hash(piece), piece))
            n_chosen += len(piece)
            while n_chosen > most:
                n_chosen -= len(heapq.heappop(chosen)[1])
        if n_bytes - told > 1 << 22:
            progress(n_bytes - told, 0)
            told = n_bytes
    return rows, n_bytes, chosen


def _shrink(chosen: _Heap, most: int) -> None:
    n_chosen = sum(len(piece) for _, piece in chosen)
    while n_chosen > most:
        n_chosen -= len(heapq.heappop(chosen)[1])


def without_progress(function: Callable[[Any], Any], argument: Any, progress: Progress) -> Any:
    """A function of one argument, called as engines call."""
    return function(argument)
