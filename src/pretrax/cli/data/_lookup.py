"""Looks n-grams up in token files, with several processes."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from pretrax.data.tokenize.encode_shard import Progress
from pretrax.data.tokenize.engines import Processes
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokens.token_files import open_token_files
from pretrax.data.tokens.token_store import TokenStore
from pretrax.evaluate.contamination import Ngrams, words
from pretrax.storage import AnyPath

_PIECE = 1 << 18  # tokens that are decoded at once
_CALL = 16 * _PIECE  # tokens that a process takes at once
_TOKENS_PER_WORD = 32  # a piece ends this many tokens per word of an n-gram after the next one begins


def look_up(
    ngrams: Ngrams, path: AnyPath, options: dict[str, Any], split: str, n_tokens: int, workers: int | None
) -> dict[int, int]:
    """The n-grams in the documents of a split.

    Args:
        options: the keyword arguments with which `open_token_files` opens them.
        workers: processes; None: one per core.

    Returns:
        {number of an n-gram that was found: number of the first document that has it}.
    """
    spans = [(start, min(start + _CALL, n_tokens)) for start in range(0, n_tokens, _CALL)]
    calls = [(ngrams, path, options, split, span) for span in spans]
    count = workers or os.cpu_count() or 1
    if count == 1 or len(calls) == 1:
        found = [look_up_span(*call, lambda n_bytes, n_tokens: None) for call in calls]
    else:
        with contextlib.closing(Processes(count)) as processes:
            found = [one for _, one in processes.unordered(look_up_span, calls, lambda n_bytes, n_tokens: None)]
    places: dict[int, int] = {}
    for number, document in itertools.chain.from_iterable(one.items() for one in found):
        places[number] = min(document, places.get(number, document))
    return places


def look_up_span(
    ngrams: Ngrams, path: AnyPath, options: dict[str, Any], split: str, span: tuple[int, int], progress: Progress
) -> dict[int, int]:
    """`look_up` in the tokens [start, stop) of the split, and in as many behind them as an n-gram may have."""
    files = open_token_files(path, lambda text: None, **options)
    assert files.tokenizer is not None
    places: dict[int, int] = {}
    start, stop = span
    for first in range(start, stop, _PIECE):
        end = min(first + _PIECE, stop)
        for document, text in texts_of(
            files.splits[split], files.tokenizer, first, end, _TOKENS_PER_WORD * ngrams.longest
        ):
            for number in ngrams.find(text):
                places.setdefault(number, document)
        progress(0, end - first)
    return places


def texts_of(
    store: TokenStore, tokenizer: Tokenizer, start: int, stop: int, beyond: int
) -> Iterator[tuple[int, list[str]]]:
    """(number, words) of each document with tokens in [start, stop), up to `beyond` tokens behind; only whole words."""
    stop = min(stop + beyond, store.n_tokens)
    [values] = store.read([(start, stop)])
    begins = np.flatnonzero(values & 1).tolist()
    bounds = sorted({0, *begins, len(values)})
    number = _document_at(store, start)
    is_whole_at_end = stop == store.n_tokens
    for left, right in itertools.pairwise(bounds):
        ids = (values[left:right] >> 1).tolist()
        is_cut = ids[-1] != store.end_of_text and right == len(values) and not is_whole_at_end
        found = words(tokenizer.decode(tokenizer.text_ids(ids)))
        yield number, found[0 if values[left] & 1 else 1 : len(found) - is_cut]
        number += 1


def _document_at(store: TokenStore, position: int) -> int:
    """The number of the document that has the token at a position."""
    low, high = 0, store.n_documents - 1
    while low < high:
        middle = (low + high + 1) // 2
        if int(store.read_starts(middle, middle + 1)[0]) <= position:
            low = middle
        else:
            high = middle - 1
    return low
