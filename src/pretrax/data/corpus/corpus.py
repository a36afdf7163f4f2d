"""The documents of a corpus in order, as a whole or in shards for parallel workers.

    corpus = Corpus(files, selection)
    made = shards(corpus, 64, map=pool.map)           # at most 64, in order, small and picklable
    counts = RowCounts()                                 # one per worker
    for document in made[3].documents(counts):        # never empty, filtered, no duplicates
        ...
    total = sum(counts_of_all_workers, RowCounts())
    for line in total.lines():                        # 'documents: 12 read = 9 kept + 2 empty + 1 bad'
        say(line)

For any n, the shards of `shards(corpus, n)` together have the documents of `corpus.documents()` in the same order,
and their counts add up to the same totals. A shard is a value: reading it again, in another process or after a
restart, gives the same documents, or raises UserError if a file has changed. `shards(corpus, n)` returns the same
list for an unchanged corpus, so interrupted work can resume by shard number. `Shard.size` is in stored bytes, for
progress bars.

With `deduplicate`, `shards` reads all text once through `map` to find the duplicates, and keeps 16 bytes per
document. With `near_duplicates` it does the same again, and keeps 8 bytes per band (data/corpus/near_duplicates.py).
Pass the `map` of a pool to read in parallel. Otherwise `shards` reads only file sizes, .parquet footers and line
indices.
"""

import bisect
import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pretrax.data.corpus.content import Document
from pretrax.data.corpus.files import TextFile
from pretrax.data.corpus.hugging_face import HuggingFaceDataset
from pretrax.data.corpus.listing import FileCounts
from pretrax.data.corpus.near_duplicates import band_keys, clusters
from pretrax.data.corpus.parts import Lines, Part, Whole, refuse_changed
from pretrax.data.corpus.selection import DUPLICATE, NEAR_DUPLICATE, RowCounts, Selection, digest, documents
from pretrax.data.corpus.storage import opened, storage_errors
from pretrax.data.corpus.tables import Delimited, RowGroups
from pretrax.errors import Report

# A corpus of at most this many bytes is identified by its content, a larger one by its names, sizes and modification
# times.
DIGESTED = 1 << 30
_WITHOUT_FIELDS = ('text', 'python')
_DUPLICATE_GROUPS = 16  # duplicates are searched in one group of digests after the other, to save memory

_SHOWN_CLUSTERS = 5  # of near-duplicates, the largest

type Map = Callable[[Callable[['Shard'], np.ndarray], Iterable['Shard']], Iterable[np.ndarray]]


