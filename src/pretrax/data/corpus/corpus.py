"""The documents of a corpus in their order: all of them, or in shards for parallel workers.

For whoever tokenises (data/tokenize/prepare.py and its engines):

    corpus = Corpus(files, selection)                 # data/text.py makes one of the options
    parts = shards(corpus, 64, map=pool.map)          # at most 64, in order, picklable and small
    counts = Counts()                                 # one for each worker
    for document in parts[3].documents(counts):       # Documents: never empty, filtered, no duplicates
        ...
    counts = sum(all of the workers' counts, Counts())
    for line in counts.lines():                       # 'documents: 12 read = 9 kept + 2 empty + 1 bad'
        say(line)

The documents of `shards(corpus, n)`, one shard after the other, are those of `corpus.documents()`, whatever n is, and
the counts add up to the same. A shard is a pure value: reading one again, in another process or after a restart, gives
the same documents or raises UserError because a file has changed. `shards(corpus, n)` of an unchanged corpus is the same
list every time, so work can be resumed by the number of a shard. `Shard.size` is in stored bytes, for progress bars.

Where `deduplicate` is asked for, `shards` reads all of the text once to find the duplicates, through `map`: pass the
`map` of a pool (its function and arguments are picklable), or nothing to read in this process. It keeps 16 bytes a
document. Otherwise `shards` reads no text: what tells one where to cut are sizes, the footers of .parquet, and indices.
"""

import bisect
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pretrax.data.corpus.document import Document
from pretrax.data.corpus.files import TextFile
from pretrax.data.corpus.hugging_face import HuggingFaceDataset
from pretrax.data.corpus.parts import Lines, Part, Whole, refuse_changed
from pretrax.data.corpus.selection import DUPLICATE, Counts, Selection, digest, documents
from pretrax.data.corpus.storage import opened, refusal
from pretrax.data.corpus.tables import Delimited, RowGroups

__all__ = ['Corpus', 'Counts', 'Selection', 'Shard', 'shards']

# Up to so many bytes a corpus is known by its content, beyond by the names, sizes and times of change of its files.
DIGESTED = 1 << 30
_WITHOUT_FIELDS = ('text', 'python')
_DUPLICATES_AT_ONCE = 16  # duplicates are found in so many groups, one after the other

type Map = Callable[[Callable[['Shard'], np.ndarray], Iterable['Shard']], Iterable[np.ndarray]]


