"""Opens token files of other tools as `TokenStore`s, without conversion.

A file is read once, to find its largest id, document starts, end-of-text token and fingerprint: these formats have no
checksums and lack most of these facts. The results are cached in the run directory, and reused as long as the sizes and
modification times of the files do not change.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrax.data.corpus.files import nearest
from pretrax.data.tokens.flat_tokens import little_endian
from pretrax.data.tokens.foreign_layout import GPT2_END_OF_TEXT, MEGATRON_MAGIC, IdType, Layout, megatron, nanogpt, pbin
from pretrax.data.tokens.token_store import TokenStore
from pretrax.errors import Report, UserError, system_errors
from pretrax.storage import AnyPath, BucketPath
from pretrax.system.atomic import new_directory
from pretrax.system.cache import cache_directory
from pretrax.system.software import need_extra

GPT2_VOCABULARY = 50257
FORMATS = 'a flat-tokens directory, nanoGPT .bin, Modalities .pbin, Megatron .bin/.idx, or seqax flat-tokens (zarr 2)'
LARGEST_ID = 2**31 - 2  # the largest id that flat-tokens can store
_AT_ONCE = 1 << 22  # tokens per read
_MIN_DOCUMENTS = 8  # with fewer documents, a common last token may be chance
_VERSION = 1  # of the cached files


class Survey(NamedTuple):
    """The facts about a file."""

    starts: np.ndarray  # uint64 [documents + 1], where documents start, followed by the end
    largest: int  # the largest id
    end_of_text: int | None  # the id that ends documents; None if there is none
    sha256: str  # SHA-256 of the values `2 * id + starts_a_document`, as flat-tokens stores them
    notes: list[str]  # lines to print


class ForeignTokens(TokenStore):
    """A file of another tool. `format` is the name of the format."""

    def __init__(self, layout: Layout, found: Survey, vocab_size: int):
        self.name, self.format = str(layout.path), layout.format
        self.n_tokens, self.n_documents = layout.n_tokens, len(found.starts) - 1
        self.vocab_size, self.largest_token, self.end_of_text = vocab_size, found.largest, found.end_of_text
        self.fingerprint = found.sha256
        self._layout, self._starts = layout, found.starts

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        read = self._layout.read(ranges)
        return [self._encoded(values, start, stop) for values, (start, stop) in zip(read, ranges, strict=True)]

    def _encoded(self, values: np.ndarray, start: int, stop: int) -> np.ndarray:
        if self._layout.start_bits:
            values = values >> 1
        if len(values) and not (int(values.min()) >= 0 and int(values.max()) <= self.largest_token):
            raise UserError(
                f'{self.name}: tokens {start:,} to {stop:,} have an id above {self.largest_token:,}, the largest '
                'before\n'
                '  the file was changed after it was opened; restore it and start again'
            )
        first, last = np.searchsorted(self._starts, np.array([start, stop], np.uint64))
        encoded = values.astype(np.uint32) << np.uint32(1)
        encoded[(self._starts[first:last] - np.uint64(start)).astype(np.int64)] |= np.uint32(1)
        return encoded

    def read_starts(self, start: int, stop: int) -> np.ndarray:
        return np.array(self._starts[start:stop])


def find_layouts(path: Path, end_of_text: int | None = None, dtype: IdType | None = None) -> dict[str, Layout]:
    """The splits of a path: 'train', and 'validation' if there is one.

    Args:
        end_of_text: the id that ends documents in a nanoGPT .bin. Other formats store document boundaries.
        dtype: the type of the ids of a nanoGPT .bin; None: uint16. Other formats store it.

    Raises:
        UserError: not a known token file, or its header or size is wrong, or an argument does not apply to the format.
    """
    if path.is_dir():
        return _in_directory(path, end_of_text, dtype)
    prefix = path.with_suffix('') if path.suffix in ('.bin', '.idx') else path
    idx = prefix.with_name(prefix.name + '.idx')
    if path.suffix == '.pbin' and path.is_file():
        layout = pbin(path)
    elif path.suffix == '.idx' or _begins(idx, MEGATRON_MAGIC):
        layout = megatron(prefix)
    elif not path.exists():
        raise UserError(f'{path}: no such file or directory\n  {nearest(path)}')
    elif path.suffix == '.bin':
        held_out = path.with_name('val.bin')
        pair = {'validation': held_out} if path.name == 'train.bin' and held_out.is_file() else {}
        return {split: nanogpt(file, end_of_text, dtype) for split, file in ({'train': path} | pair).items()}
    else:
        raise UserError(
            f'{path}: not a token file that pretrax can read\n  expected {FORMATS}\n'
            '  for text, use data.text instead of data.tokens'
        )
    _refuse_options(layout, end_of_text, dtype)
    return {'train': layout}


def _in_directory(path: Path, end_of_text: int | None, dtype: IdType | None) -> dict[str, Layout]:
    if (path / 'train.bin').is_file():
        return find_layouts(path / 'train.bin', end_of_text, dtype)
    splits = {'train': path / 'train', 'validation': path / 'validation'}
    if (path / 'encoded_tokens' / '.zarray').is_file():
        splits = {'train': path}
    found = {name: split for name, split in splits.items() if (split / 'encoded_tokens' / '.zarray').is_file()}
    if 'train' not in found:
        inside = [str(file.parent) for at in ('*', 'data/*') for file in sorted(path.glob(f'{at}/zarr.json'))]
        hint = f'did you mean {inside[0]}?' if inside else nearest(path)
        raise UserError(f'{path}: not a token file that pretrax can read\n  expected {FORMATS}\n  {hint}')
    need_extra('cloud', f'{path}: reading zarr 2', 'tensorstore')
    from pretrax.data.tokens.foreign_zarr import seqax

    layouts = {name: seqax(split) for name, split in found.items()}
    _refuse_options(layouts['train'], end_of_text, dtype)
    return layouts


def _begins(path: Path, magic: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open('rb') as stream:
        return stream.read(len(magic)) == magic


def _refuse_options(layout: Layout, end_of_text: int | None, dtype: IdType | None) -> None:
    if end_of_text is not None:
        raise UserError(
            f'{layout.path}: {layout.format} stores document boundaries\n  remove end_of_text={end_of_text}'
        )
    if dtype is not None:
        raise UserError(f'{layout.path}: {layout.format} stores the type of its ids\n  remove dtype={dtype}')


def open_layouts(
    layouts: dict[str, Layout], directory: AnyPath | None, say: Report, vocab_size: int | None = None
) -> dict[str, ForeignTokens]:
    """Opens splits for reading, with one vocabulary.

    Args:
        directory: caches the survey of each file; None: no cache.
        vocab_size: None: from the files if they have it, otherwise the largest id plus 1.

    Raises:
        UserError: an id is outside the vocabulary, or a file is damaged.
    """
    surveys = {split: _survey_file(layout, directory, say) for split, layout in layouts.items()}
    largest = max(survey.largest for survey in surveys.values())
    if vocab_size is None:
        implied = max(_implied_vocabulary(layout, surveys[split]) for split, layout in layouts.items())
        vocab_size = max(implied, largest + 1)
        reason = (
            'from the file' if implied else 'the largest id plus 1; to change it, set data.vocab_size or data.tokenizer'
        )
        say(f'vocabulary: {vocab_size:,} tokens, {reason}')
    for split, layout in layouts.items():
        survey = surveys[split]
        for note in survey.notes:
            say(f'tokens: {layout.path}: {note}')
        if survey.largest >= vocab_size:
            raise UserError(
                f'{layout.path}: token {survey.largest:,} does not exist in a vocabulary of {vocab_size:,}\n'
                '  the tokens are from another tokenizer, or the file is damaged or has ids of another width'
            )
        ends = 'without end-of-text token' if survey.end_of_text is None else f'ended by token {survey.end_of_text}'
        say(
            f'tokens: {split} {layout.n_tokens:,} tokens, {len(survey.starts) - 1:,} documents ({ends}), '
            f'read from {layout.path} ({layout.format})'
        )
    return {split: ForeignTokens(layout, surveys[split], vocab_size) for split, layout in layouts.items()}


def _implied_vocabulary(layout: Layout, found: Survey) -> int:
    """The vocabulary size that the format implies, or 0. Documents that end with GPT-2's end-of-text imply GPT-2's."""
    if layout.vocab_size is not None:
        if found.largest >= layout.vocab_size:
            raise UserError(
                f'{layout.path}: max_token_id is {layout.vocab_size - 1:,}, but token {found.largest:,} occurs\n'
                '  the file is damaged'
            )
        return layout.vocab_size
    return GPT2_VOCABULARY if layout.assumed and found.end_of_text == GPT2_END_OF_TEXT else 0


def _survey_file(layout: Layout, directory: AnyPath | None, say: Report) -> Survey:
    """The survey of a file, cached in `directory` or made by reading it. Raises UserError if the file is damaged."""
    found = _cached_or_made(layout, directory, say)
    if layout.find_starts is not None or layout.end_of_text is None:
        return found
    one = 'so it is read as one document; end_of_text=ID sets the id that ends documents'
    if layout.assumed and found.largest > GPT2_END_OF_TEXT:
        found = _cached_or_made(dataclasses.replace(layout, end_of_text=None), directory, say)
        return found._replace(notes=[f'the largest id is {found.largest:,}, outside the vocabulary of GPT-2, {one}'])
    if found.end_of_text is None:
        return found._replace(notes=[f'it has no token {layout.end_of_text}, {one}'])
    return found


def _cached_or_made(layout: Layout, directory: AnyPath | None, say: Report) -> Survey:
    if directory is None:
        return _make(layout, say)
    stats = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in layout.files]
    key = hashlib.sha256(json.dumps([_VERSION, layout.format, layout.end_of_text, stats]).encode()).hexdigest()
    # A run in a bucket keeps them on this machine: the token file is here too.
    near = cache_directory() / 'surveys' if isinstance(directory, BucketPath) else directory
    path = near / f'survey-{key[:16]}'
    if not path.is_dir():
        _save(_make(layout, say), path)
    rest = json.loads((path / 'survey.json').read_bytes())
    return Survey(starts=np.load(path / 'starts.npy', mmap_mode='r', allow_pickle=False), **rest)


def _save(found: Survey, path: Path) -> None:
    rest = {name: value for name, value in found._asdict().items() if name != 'starts'}
    problem = f'{path}: cannot write the survey of the token file'
    with system_errors(problem), new_directory(path, keep_existing=True) as partial:  # another process writes the same
        np.save(partial / 'starts.npy', found.starts)
        (partial / 'survey.json').write_text(json.dumps(rest))


def _make(layout: Layout, say: Report) -> Survey:
    starts, notes = layout.find_starts() if layout.find_starts else (None, [])
    all_ends, last_ids, digest, largest = [], set(), hashlib.sha256(), -1
    begins = True  # whether the next read starts a document
    began = said = time.perf_counter()
    for start in range(0, layout.n_tokens, _AT_ONCE):
        stop = min(start + _AT_ONCE, layout.n_tokens)
        [values] = layout.read([(start, stop)])
        bits = np.flatnonzero(values & 1) if layout.start_bits else None
        ids = values >> 1 if layout.start_bits else values
        if int(ids.min()) < 0 or int(ids.max()) > LARGEST_ID:
            at = int(np.flatnonzero((ids < 0) | (ids > LARGEST_ID))[0])
            raise UserError(
                f'{layout.path}: token {start + at:,} is {int(ids[at]):,}, which is not a valid id\n'
                '  the file is damaged'
            )
        if starts is None:
            ends = (
                np.flatnonzero(ids == layout.end_of_text) if layout.end_of_text is not None else np.zeros(0, np.int64)
            )
            all_ends.append(ends + start)
        else:
            first, last = np.searchsorted(starts, np.array([start + 1, stop + 1], np.uint64))
            ends = starts[first:last].astype(np.int64) - 1 - start
        begun = np.append(np.zeros(int(begins), np.int64), ends[ends < len(ids) - 1] + 1)
        if bits is not None and not np.array_equal(bits, begun):
            raise UserError(
                f'{layout.path}: the documents that start in tokens {start:,} to {stop:,} differ from seq_starts\n'
                '  the dataset is damaged'
            )
        begins = bool(len(ends)) and ends[-1] == len(ids) - 1
        encoded = ids.astype(np.uint32) << np.uint32(1)
        encoded[begun] |= np.uint32(1)
        digest.update(little_endian(encoded))
        largest = max(largest, int(ids.max()))
        last_ids |= set(np.unique(ids[ends])[:2].tolist())
        if (now := time.perf_counter()) - said > 10:
            said = now
            say(f'tokens: first read of {layout.path}: {stop / layout.n_tokens:.0%} after {now - began:.0f} s')
    if starts is None:
        inner = np.concatenate(all_ends) + 1
        starts = np.unique(np.concatenate([[0], inner, [layout.n_tokens]])).astype(np.uint64)
        end_of_text = layout.end_of_text if len(inner) else None
    else:
        end_of_text = int(last_ids.pop()) if len(last_ids) == 1 and len(starts) > _MIN_DOCUMENTS else None
    return Survey(starts, largest, end_of_text, digest.hexdigest(), notes)
