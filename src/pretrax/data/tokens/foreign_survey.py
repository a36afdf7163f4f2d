"""Reads a file of another tool once, to find its largest id, document starts, end-of-text token and fingerprint.

These formats have no checksums and lack most of these facts. The results are cached in the run directory, and reused as
long as the sizes and modification times of the files do not change.
"""

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrax.data.tokens.flat_tokens import little_endian
from pretrax.data.tokens.foreign_layout import GPT2_END_OF_TEXT, Layout
from pretrax.errors import Report, UserError
from pretrax.machine.atomic import new_directory
from pretrax.machine.cache import cache_directory
from pretrax.storage import AnyPath, BucketPath

LARGEST_ID = 2**31 - 2  # the largest id that flat-tokens can store
_AT_ONCE = 1 << 22  # tokens per read
_MIN_DOCUMENTS = 8  # with fewer documents, a common last token may be chance
_VERSION = 1  # of the cached files


class Survey(NamedTuple):
    """The facts about a file.

    Attributes:
        starts: uint64 [documents + 1], where documents start, followed by the end.
        largest: the largest id.
        end_of_text: the id that ends documents; None if there is none.
        sha256: SHA-256 of the values `2 * id + starts_a_document`, as flat-tokens stores them.
        notes: lines to print.
    """

    starts: np.ndarray
    largest: int
    end_of_text: int | None
    sha256: str
    notes: list[str]


def survey_file(layout: Layout, directory: AnyPath | None, say: Report) -> Survey:
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
    try:
        with new_directory(path, keep_existing=True) as partial:  # another process writes the same
            np.save(partial / 'starts.npy', found.starts)
            (partial / 'survey.json').write_text(json.dumps(rest))
    except OSError as error:
        raise UserError(f'{path}: cannot write the survey of the token file: {error.strerror}') from error


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
        _check_ids(ids, start, layout)
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


def _check_ids(ids: np.ndarray, start: int, layout: Layout) -> None:
    if int(ids.min()) < 0 or int(ids.max()) > LARGEST_ID:
        at = int(np.flatnonzero((ids < 0) | (ids > LARGEST_ID))[0])
        raise UserError(
            f'{layout.path}: token {start + at:,} is {int(ids[at]):,}, which is not a valid id\n  the file is damaged'
        )
