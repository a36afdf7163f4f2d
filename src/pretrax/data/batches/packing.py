"""Rows of whole documents, planned for one group of consecutive documents at a time.

A document of t + 1 tokens has t targets, each predicted from the tokens before it. Documents with more than L targets
are cut into chunks of L and a remainder; other documents are one chunk. A plan places chunks in rows of length L, and
the rest of each row is padding. Every target of every document is in exactly one row, so an epoch has n_tokens -
n_documents targets. Letters: R rows, L sequence length.
"""

import functools
import hashlib
import heapq
import io
import itertools
import time
import zipfile
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pretrax.data.batches.block_cache import BlockCache, Tokens
from pretrax.data.batches.source import HostBatch, segment_arrays
from pretrax.data.tokens.token_store import TokenStore
from pretrax.errors import UserError
from pretrax.storage import AnyPath
from pretrax.storage.locate import write_whole

# A group has about PLANNED_TOKENS tokens, or PLANNED_ROWS rows if that is more.
PLANNED_TOKENS = 1 << 18
PLANNED_ROWS = 64
_PLANS_KEPT = 256
_STARTS_AT_ONCE = 1 << 20


def pack_in_order(lengths: list[int], room: int) -> list[int]:
    """The row of each chunk: chunks fill rows in order, and start a new row when the next one does not fit."""
    rows, row, free = [], -1, 0
    for length in lengths:
        if length > free:
            row, free = row + 1, room
        rows.append(row)
        free -= length
    return rows


def pack_best_fit(lengths: list[int], room: int) -> list[int]:
    """The row of each chunk: longest chunks first, each in the row with the least sufficient room.

    Best-fit decreasing, as in Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv:2404.10830. Among
    rows with equal room, and among chunks of equal length, the first one is taken.
    """
    rows = [0] * len(lengths)
    n_rows = 0
    free: dict[int, list[int]] = {}  # room -> heap of the rows with that much room
    rooms = 0  # bit r is set if free[r] has a row, so the least sufficient room is one bit search away
    for chunk in sorted(range(len(lengths)), key=lambda chunk: -lengths[chunk]):
        length = lengths[chunk]
        if fitting := rooms >> length:
            least = length + (fitting & -fitting).bit_length() - 1
            row = heapq.heappop(free[least])
            if not free[least]:
                rooms ^= 1 << least
        else:
            row, least = n_rows, room
            n_rows += 1
        rows[chunk] = row
        if left := least - length:
            heapq.heappush(free.setdefault(left, []), row)
            rooms |= 1 << left
    return rows


PACKINGS: dict[str, Callable[[list[int], int], list[int]]] = {'whole': pack_in_order, 'best_fit': pack_best_fit}


class Plan(NamedTuple):
    """The rows of a group of documents."""

    first: np.ndarray  # int64 [rows + 1]; row r has the chunks first[r] to first[r + 1] - 1
    start: np.ndarray  # int64 [chunks], the position of the chunk's first input in the token stream
    targets: np.ndarray  # int64 [chunks], the targets of the chunk

    @property
    def n_rows(self) -> int:
        return len(self.first) - 1


class Index(NamedTuple):
    """The groups of a split, and totals over all its rows."""

    document: np.ndarray  # int64 [groups + 1], the first document of each group, then the number of documents
    row: np.ndarray  # int64 [groups + 1], the first row of each group, then the number of rows
    documents_per_row: np.ndarray  # the largest number of segments in a row, padding included
    targets: np.ndarray  # the number of targets
    cut: np.ndarray  # the number of documents that were cut