@dataclass(frozen=True)
class Corpus:
    """The documents of some files, in their order."""

    files: Sequence[TextFile | HuggingFaceDataset]
    selection: Selection = field(default_factory=Selection)

    @property
    def size(self) -> int:
        """Bytes as they are stored."""
        return sum(file.size for file in self.files)

    def documents(self, counts: Counts | None = None, start: int = 0) -> Iterator[Document]:
        """Every document that is kept, of all rows but the first `start`."""
        for shard in shards(self, 1):
            yield from shard.documents(counts, start)

    @property
    def has_rows(self) -> bool:
        """Whether any file has rows with fields."""
        return any(file.kind not in _WITHOUT_FIELDS for file in self.files)

    @property
    def known_by(self) -> str:
        """What the fingerprint is made of, in words."""
        if self.size <= DIGESTED:
            return 'content'
        return f'names, sizes and times of change, being over {DIGESTED >> 30} GiB'

    def fingerprint(self) -> str:
        """Differs where other documents would be read: sha256 over kind and content of the files, and the selection.

        A corpus of more than DIGESTED bytes is known by the path, size and time of change (or entity tag) of each file,
        a data set of Hugging Face always by its files and their times or its commit.
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
            place = os.path.abspath(file.path) if isinstance(file.path, Path) else file.path.url
            return f'{place} {file.state.size} {file.state.stamp}'.encode()
        refuse_changed(file)
        with opened(file.path) as stream:
            try:
                return hashlib.file_digest(stream, 'sha256').digest()  # pyright: ignore[reportArgumentType]
            except Exception as error:
                raise refusal(file.path, error) from error


@dataclass(frozen=True)
class Shard:
    """Consecutive rows of a corpus, and which of them repeat an earlier document."""

    parts: tuple[Part, ...]
    selection: Selection
    size: int
    duplicates: np.ndarray | None = None  # rows of this shard, ascending

    def documents(self, counts: Counts | None = None, start: int = 0) -> Iterator[Document]:
        """The documents that are kept, of all rows but the first `start`; `counts` is told of every row."""
        counts = Counts() if counts is None else counts
        duplicates = iter(() if self.duplicates is None else self.duplicates[np.searchsorted(self.duplicates, start) :])
        duplicate = next(duplicates, None)
        for row, document in enumerate(self._rows(counts, start), start):
            if row == duplicate:
                duplicate = next(duplicates, None)
                counts.left_out[DUPLICATE] += 1
            elif document is not None:
                counts.kept += 1
                yield document

    def _rows(self, counts: Counts, start: int = 0) -> Iterator[Document | None]:
        """For each row its document, or None."""
        for part in self.parts:
            if start and (n_rows := part.count()) <= start:
                start -= n_rows
                continue
            yield from documents(part.rows(start), self.selection, counts, part.exact)
            start = 0


def shards(corpus: Corpus, n: int, map: Map = map) -> list[Shard]:  # noqa: A002
    """At most n shards of about the same size, none without a part. The top of this file says what they promise."""
    sizes = [max(1, file.size) for file in corpus.files]  # of some objects far away nobody tells the size
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
    made = [Shard(tuple(of), corpus.selection, size) for of, size in zip(parts, filled, strict=True) if of]
    if corpus.selection.deduplicate:
        found = _duplicates(list(map(_digests, made)))
        made = [replace(shard, duplicates=rows) for shard, rows in zip(made, found, strict=True)]
    return made


def _cut(
    file: TextFile | HuggingFaceDataset, positions: Sequence[int], fields: tuple[str, ...]
) -> Sequence[Part | None]:
    """The parts of a file between these bytes of it; None where the one before goes on."""
    if isinstance(file, HuggingFaceDataset):
        return file.cut(positions, fields)
    if file.kind == 'parquet':
        return RowGroups(file, fields).cut(positions) if positions else [RowGroups(file, fields)]
    if file.kind == 'jsonl':
        return Lines(file).cut(positions) if positions else [Lines(file)]
    return [Delimited(file) if file.kind in ('csv', 'tsv') else Whole(file), *[None] * len(positions)]


def _steps(bounds: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in itertools.pairwise(bounds)]


def _digests(shard: Shard) -> np.ndarray:
    """[rows, 2] uint64: the digest of each document, zero for a row that is none."""
    found = bytearray()
    for document in shard._rows(Counts()):
        found += bytes(16) if document is None else digest(document)
    return np.frombuffer(found, np.uint64).reshape(-1, 2)


def _duplicates(digests: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For the digests of each shard, the rows whose digest was there before, ascending."""
    found: list[list[np.ndarray]] = [[] for _ in digests]
    starts = np.cumsum([0, *map(len, digests)])
    for group in range(_DUPLICATES_AT_ONCE):
        chosen = [np.flatnonzero((of[:, 0] % _DUPLICATES_AT_ONCE == group) & of.any(axis=1)) for of in digests]
        values = np.concatenate([of[rows] for of, rows in zip(digests, chosen, strict=True)])
        rows = np.concatenate([start + rows for start, rows in zip(starts, chosen, strict=False)])
        order = np.lexsort((values[:, 0], values[:, 1]))  # stable: of equal ones the earliest row stays first
        again = np.flatnonzero((values[order][1:] == values[order][:-1]).all(axis=1)) + 1
        repeated = np.sort(rows[order[again]])
        for shard, (start, stop) in enumerate(itertools.pairwise(np.searchsorted(repeated, starts))):
            found[shard].append(repeated[start:stop] - starts[shard])
    return [np.sort(np.concatenate(of)) for of in found]
