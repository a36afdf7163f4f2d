"""Reads flat-tokens: the tokens of each split in one array, and where documents start. docs/formats.md specifies it.

A directory is a zarr v3 group of splits. Opening a split checks shapes, counts and files,
reading checks the crc32c of every chunk, and `flat_tokens_check.py` checks everything.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic

from pretrax import __version__
from pretrax.data.corpus.files import nearest
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokens.block_files import BlockFiles
from pretrax.data.tokens.token_array import TokenArray, damaged, file_errors, unreadable
from pretrax.data.tokens.token_store import TokenStore
from pretrax.errors import UserError
from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.result import is_unfinished, result_at
from pretrax.system.json_file import parse_json

FORMAT, VERSION = 'flat-tokens', 2
TOKENIZER_FILE = 'tokenizer.json'
MASK = 'loss_mask'  # the only optional array; without it, all tokens count
# Values per file: 64 MiB of tokens before compression.
SHARD_LENGTH = {'encoded_tokens': 1 << 24, 'seq_starts': 1 << 20, MASK: 1 << 24}
DTYPE = {'encoded_tokens': 'uint32', 'seq_starts': 'uint64', MASK: 'uint8'}
_MOST = 1 << 52  # a larger count is damage, and would overflow


class TokenCounts(pydantic.BaseModel):
    """Totals of one split."""

    # documents, tokens: their numbers
    documents: int = pydantic.Field(ge=0, le=_MOST)
    tokens: int = pydantic.Field(ge=0, le=_MOST)
    bytes: int | None = pydantic.Field(ge=0, le=_MOST)  # UTF-8 bytes of all text; None if unknown
    # UTF-8 bytes of the targets; None if unknown. End-of-text tokens have no bytes.
    predicted_bytes: int | None = pydantic.Field(ge=0, le=_MOST)
    # Tokens that count in the loss: those with loss mask 1, without the first token of each document
    targets: int = pydantic.Field(ge=0, le=_MOST)

    @pydantic.model_validator(mode='before')
    @classmethod
    def _all_are_targets(cls, given: Any) -> Any:
        """Early files of this version have no loss mask and no `targets`."""
        if isinstance(given, dict) and all(isinstance(given.get(name), int) for name in ('tokens', 'documents')):
            return {'targets': given['tokens'] - given['documents']} | given
        return given


class TokenizerIdentity(pydantic.BaseModel):
    """Identifies the tokenizer that made the ids."""

    sha256: str | None  # SHA-256 of its tokenizer.json; None if the tokenizer is unknown
    vocab_size: int = pydantic.Field(ge=1, le=1 << 31)  # every id is below it
    # The id that ends every document; None if documents have no such token
    end_of_text: int | None = pydantic.Field(ge=0)
    # The ids that begin every document; files of an older pretrax have no such tokens
    begin_of_text: tuple[pydantic.NonNegativeInt, ...] = ()

    def tokenizer(self, content: bytes, name: str) -> Tokenizer:
        """The tokenizer with this identity, given its tokenizer.json."""
        return Tokenizer(content, name, self.end_of_text, needs_end=False, begin_of_text=self.begin_of_text)


class SplitManifest(pydantic.BaseModel):
    """The attributes of a split's zarr group."""

    format: Literal['flat-tokens'] = FORMAT
    version: Literal[2] = VERSION
    pretrax_version: str = pydantic.Field(default_factory=lambda: __version__)
    split: str
    counts: TokenCounts
    max_token_id: int = pydantic.Field(ge=-1, lt=1 << 31)
    tokenizer: TokenizerIdentity
    source: dict[str, Any]
    sha256: dict[str, str]

    @pydantic.field_validator('sha256')
    @classmethod
    def _check_arrays(cls, given: dict[str, str]) -> dict[str, str]:
        if missing := DTYPE.keys() - given.keys() - {MASK}:
            raise ValueError(f'no digest of {sorted(missing)[0]}')
        return given


