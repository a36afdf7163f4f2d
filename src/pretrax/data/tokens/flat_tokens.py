"""Reads flat-tokens: the tokens of each split in one array, and where documents start. docs/formats.md specifies it.

A directory is a zarr v3 group of splits, read with TensorStore. Opening a split checks shapes, counts and files,
reading checks the crc32c of every chunk, and `verify` checks everything.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
import tensorstore as ts

from pretrax import __version__
from pretrax.data.corpus.files import nearest
from pretrax.data.tokens.remote_path import CONTEXT, RemotePath
from pretrax.errors import UserError

FORMAT, VERSION = 'flat-tokens', 2
TOKENIZER_FILE = 'tokenizer.json'
MASK = 'loss_mask'  # the only optional array; without it, all tokens count
# Values per file: 64 MiB of tokens before compression.
SHARD_LENGTH = {'encoded_tokens': 1 << 24, 'seq_starts': 1 << 20, MASK: 1 << 24}
DTYPE = {'encoded_tokens': 'uint32', 'seq_starts': 'uint64', MASK: 'uint8'}


class TokenCounts(pydantic.BaseModel):
    """Totals of one split.

    Attributes:
        documents, tokens: their numbers.
        bytes: UTF-8 bytes of all text; None if unknown.
        predicted_bytes: UTF-8 bytes of the targets; None if unknown. End-of-text tokens have no bytes.
        targets: tokens that count in the loss: those with loss mask 1, without the first token of each document.
    """

    documents: int
    tokens: int
    bytes: int | None
    predicted_bytes: int | None
    targets: int

    @pydantic.model_validator(mode='before')
    @classmethod
    def _all_are_targets(cls, given: Any) -> Any:
        """Early files of this version have no loss mask and no `targets`."""
        if isinstance(given, dict) and {'tokens', 'documents'} <= set(given):
            return {'targets': given['tokens'] - given['documents']} | given
        return given


class TokenizerIdentity(pydantic.BaseModel):
    """Identifies the tokenizer that made the ids.

    Attributes:
        sha256: of its tokenizer.json; None if the tokenizer is unknown.
        vocab_size: every id is below it.
        end_of_text: the id that ends every document; None if documents have no such token.
    """

    sha256: str | None
    vocab_size: int
    end_of_text: int | None


class SplitManifest(pydantic.BaseModel):
    """The attributes of a split's zarr group."""

    format: Literal['flat-tokens'] = FORMAT
    version: Literal[2] = VERSION
    pretrax_version: str = pydantic.Field(default_factory=lambda: __version__)
    split: str
    counts: TokenCounts
    max_token_id: int
    tokenizer: TokenizerIdentity
    source: dict[str, Any]
    sha256: dict[str, str]


@dataclass(frozen=True)
class FlatTokens:
    """One split, open for reading; a `TokenStore`. Reading raises UserError with the name of the damaged file."""

    path: Path | RemotePath
    manifest: SplitManifest
    _encoded_tokens: ts.TensorStore
    _seq_starts: ts.TensorStore
    _loss_mask: ts.TensorStore | None

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def n_tokens(self) -> int:
        return self.manifest.counts.tokens

    @property
    def n_documents(self) -> int:
        return self.manifest.counts.documents

    @property
    def vocab_size(self) -> int:
        return self.manifest.tokenizer.vocab_size

    @property
    def end_of_text(self) -> int | None:
        return self.manifest.tokenizer.end_of_text

    @property
    def bytes_per_target(self) -> float | None:
        counts = self.manifest.counts
        return counts.predicted_bytes / counts.targets if counts.predicted_bytes and counts.targets else None

    @property
    def fingerprint(self) -> str:
        digests = self.manifest.sha256
        return digests['encoded_tokens'] + (f'-{digests[MASK]}' if MASK in digests else '')

    @property
    def has_mask(self) -> bool:
        return self._loss_mask is not None

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The values `2 * id + starts_a_document` in each range [start, stop), uint32, read concurrently."""
        return _read(self._encoded_tokens, ranges)

    def read_starts(self, start: int, stop: int) -> np.ndarray:
        """The positions of the documents [start, stop) in the token stream, uint64; entry n_documents is its end."""
        return _read(self._seq_starts, [(start, stop)])[0]

    def read_mask(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Whether each token in [start, stop) counts as a target, bool; all True if `has_mask` is False."""
        if self._loss_mask is None:
            return [np.ones(stop - start, bool) for start, stop in ranges]
        return [values.astype(bool) for values in _read(self._loss_mask, ranges)]

    def document(self, index: int) -> np.ndarray:
        """The ids of one document with its end-of-text token, int64."""
        start, stop = self.read_starts(index, index + 2).tolist()
        return (self.read([(start, stop)])[0] >> 1).astype(np.int64)


