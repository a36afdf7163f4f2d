"""The tokens of one shard of the text, in a directory that appears atomically.

Workers tokenize shards in any order, and data/tokenize/prepare.py concatenates the results. Shards that were finished
before a run was killed are not tokenized again.

    000012/train.tokens     uint32, little-endian: 2 * id + starts_a_document
    000012/train.mask       uint8, one per token; only if a document has answers
    000012/counts.json      rows and documents, and tokens and bytes by split

The result does not depend on the number of workers.
"""

import collections
import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pretrax.data.corpus.corpus import Shard
from pretrax.data.corpus.selection import RowCounts
from pretrax.data.tokenize.encode_shard import EncodedDocuments, Job, Progress, encode_shard
from pretrax.errors import system_errors
from pretrax.system.atomic import partial_path, rename_directory, sync_file

_READ_AT_ONCE = 1 << 22  # tokens


@dataclass
class SplitCounts:
    """Totals of one split of a shard; `masked`: whether it has a mask file."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    predicted_bytes: int = 0
    masked: bool = False


@dataclass
class TokenizedShard:
    """The totals of a shard; `cut` is the number of documents in two splits."""

    rows: RowCounts
    cut: int
    splits: dict[str, SplitCounts]

    def to_json(self) -> bytes:
        rows = vars(self.rows) | {'left_out': dict(self.rows.left_out)}
        splits = {name: vars(counts) for name, counts in self.splits.items()}
        return json.dumps({'rows': rows, 'cut': self.cut, 'splits': splits}).encode()

    @classmethod
    def from_json(cls, content: bytes) -> 'TokenizedShard':
        found = json.loads(content)
        rows = RowCounts(**found['rows'] | {'left_out': collections.Counter(found['rows']['left_out'])})
        return cls(rows, found['cut'], {name: SplitCounts(**counts) for name, counts in found['splits'].items()})


def write_shard(job: Job, directory: Path, number: int, shard: Shard, progress: Progress) -> TokenizedShard:
    """Tokenizes a shard to its directory."""
    rows, cut = RowCounts(), []
    with ShardWriter(directory, number) as writer:
        for documents in encode_shard(job, shard, rows, cut):
            writer.append(documents)
            progress(documents.n_bytes, len(documents.encoded))
        return writer.finish(rows, len(cut))


class ShardWriter:
    """Writes the files of a shard; they appear under their name when `finish` is called."""

    def __init__(self, directory: Path, number: int):
        self._path = directory / shard_name(number)
        self._partial = partial_path(self._path)
        self._splits: dict[str, SplitCounts] = {}
        self._files = contextlib.ExitStack()
        self._open: dict[str, BinaryIO] = {}

    def append(self, documents: EncodedDocuments) -> None:
        counts = self._splits.setdefault(documents.split, SplitCounts())
        with _writing(self._path):
            self._file(documents.split, 'tokens').write(np.ascontiguousarray(documents.encoded, '<u4'))
            if documents.mask is not None and not counts.masked:
                counts.masked = True
                for start in range(0, counts.tokens, _READ_AT_ONCE):  # all earlier tokens count
                    self._file(documents.split, 'mask').write(b'\1' * min(_READ_AT_ONCE, counts.tokens - start))
            if counts.masked:
                mask = b'\1' * len(documents.encoded) if documents.mask is None else documents.mask.astype(np.uint8)
                self._file(documents.split, 'mask').write(mask)
        counts.documents += documents.n_documents
        counts.tokens += len(documents.encoded)
        counts.bytes += documents.n_bytes
        counts.predicted_bytes += documents.predicted_bytes

    def finish(self, rows: RowCounts, cut: int) -> TokenizedShard:
        shard = TokenizedShard(rows, cut, self._splits)
        with _writing(self._path):
            with (self._partial / 'counts.json').open('wb') as stream:
                stream.write(shard.to_json())
                sync_file(stream)
            for stream in self._open.values():
                sync_file(stream)
            self._files.close()
            rename_directory(self._partial, self._path, keep_existing=True)  # another worker may have written it
        return shard

    def __enter__(self) -> 'ShardWriter':
        with _writing(self._path):
            self._partial.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # closing flushes; a full disk was reported before
            self._files.close()
        shutil.rmtree(self._partial, ignore_errors=True)

    def _file(self, split: str, kind: str) -> BinaryIO:
        name = f'{split}.{kind}'
        if name not in self._open:
            self._open[name] = self._files.enter_context((self._partial / name).open('wb'))
        return self._open[name]


def shard_name(number: int) -> str:
    return f'{number:06}'


def find_shard(directory: Path, number: int) -> TokenizedShard | None:
    """A shard that was finished before; None if there is none, or its files have the wrong length. Raises OSError."""
    path = directory / shard_name(number)
    try:
        shard = TokenizedShard.from_json((path / 'counts.json').read_bytes())
        for name, counts in shard.splits.items():
            whole = (path / f'{name}.tokens').stat().st_size == 4 * counts.tokens
            if counts.masked:
                whole &= (path / f'{name}.mask').stat().st_size == counts.tokens
            if not whole:
                return None
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return shard


def read_shard(directory: Path, number: int, shard: TokenizedShard) -> Iterator[EncodedDocuments]:
    """Yields the tokens of a shard; the counts come with the first part of each split."""
    for split, counts in shard.splits.items():
        path = directory / shard_name(number)
        documents, n_bytes, predicted = counts.documents, counts.bytes, counts.predicted_bytes
        for start in range(0, counts.tokens, _READ_AT_ONCE):
            n = min(_READ_AT_ONCE, counts.tokens - start)
            encoded = np.fromfile(path / f'{split}.tokens', '<u4', n, offset=4 * start).astype(np.uint32, copy=False)
            mask = None
            if counts.masked:
                mask = np.fromfile(path / f'{split}.mask', np.uint8, n, offset=start).astype(bool)
            yield EncodedDocuments(split, encoded, mask, documents, n_bytes, predicted)
            documents = n_bytes = predicted = 0


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    with system_errors(f'{path.parent}: cannot write the tokens'):
        yield