class PackedDocuments:
    """The rows of whole documents of one split, a `SplitRows` of `token_source.py`.

    Args:
        tokens: the split.
        directory: holds the index, which is rebuilt if the tokens, L or the packing change.
        say: prints how long planning took.
    """

    def __init__(
        self, tokens: TokenStore, sequence_length: int, packing: str, directory: AnyPath, say: Callable[[str], None]
    ):
        self.tokens, self.packing = tokens, packing
        self._length = sequence_length
        self._index = self._find_index(directory, say)
        self.cache = BlockCache(tokens, PLANNED_TOKENS // 2)
        self._ranges = functools.lru_cache(_PLANS_KEPT)(self._ranges_of_group)
        self.n = int(self._index.row[-1])
        self.block = max(1, 2 * PLANNED_TOKENS // sequence_length)
        self.documents_per_row = int(self._index.documents_per_row)
        self.density = int(self._index.targets) / max(1, self.n * sequence_length)

    def __str__(self) -> str:
        kind = 'in order' if self.packing == 'whole' else 'by best fit'
        cut = f', {self._index.cut:,} longer ones cut' if self._index.cut else ''
        return (
            f'{self.n:,} rows of whole documents {kind}{cut}; {self._index.targets:,} targets fill {self.density:.1%}, '
            'the rest is padding'
        )

    def read(self, rows: np.ndarray, whole_blocks: bool) -> HostBatch:
        """Reads the rows with the numbers `rows`, int64 [R]."""
        group = np.searchsorted(self._index.row, rows, side='right') - 1
        places = zip((rows - self._index.row[group]).tolist(), group.tolist(), strict=True)
        chunks = [self._ranges(its_group)[row] for row, its_group in places]
        tokens = iter(self.cache.read(list(itertools.chain.from_iterable(chunks)), whole_blocks))
        return join_chunks([list(itertools.islice(tokens, len(row))) for row in chunks], self._length)

    def _ranges_of_group(self, group: int) -> list[list[tuple[int, int]]]:
        """The ranges [start, stop) of the token stream that each row of a group has."""
        document = self._index.document
        plan = plan_rows(self._starts(document[group], document[group + 1]), self._length, self.packing)
        ranges = list(zip(plan.start.tolist(), (plan.start + plan.targets + 1).tolist(), strict=True))
        return [ranges[first:stop] for first, stop in itertools.pairwise(plan.first.tolist())]

    def _starts(self, document: int, stop: int) -> np.ndarray:
        """Where the documents [document, stop) start, and where the last one ends."""
        return self.tokens.read_starts(int(document), int(stop) + 1).astype(np.int64)

    def _find_index(self, directory: AnyPath, say: Callable[[str], None]) -> Index:
        recipe = f'1 {self.tokens.fingerprint} {self.packing} {self._length} {PLANNED_TOKENS} {PLANNED_ROWS}'
        path = directory / f'packing-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.npz'
        if path.is_file():
            try:
                with path.open('rb') as file, np.load(file, allow_pickle=False) as saved:
                    return Index(*(saved[name] for name in Index._fields))
            except OSError as error:
                raise UserError(f'{path}: cannot be read: {error.strerror or error}') from error
            except (EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
                raise UserError(
                    f'{path}: damaged index of packed rows: {error}\n  remove the file; it will be rebuilt'
                ) from None
        started = time.perf_counter()
        index = self._make_index()
        say(f'packing: planned {self.tokens.n_documents:,} documents in {time.perf_counter() - started:.1f} s: {path}')
        content = io.BytesIO()
        np.savez(content, **index._asdict())
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.getvalue())
        return index

    def _make_index(self) -> Index:
        documents = self._group_edges()
        n_rows, most, targets, cut = [0], 1, 0, 0
        for document, stop in itertools.pairwise(documents):
            starts = self._starts(document, stop)
            plan = plan_rows(starts, self._length, self.packing)
            n_rows.append(n_rows[-1] + plan.n_rows)
            cut += int((np.diff(starts) - 1 > self._length).sum())
            if plan.n_rows:
                filled = np.add.reduceat(plan.targets, plan.first[:-1])
                most = max(most, int((np.diff(plan.first) + (filled < self._length)).max()))
                targets += int(filled.sum())
        return Index(np.array(documents), np.array(n_rows), *map(np.array, (most, targets, cut)))

    def _group_edges(self) -> list[int]:
        """The first document of each group, then the number of documents."""
        size = max(PLANNED_TOKENS, PLANNED_ROWS * self._length)
        edges, full = [0], size
        for document in range(0, self.tokens.n_documents, _STARTS_AT_ONCE):
            starts = self.tokens.read_starts(document, min(document + _STARTS_AT_ONCE, self.tokens.n_documents))
            while (at := int(np.searchsorted(starts, full))) < len(starts):
                edges.append(document + at)
                full = int(starts[at]) + size
        return [*edges, self.tokens.n_documents]


def plan_rows(starts: np.ndarray, length: int, packing: str) -> Plan:
    """Places consecutive documents in rows.

    Args:
        starts: int64 [documents + 1], where each starts in the token stream, and where the last one ends.
    """
    targets = np.diff(starts) - 1
    n_chunks = -(-targets // length)
    document = np.repeat(np.arange(len(targets)), n_chunks)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(n_chunks) - n_chunks, n_chunks)
    start = starts[document] + nth * length
    targets = np.minimum(targets[document] - nth * length, length)
    rows = np.array(PACKINGS[packing](targets.tolist(), length), np.int64)
    order = np.argsort(rows, kind='stable')
    n_rows = int(rows.max()) + 1 if len(rows) else 0
    return Plan(np.searchsorted(rows[order], np.arange(n_rows + 1)), start[order], targets[order])


def join_chunks(rows: list[list[Tokens]], length: int) -> HostBatch:
    """Makes a batch of rows of chunks.

    A chunk of t + 1 tokens gives t inputs and t targets in one segment. The rest of a row is a segment of padding,
    whose targets do not count.
    """
    shape = len(rows), length
    tokens, targets = (np.zeros(len(rows) * length, np.uint32) for _ in range(2))
    counted = np.ones(len(rows) * length, np.float32)
    segments = []  # (first column, number in the row, tokens); the last one of a row is padding
    for row, chunks in enumerate(rows):
        begin = start = row * length
        for number, (encoded, mask) in enumerate(chunks, start=1):
            n = len(encoded) - 1
            stop = start + n
            tokens[start:stop], targets[start:stop] = encoded[:-1], encoded[1:]
            if mask is not None:
                counted[start:stop] = mask[1:]
            segments.append((start - begin, number, n))
            start = stop
        segments.append((start - begin, len(chunks) + 1, begin + length - start))
        counted[start : begin + length] = 0
    numbers, positions = segment_arrays(*shape, *np.array(segments).T)
    ids, next_ids = ((encoded >> 1).view(np.int32).reshape(shape) for encoded in (tokens, targets))
    return HostBatch(ids, next_ids, numbers, positions, counted.reshape(shape))