def splits(directory: Path | RemotePath) -> list[str]:
    """The names of the splits of a flat-tokens directory. Raises UserError if it is not one."""
    if isinstance(directory, RemotePath):
        if not (directory / 'zarr.json').is_file():
            raise UserError(
                f'{directory}: not a flat-tokens directory, it has no zarr.json\n  expected the directory of all splits'
            )
    elif not directory.is_dir():
        raise UserError(f'{directory}: no such flat-tokens directory\n  {nearest(directory)}')
    elif not (directory / 'zarr.json').is_file():
        inside = [str(path.parent) for path in sorted(directory.glob('*/zarr.json'))]
        hint = f'did you mean {inside[0]}?' if inside else nearest(directory)
        raise UserError(f'{directory}: not a flat-tokens directory, it has no zarr.json\n  {hint}')
    attributes = _group_attributes(directory)
    if (attributes.get('format'), attributes.get('version')) != (FORMAT, VERSION):
        raise UserError(
            f'{directory / "zarr.json"}: format {attributes.get("format")!r} version {attributes.get("version")!r}\n'
            f'  expected {FORMAT!r} version {VERSION}'
        )
    names = attributes.get('splits')
    if names is None and 'split' in attributes:
        raise UserError(
            f'{directory}: a single split of flat-tokens\n  use the directory of all splits: {directory.parent}'
        )
    if not isinstance(names, list) or not names:
        raise _damaged(directory / 'zarr.json', f'expected a list of splits, got {names!r}')
    return names