@dataclass(frozen=True)
class Corpus:
    """The documents of some files, in order. `found` accounts for the files that were left out."""

    files: Sequence[TextFile | HuggingFaceDataset]
    selection: Selection = field(default_factory=Selection)
    found: FileCounts = field(default_factory=FileCounts)

    @functools.cached_property
    def size(self) -> int:
        """Stored bytes, before decompression."""
        return sum(file.size for file in self.files)

    def documents(self, counts: RowCounts | None = None, start: int = 0) -> Iterator[Document]:
        """The kept documents, without those of the first `start` rows."""
        for shard in shards(self, 1):
            yield from shard.documents(counts, start)

    def shared_files(self, other: 'Corpus') -> int:
        """The number of files that are also in another corpus, under any name."""
        datasets = [{str(file) for file in one.files if isinstance(file, HuggingFaceDataset)} for one in (self, other)]
        return len(self.found.keys & other.found.keys) + len(datasets[0] & datasets[1])

    @property
    def has_rows(self) -> bool:
        """Whether any file has rows with fields."""
        return any(file.kind not in _WITHOUT_FIELDS for file in self.files)

    @property
    def known_by(self) -> str:
        """What the fingerprint covers: 'content', or a phrase for large corpora."""
        if self.size <= DIGESTED:
            return 'content'
        return f'names, sizes and modification times, since it is over {DIGESTED >> 30} GiB'

    def fingerprint(self) -> str:
        """Identifies the documents: sha256 of the kind and content of each file, and of the selection.

        A corpus of more than DIGESTED bytes is identified by the path, size and modification time (or entity tag) of
        each file, and a Hugging Face dataset by its files with their times, or by its commit.
        """
        total = hashlib.sha256()
        for file in self.files:
            total.update(f'{file.kind} '.encode() + self._identity(file) + b'\n')
        total.update(self.selection.identity(self.has_rows).encode())
        return total.hexdigest()

    def _identity(self, file: TextFile | HuggingFaceDataset) -> bytes:
        if isinstance(file, HuggingFaceDataset):
            return file.identity.encode()
        if self.size > DIGESTED and file.state.stamp:
            address = os.path.abspath(file.path) if isinstance(file.path, Path) else file.path.url
            return f'{address} {file.state.size} {file.state.stamp}'.encode()
        refuse_changed(file)
        with opened(file.path) as stream, storage_errors(file.path):
            return hashlib.file_digest(stream, 'sha256').digest()  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Shard:
    """Consecutive rows of a corpus, and which of these repeat an earlier document."""

    parts: tuple[Part, ...]
    selection: Selection
    size: int
    duplicates: np.ndarray | None = None  # rows of this shard, ascending
    near_duplicates: np.ndarray | None = None  # rows that nearly repeat an earlier one, ascending

    def documents(self, counts: RowCounts | None = None, start: int = 0) -> Iterator[Document]:
        """The kept documents, without those of the first `start` rows; `counts` counts every row that is read."""
        counts = RowCounts() if counts is None else counts
        duplicates, near_duplicates = _from(self.duplicates, start), _from(self.near_duplicates, start)
        duplicate, near_duplicate = next(duplicates, None), next(near_duplicates, None)
        for row, document in enumerate(self._rows(counts, start), start):
            if row == duplicate:
                duplicate = next(duplicates, None)
                counts.left_out[DUPLICATE] += 1
            elif row == near_duplicate:
                near_duplicate = next(near_duplicates, None)
                counts.left_out[NEAR_DUPLICATE] += 1
            elif document is not None:
                counts.kept += 1
                yield document

    def origin(self, row: int) -> str:
        """File and line of a row; may read the file again."""
        for part in self.parts:
            if row < (n_rows := part.count()):
                return part.exact(next(part.rows(row)).origin)
            row -= n_rows
        raise IndexError(row)

    def _rows(self, counts: RowCounts, start: int = 0) -> Iterator[Document | None]:
        """The document of each row, or None if it has none."""
        for part in self.parts:
            if start and (n_rows := part.count()) <= start:
                start -= n_rows
                continue
            yield from documents(part.rows(start), self.selection, counts, part.exact)
            start = 0