class FlatTokens(TokenStore):
    """One split, open for reading. Reading raises UserError with the name of the damaged file."""

    def __init__(self, path: AnyPath, manifest: SplitManifest, arrays: Mapping[str, TokenArray]):
        self.path, self.manifest, self._arrays = path, manifest, arrays
        counts, identity, digests = manifest.counts, manifest.tokenizer, manifest.sha256
        self.name, self.n_tokens, self.n_documents = str(path), counts.tokens, counts.documents
        self.vocab_size, self.largest_token = identity.vocab_size, manifest.max_token_id
        self.end_of_text = identity.end_of_text
        if counts.predicted_bytes and counts.targets:
            self.bytes_per_target = counts.predicted_bytes / counts.targets
        self.fingerprint = digests['encoded_tokens'] + (f'-{digests[MASK]}' if MASK in digests else '')
        self.is_remote, self.has_mask = isinstance(path, BucketPath), MASK in arrays

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        return self._arrays['encoded_tokens'].read(ranges)

    def read_starts(self, start: int, stop: int) -> np.ndarray:
        return self._arrays['seq_starts'].read([(start, stop)])[0]

    def read_mask(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        if not self.has_mask:
            return super().read_mask(ranges)
        return [values.astype(bool) for values in self._arrays[MASK].read(ranges)]

    def document(self, index: int) -> np.ndarray:
        """The ids of one document with its end-of-text token, int64."""
        start, stop = self.read_starts(index, index + 2).tolist()
        return (self.read([(start, stop)])[0] >> 1).astype(np.int64)


@contextlib.contextmanager
def refuse_unreadable() -> Iterator[None]:
    """Turns the error for a file that may not be read, or a bucket that does not answer, into a UserError."""
    try:
        yield
    except OSError as error:
        raise unreadable(error.filename, error) from None


@refuse_unreadable()
def splits(directory: AnyPath) -> list[str]:
    """The names of the splits of a flat-tokens directory. Raises UserError if it is not one."""
    directory = result_at(directory)
    if isinstance(directory, BucketPath):
        if not (directory / 'zarr.json').is_file():
            if any(map(is_unfinished, directory.files())):
                raise UserError(
                    f'{directory}: its tokens are not complete\n'
                    '  write them again with the same command, or wait for it'
                )
            raise UserError(
                f'{directory}: not a flat-tokens directory, it has no zarr.json\n  expected the directory of all splits'
            )
    elif not directory.is_dir():
        raise UserError(f'{directory}: no such flat-tokens directory\n  {nearest(directory)}')
    elif not (directory / 'zarr.json').is_file():
        inside = [str(path.parent) for path in sorted(directory.glob('*/zarr.json'))]
        hint = f'did you mean {inside[0]}?' if inside else nearest(directory)
        raise UserError(f'{directory}: not a flat-tokens directory, it has no zarr.json\n  {hint}')
    attributes = group_attributes(directory)
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
    if not isinstance(names, list) or not names or not all(map(_is_name, names)) or len(set(names)) < len(names):
        raise damaged(directory / 'zarr.json', f'expected a list of splits, got {names!r}')
    return names


@refuse_unreadable()
def open_split(directory: AnyPath, split: str, cache: BlockFiles | None = None) -> FlatTokens:
    """Opens a split after constant-time checks: manifest, shapes, counts, missing and empty files.

    Args:
        directory: directory of all splits.
        cache: keeps what is read from a bucket on a local disk; None: nothing is kept.
    """
    if split not in (present := splits(directory)):
        raise UserError(f'{directory}: no split {split!r}\n  it has {", ".join(present)}')
    directory = result_at(directory)
    path = directory / split
    try:
        manifest = SplitManifest.model_validate(group_attributes(path))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = '.'.join(map(str, first['loc']))
        raise UserError(f'{path / "zarr.json"}: attribute {where!r}: {first["msg"]}') from None
    counts, end = manifest.counts, manifest.tokenizer.end_of_text
    for name, ids in (
        ('end_of_text', () if end is None else (end,)),
        ('begin_of_text', manifest.tokenizer.begin_of_text),
    ):
        if beyond := [token for token in ids if token >= manifest.tokenizer.vocab_size]:
            raise UserError(
                f'{path / "zarr.json"}: {name} {beyond[0]} does not exist in a vocabulary of '
                f'{manifest.tokenizer.vocab_size}'
            )
    lengths = {'encoded_tokens': counts.tokens, 'seq_starts': counts.documents + 1}
    if MASK in manifest.sha256:
        lengths[MASK] = counts.tokens
    arrays = {name: TokenArray(path / name, DTYPE[name], manifest.sha256[name], cache) for name in lengths}
    for name, expected in lengths.items():
        if arrays[name].length != expected:
            raise UserError(f'{path / name}: {arrays[name].length} values, expected {expected} by the attributes')
        # The objects of a bucket are checked when they are read.
        n_shards = -(-expected // arrays[name].shard_length) if isinstance(path, Path) else 0
        for index in range(n_shards):
            file = directory / split / name / 'c' / str(index)
            assert isinstance(file, Path)
            with file_errors(file):
                size = file.stat().st_size
            if size == 0:
                raise damaged(file, 'empty')
    opened = FlatTokens(path, manifest, arrays)
    ends = [int(opened.read_starts(index, index + 1)[0]) for index in (0, counts.documents)]
    if ends != [0, counts.tokens]:
        raise damaged(path / 'seq_starts', f'it runs from {ends[0]} to {ends[1]}, not 0 to {counts.tokens}')
    if manifest.max_token_id >= manifest.tokenizer.vocab_size:
        raise UserError(
            f'{path / "zarr.json"}: token {manifest.max_token_id} does not exist in a vocabulary of '
            f'{manifest.tokenizer.vocab_size}'
        )
    return opened


@refuse_unreadable()
def read_tokenizer_json(directory: AnyPath, expected: TokenizerIdentity) -> bytes | None:
    """The tokenizer.json of the directory, or None if it is unknown. Raises UserError if it is not the expected one."""
    if expected.sha256 is None:
        return None
    path = result_at(directory) / TOKENIZER_FILE
    if not path.is_file():
        raise damaged(path, 'missing')
    with file_errors(path):
        content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != expected.sha256:
        raise UserError(f'{path}: not the tokenizer that made these tokens (sha256 {expected.sha256[:12]}..)')
    return content


def _is_name(value: Any) -> bool:
    """Whether a value can name a directory inside another."""
    return isinstance(value, str) and value not in ('', '.', '..') and not {'/', '\0'} & set(value)


def group_attributes(path: AnyPath) -> dict[str, Any]:
    """The attributes of a zarr group. Raises UserError if its zarr.json cannot be read, or is not one."""
    file = path / 'zarr.json'
    with file_errors(file):
        group = parse_json(file.read_bytes())
    if not isinstance(group, dict) or group.get('node_type') != 'group':
        raise UserError(f'{file}: not a zarr v3 group')
    attributes = group.get('attributes', {})
    if not isinstance(attributes, dict):
        raise damaged(file, f'expected an object of attributes, got {attributes!r:.60}')
    return attributes


def little_endian(values: np.ndarray) -> memoryview:
    """The bytes over which checksums are computed."""
    return memoryview(np.ascontiguousarray(values, values.dtype.newbyteorder('<'))).cast('B')