def open_split(directory: Path | RemotePath, split: str) -> FlatTokens:
    """Opens a split after constant-time checks: manifest, shapes, counts, missing and empty files."""
    if split not in (present := splits(directory)):
        raise UserError(f'{directory}: no split {split!r}\n  it has {", ".join(present)}')
    path = directory / split
    try:
        manifest = SplitManifest.model_validate(_group_attributes(path))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = '.'.join(map(str, first['loc']))
        raise UserError(f'{path / "zarr.json"}: attribute {where!r}: {first["msg"]}') from None
    counts = manifest.counts
    lengths = {'encoded_tokens': counts.tokens, 'seq_starts': counts.documents + 1}
    if MASK in manifest.sha256:
        lengths[MASK] = counts.tokens
    arrays = {name: _open_array(path / name, DTYPE[name]) for name in lengths}
    for name, expected in lengths.items():
        if arrays[name].shape != (expected,):
            raise UserError(f'{path / name}: {arrays[name].shape[0]} values, expected {expected} by the attributes')
        n_shards = (
            -(-expected // _shard_length(arrays[name])) if isinstance(path, Path) else 0
        )  # remote files are checked when read
        for index in range(n_shards):
            file = directory / split / name / 'c' / str(index)
            assert isinstance(file, Path)
            if not file.is_file() or file.stat().st_size == 0:
                raise _damaged(file, 'empty' if file.is_file() else 'missing')
    opened = FlatTokens(path, manifest, arrays['encoded_tokens'], arrays['seq_starts'], arrays.get(MASK))
    ends = [int(opened.read_starts(index, index + 1)[0]) for index in (0, counts.documents)]
    if ends != [0, counts.tokens]:
        raise _damaged(path / 'seq_starts', f'it runs from {ends[0]} to {ends[1]}, not 0 to {counts.tokens}')
    if manifest.max_token_id >= manifest.tokenizer.vocab_size:
        raise UserError(
            f'{path / "zarr.json"}: token {manifest.max_token_id} does not exist in a vocabulary of '
            f'{manifest.tokenizer.vocab_size}'
        )
    return opened


def read_tokenizer_json(directory: Path | RemotePath, expected: TokenizerIdentity) -> bytes | None:
    """The tokenizer.json of the directory, or None if it is unknown. Raises UserError if it is not the expected one."""
    if expected.sha256 is None:
        return None
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise _damaged(path, 'missing')
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != expected.sha256:
        raise UserError(f'{path}: not the tokenizer that made these tokens (sha256 {expected.sha256[:12]}..)')
    return content


def verify(directory: Path | RemotePath) -> dict[str, TokenCounts]:
    """Checks all data against the checksums and the rules of the format, and returns the counts by split.

    Raises:
        UserError: a file is damaged; names the first one.
    """
    found = {}
    for name in splits(directory):
        split = open_split(directory, name)
        read_tokenizer_json(directory, split.manifest.tokenizer)
        _verify_split(split)
        found[name] = split.manifest.counts
    _verify_documents(directory, sum(counts.documents for counts in found.values()))
    return found


def _verify_split(split: FlatTokens) -> None:
    digests = {name: hashlib.sha256() for name in DTYPE if name != MASK or split.has_mask}
    n_starts, n_targets, largest = 0, 0, -1
    end_of_text = split.manifest.tokenizer.end_of_text
    newest = end_of_text or 0  # nothing precedes the first document
    for start in range(0, split.n_tokens, SHARD_LENGTH['encoded_tokens']):
        stop = min(split.n_tokens, start + SHARD_LENGTH['encoded_tokens'])
        [encoded] = split.read([(start, stop)])
        digests['encoded_tokens'].update(little_endian(encoded))
        ids = encoded >> 1
        largest = max(largest, int(ids.max()))
        first = np.flatnonzero(encoded & 1)
        expected = split.read_starts(n_starts, min(n_starts + len(first), split.n_documents))
        if not np.array_equal(expected, (first + start).astype(np.uint64)):
            raise _damaged(split.path / 'seq_starts', f'it differs from the starts in tokens {start} to {stop}')
        digests['seq_starts'].update(little_endian(expected))
        n_starts += len(first)
        [counted] = split.read_mask([(start, stop)])
        if split.has_mask:
            digests[MASK].update(little_endian(counted.astype(np.uint8)))
        n_targets += int(counted.sum()) - int(counted[first].sum())
        before_first = np.append(newest, ids)[first]
        if end_of_text is not None and (before_first != end_of_text).any():
            raise _damaged(split.path / 'encoded_tokens', 'a document does not end with the end-of-text token')
        newest = ids[-1]
    if n_starts != split.n_documents:
        raise _damaged(split.path / 'encoded_tokens', f'{n_starts} documents start, not {split.n_documents}')
    digests['seq_starts'].update(little_endian(split.read_starts(n_starts, n_starts + 1)))
    for name, digest in digests.items():
        if digest.hexdigest() != split.manifest.sha256.get(name):
            raise _damaged(split.path / name, 'its sha256 differs from the one in the attributes')
    if n_targets != split.manifest.counts.targets:
        said = split.manifest.counts.targets
        raise UserError(f'{split.path / "zarr.json"}: counts.targets is {said}, but {n_targets} tokens count')
    if largest != split.manifest.max_token_id:
        raise UserError(
            f'{split.path / "zarr.json"}: max_token_id is {split.manifest.max_token_id}, but {largest} occurs'
        )


def _verify_documents(directory: Path | RemotePath, n_documents: int) -> None:
    said = _group_attributes(directory).get('documents')
    if said is None:  # merged or converted, or written by an older pretrax
        return
    if said['read'] != said['kept'] + sum(said['left_out'].values()) or said['kept'] + said['cut'] != n_documents:
        raise UserError(f'{directory / "zarr.json"}: documents {said} do not add up to {n_documents} in the splits')


def _open_array(path: Path | RemotePath, dtype: str) -> ts.TensorStore:
    if not (path / 'zarr.json').is_file():
        raise _damaged(path / 'zarr.json', 'missing')
    spec = {
        'driver': 'zarr3',
        'kvstore': {'driver': 'file', 'path': f'{path}/'} if isinstance(path, Path) else f'{path}/',
        'fill_missing_data_reads': False,
    }
    try:
        array = ts.open(spec, read=True, context=CONTEXT).result()
    except ValueError as error:
        raise _damaged(path / 'zarr.json', str(error).split(' [')[0]) from None
    if array.rank != 1 or array.dtype.name != dtype:
        raise UserError(f'{path / "zarr.json"}: {array.dtype.name} of rank {array.rank}\n  expected {dtype} of rank 1')
    return array


def _shard_length(array: ts.TensorStore) -> int:
    shape = array.chunk_layout.write_chunk.shape
    assert shape  # a stored array has chunks
    return int(shape[0] or 0)


def _read(array: ts.TensorStore, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    reads = [array[start:stop].read() for start, stop in ranges]
    try:
        return [read.result() for read in reads]
    except ValueError as error:
        # '... Error reading shard index in local file "/x/c/1": Digest mismatch, ...'
        found = re.findall(r'local file "([^"]*)"(?:: | is )(.*)', str(error).split(' [')[0])
        path, reason = found[-1] if found else (array.url, str(error))
        raise _damaged(path, reason) from None


def _damaged(path: Path | RemotePath | str, reason: str) -> UserError:
    return UserError(
        f'{path}: damaged token file: {reason}\n  remove the directory and tokenize the text again, or restore the file'
    )


def _group_attributes(path: Path | RemotePath) -> dict[str, Any]:
    file = path / 'zarr.json'
    try:
        group = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise _damaged(file, str(error)) from None
    if not isinstance(group, dict) or group.get('node_type') != 'group':
        raise UserError(f'{file}: not a zarr v3 group')
    return group.get('attributes', {})


def little_endian(values: np.ndarray) -> memoryview:
    """The bytes over which checksums are computed."""
    return memoryview(np.ascontiguousarray(values, values.dtype.newbyteorder('<'))).cast('B')