def shards(corpus: Corpus, n: int, map: Map = map, say: Report = lambda _: None) -> list[Shard]:  # noqa: A002
    """At most n shards of similar size, none of them empty; see the top of this file. `say` reports near-duplicates."""
    sizes = [max(1, file.size) for file in corpus.files]  # some remote storage does not report sizes
    total = sum(sizes)
    bounds = sorted({total * i // n for i in range(1, n)} - {0})
    parts: list[list[Part]] = [[] for _ in range(len(bounds) + 1)]
    filled = [0] * len(parts)
    position = 0
    for file, size in zip(corpus.files, sizes, strict=True):
        first, stop = bisect.bisect_right(bounds, position), bisect.bisect_left(bounds, position + size)
        cuts = [bound - position for bound in bounds[first:stop]]
        at = first
        for number, (part, n_bytes) in enumerate(
            zip(_cut(file, cuts, corpus.selection.fields), _steps([0, *cuts, size]), strict=True), first
        ):
            if part is not None:
                parts[number].append(part)
                at = number
            filled[at] += n_bytes
        position += size
    made = [Shard(tuple(its), corpus.selection, size) for its, size in zip(parts, filled, strict=True) if its]
    if corpus.selection.deduplicate:
        found = _duplicates(list(map(_digests, made)))
        made = [replace(shard, duplicates=rows) for shard, rows in zip(made, found, strict=True)]
    if corpus.selection.near_duplicates is not None:
        made = _without_near_duplicates(made, list(map(_band_keys, made)), say)
    return made


def _cut(
    file: TextFile | HuggingFaceDataset, positions: Sequence[int], fields: tuple[str, ...]
) -> Sequence[Part | None]:
    """The parts of a file, cut at these byte positions; None if the preceding part covers that range too."""
    if isinstance(file, HuggingFaceDataset):
        return file.cut(positions, fields)
    if file.kind == 'parquet':
        return RowGroups(file, fields).cut(positions) if positions else [RowGroups(file, fields)]
    if file.kind == 'jsonl':
        return Lines(file).cut(positions) if positions else [Lines(file)]
    return [Delimited(file) if file.kind in ('csv', 'tsv') else Whole(file), *[None] * len(positions)]


def whole(file: TextFile | HuggingFaceDataset, fields: tuple[str, ...]) -> list[Part]:
    """A whole file as one part."""
    return [part for part in _cut(file, [], fields) if part is not None]


def _steps(bounds: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in itertools.pairwise(bounds)]


def _digests(shard: Shard) -> np.ndarray:
    """The digest of each document, uint64 [rows, 2]; zeros for rows without a document."""
    found = bytearray()
    for document in shard._rows(RowCounts()):
        found += bytes(16) if document is None else digest(document)
    return np.frombuffer(found, np.uint64).reshape(-1, 2)


def _band_keys(shard: Shard) -> np.ndarray:
    chosen = shard.selection.near_duplicates
    assert chosen is not None
    texts = (None if document is None else document.text for document in shard._rows(RowCounts()))
    return band_keys(texts, chosen.threshold)


def _without_near_duplicates(made: Sequence[Shard], keys: list[np.ndarray], say: Report) -> list[Shard]:
    """The shards. Each skips the documents that nearly repeat an earlier one."""
    starts = np.cumsum([0, *[len(of_shard) for of_shard in keys]])
    firsts = clusters(keys)
    exact = [
        start + shard.duplicates for start, shard in zip(starts, made, strict=False) if shard.duplicates is not None
    ]
    near = firsts != np.arange(len(firsts))
    if exact:  # these are skipped and counted as equal
        near[np.concatenate(exact)] = False
    skipped = np.flatnonzero(near)
    first, n = np.unique(firsts[skipped], return_counts=True)
    largest = np.argsort(-n, kind='stable')[:_SHOWN_CLUSTERS]
    say(f'near-duplicates: {len(skipped):,} documents are left out, in {len(n):,} clusters')
    for row, size in zip(first[largest], n[largest], strict=True):
        number = int(np.searchsorted(starts, row, side='right')) - 1
        say(f'near-duplicates: {size:,} of {made[number].origin(int(row - starts[number]))}')
    bounds = np.searchsorted(skipped, starts)
    return [
        replace(shard, near_duplicates=skipped[from_:to] - start)
        for shard, start, (from_, to) in zip(made, starts, itertools.pairwise(bounds), strict=False)
    ]


def _from(rows: np.ndarray | None, start: int) -> Iterator[int]:
    return iter(() if rows is None else rows[np.searchsorted(rows, start) :])


def _duplicates(digests: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For each shard, the rows whose digest occurred earlier, ascending."""
    found: list[list[np.ndarray]] = [[] for _ in digests]
    starts = np.cumsum([0, *map(len, digests)])
    for group in range(_DUPLICATE_GROUPS):
        chosen = [np.flatnonzero((each[:, 0] % _DUPLICATE_GROUPS == group) & each.any(axis=1)) for each in digests]
        values = np.concatenate([each[rows] for each, rows in zip(digests, chosen, strict=True)])
        rows = np.concatenate([start + rows for start, rows in zip(starts, chosen, strict=False)])
        order = np.lexsort((values[:, 0], values[:, 1]))  # stable: the earliest of equal rows comes first
        again = np.flatnonzero((values[order][1:] == values[order][:-1]).all(axis=1)) + 1
        repeated = np.sort(rows[order[again]])
        for shard, (start, stop) in enumerate(itertools.pairwise(np.searchsorted(repeated, starts))):
            found[shard].append(repeated[start:stop] - starts[shard])
    return [np.sort(np.concatenate(rows)) for rows in found]
