"""Writes flat-tokens: arrays grow file by file, and the directory appears atomically when it is complete.

On a disk, it is written under another name and renamed. In a bucket, an index names it (storage/result.py).
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from pretrax.data.tokens.flat_tokens import (
    DTYPE,
    FORMAT,
    MASK,
    SHARD_LENGTH,
    TOKENIZER_FILE,
    VERSION,
    SplitManifest,
    TokenCounts,
    TokenizerIdentity,
    little_endian,
    open_split,
    refuse_unreadable,
    splits,
)
from pretrax.data.tokens.zarr_shards import Shards
from pretrax.errors import UserError
from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.connection import BucketError, kind_of_error
from pretrax.storage.index import INDEX
from pretrax.storage.locate import write_whole
from pretrax.storage.result import is_unfinished, new_result, result_at
from pretrax.system.atomic import new_directory, remove_abandoned

_CHUNK = 1 << 14  # values per compressed chunk, the smallest unit of reading
_ONES = 1 << 20


class WrittenMeanwhileError(UserError):
    """Another process has created the directory first, with other tokens, or while this one still wrote its tokens."""

    def __init__(self, directory: AnyPath):
        super().__init__(f'{directory}: another process has written it in the meantime\n  give another --out')


class Writer:
    """Writes tokenized documents to splits.

    Attributes:
        digests: digests of the arrays of each split, once it is finished.
    """

    def __init__(self, directory: AnyPath):
        self._directory = directory
        self._splits: dict[str, _Split] = {}
        self._documents: dict[str, Any] | None = None
        self.digests: dict[str, dict[str, str]] = {}

    def append(
        self,
        split: str,
        encoded: np.ndarray,
        mask: np.ndarray | None,
        *,
        n_bytes: int | None,
        predicted_bytes: int | None,
    ) -> None:
        """Appends tokens to a split.

        Args:
            encoded: uint32, `2 * id + starts_a_document`. A document may continue in the next call.
            mask: bool, whether each token counts as a target; None: all count.
            n_bytes, predicted_bytes: added to these counts; None makes the count of the split unknown.
        """
        if split not in self._splits:
            self._splits[split] = _Split(self._directory / split)
        self._splits[split].append(encoded, mask, n_bytes, predicted_bytes)

    @property
    def counts(self) -> dict[str, TokenCounts]:
        """The totals of each split so far."""
        return {name: split.counts for name, split in self._splits.items()}

    def account(
        self, *, read: int, kept: int, cut: int, left_out: dict[str, int], files: dict[str, Any] | None = None
    ) -> None:
        """Records the rows of the text: read = kept + left_out; the splits have kept + cut documents.

        `files` are the files that were read, and those left out by reason.
        """
        self._documents = {'read': read, 'kept': kept, 'cut': cut, 'left_out': left_out}
        self._documents |= {} if files is None else {'files': files}

    def finish(self, tokenizer: TokenizerIdentity, tokenizer_json: bytes | None, source: dict[str, Any]) -> None:
        for name, split in self._splits.items():
            self.digests[name] = split.finish(name, tokenizer, source)
        if tokenizer_json is not None:
            write_whole(self._directory / TOKENIZER_FILE, tokenizer_json, sync=True)
        attributes = {'format': FORMAT, 'version': VERSION, 'splits': list(self._splits)}
        if self._documents is not None:
            attributes['documents'] = self._documents
        _write_group(self._directory, attributes)


def refuse_existing(out: AnyPath) -> None:
    """Raises UserError if `out` exists or cannot be created; unfinished tokens in a bucket do not count."""
    if isinstance(out, BucketPath):
        with refuse_unreadable():
            found = [file for file in out.files() if not is_unfinished(file)]
        if found:
            what = 'tokens' if INDEX in found or 'zarr.json' in found else f'other objects: {found[0]}'
            raise UserError(f'{out}: already exists, with {what}\n  remove it, or give another --out')
        return
    if out.exists():
        raise UserError(f'{out}: already exists\n  remove it, or give another --out')
    parent = next(parent for parent in out.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise UserError(f'{out}: cannot be created: {parent} is a file')


@contextlib.contextmanager
def create(
    directory: AnyPath, tokenizer: TokenizerIdentity, tokenizer_json: bytes | None, source: dict[str, Any]
) -> Iterator[Writer]:
    """Writes a new flat-tokens directory, which appears when the block ends without an exception.

    Args:
        directory: its path. If another process creates it first, that directory is kept; if it has other tokens, this
            is an error.
        tokenizer_json: content of its tokenizer.json; None if the tokenizer is unknown.
        source: where the tokens come from, any JSON.

    Raises:
        WrittenMeanwhileError: another process has created the directory.
        UserError: the files cannot be written.
    """
    try:
        with _appearing(directory) as partial:
            writer = Writer(partial)
            yield writer
            writer.finish(tokenizer, tokenizer_json, source)
        for name, digests in writer.digests.items():
            if name not in splits(directory) or open_split(directory, name).manifest.sha256 != digests:
                raise WrittenMeanwhileError(directory)
    except OSError as error:
        if isinstance(error, BucketError) and not error.is_temporary and _has_result(directory):
            raise WrittenMeanwhileError(directory) from error  # which removed what this process has written so far
        raise kind_of_error(error)(f'{directory}: cannot write the tokens: {error.strerror or error}') from error


@refuse_unreadable()
def _has_result(directory: AnyPath) -> bool:
    return result_at(directory) != directory


def _appearing(directory: AnyPath) -> contextlib.AbstractContextManager[AnyPath]:
    """Where to write a directory that appears when the block ends; one that another process has created stays."""
    if isinstance(directory, BucketPath):
        refuse_existing(directory)
        return new_result(directory)
    remove_abandoned(directory.parent)
    return new_directory(directory, sync=True, keep_existing=True)


class _Split:
    """The arrays of a split during writing."""

    def __init__(self, path: AnyPath):
        self._path = path
        self._columns: dict[str, _Column] = {}
        for name in DTYPE:
            if name != MASK:
                self._add_column(name)
        self.counts = TokenCounts(documents=0, tokens=0, bytes=0, predicted_bytes=0, targets=0)
        self._max_token_id = -1

    def append(
        self, encoded: np.ndarray, mask: np.ndarray | None, n_bytes: int | None, predicted_bytes: int | None
    ) -> None:
        if not len(encoded):
            return
        counts = self.counts
        starts = np.flatnonzero(encoded & 1)
        self._max_token_id = max(self._max_token_id, int(encoded.max() >> 1))
        self._columns['encoded_tokens'].append(encoded)
        self._columns['seq_starts'].append((starts + counts.tokens).astype(np.uint64))
        if mask is not None and MASK not in self._columns:
            self._add_column(MASK)
            for start in range(0, counts.tokens, _ONES):  # all earlier tokens count
                self._columns[MASK].append(np.ones(min(_ONES, counts.tokens - start), np.uint8))
        if MASK in self._columns:
            self._columns[MASK].append(np.ones(len(encoded), np.uint8) if mask is None else mask.astype(np.uint8))
        n_first, n_counted = len(starts), len(encoded)
        if mask is not None:
            n_first, n_counted = int(mask[starts].sum()), int(mask.sum())
        self.counts = TokenCounts(
            documents=counts.documents + len(starts),
            tokens=counts.tokens + len(encoded),
            bytes=_sum(counts.bytes, n_bytes),
            predicted_bytes=_sum(counts.predicted_bytes, predicted_bytes),
            targets=counts.targets + n_counted - n_first,
        )

    def _add_column(self, name: str) -> None:
        self._columns[name] = _Column(self._path / name, DTYPE[name], SHARD_LENGTH[name])

    def finish(self, name: str, tokenizer: TokenizerIdentity, source: dict[str, Any]) -> dict[str, str]:
        self._columns['seq_starts'].append(np.array([self.counts.tokens], np.uint64))
        manifest = SplitManifest(
            split=name,
            counts=self.counts,
            max_token_id=self._max_token_id,
            tokenizer=tokenizer,
            source=source,
            sha256={name: column.finish() for name, column in self._columns.items()},
        )
        _write_group(self._path, manifest.model_dump())
        return manifest.sha256


class _Column:
    """A growing array; values are buffered until a file is full."""

    def __init__(self, path: AnyPath, dtype: str, shard: int):
        self._buffered = np.empty(shard, dtype)
        self._n_buffered = 0
        self._sha256 = hashlib.sha256()
        self._path = path
        self._shards = Shards(np.dtype(dtype), 0, shard, _CHUNK)
        (path / 'c').mkdir(parents=True)
        self._write_metadata()  # so that a bucket shows that tokens are being written

    def append(self, values: np.ndarray) -> None:
        while len(values):
            taken = values[: len(self._buffered) - self._n_buffered]
            self._buffered[self._n_buffered : self._n_buffered + len(taken)] = taken
            self._n_buffered += len(taken)
            values = values[len(taken) :]
            if self._n_buffered == len(self._buffered):
                self._flush()

    def finish(self) -> str:
        if self._n_buffered:
            self._flush()
        self._write_metadata()
        return self._sha256.hexdigest()

    def _write_metadata(self) -> None:
        write_whole(self._path / 'zarr.json', json.dumps(self._shards.metadata()).encode(), sync=True)

    def _flush(self) -> None:
        values = self._buffered[: self._n_buffered]
        self._sha256.update(little_endian(values))
        number = self._shards.length // self._shards.shard
        write_whole(self._path / 'c' / str(number), self._shards.encode(values), sync=True)
        self._shards = dataclasses.replace(self._shards, length=self._shards.length + len(values))
        self._n_buffered = 0


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _write_group(path: AnyPath, attributes: dict[str, Any]) -> None:
    group = {'zarr_format': 3, 'node_type': 'group', 'attributes': attributes}
    write_whole(path / 'zarr.json', (json.dumps(group, indent=2) + '\n').encode(), sync=True)
