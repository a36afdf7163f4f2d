"""Indexes the lines of a large .jsonl file: `pretrax data index FILE` writes FILE.pretrax-index next to it.

With an index, reading can start at any document, workers know their line numbers, and workers can share a compressed
file if it has several frames. The layout, little-endian:

    8 bytes             PTXLINES
    4088 bytes          JSON (Header), padded with blanks
    n_lines x u64       the first byte of each line in the decompressed content
    n_frames x 2 u64    the first byte of each frame in the file, and in the decompressed content

An index that is damaged, or that does not match the file's size and modification time, raises UserError.
"""

import contextlib
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from pydantic import BaseModel, ValidationError

from pretrax.data.corpus.content import read_content
from pretrax.data.corpus.files import INDEX_SUFFIX, TextFile
from pretrax.data.corpus.storage import state
from pretrax.errors import UserError, system_errors
from pretrax.system.atomic import sync_directory, sync_file
from pretrax.system.json_file import parse_json
from pretrax.system.locks import is_at, lock

MAGIC = b'PTXLINES'
VERSION = 1
_HEADER = 4096


class Header(BaseModel):
    """The header of an index. `crc32` covers everything after the header."""

    version: int
    size: int
    stamp: str
    n_bytes: int  # decompressed
    n_lines: int
    n_frames: int
    crc32: int


@dataclass(frozen=True)
class LineIndex:
    """The lines and frames of a file; the arrays are memory-mapped."""

    n_bytes: int
    starts: np.ndarray
    frames: np.ndarray

    def frame(self, start: int) -> tuple[int, int]:
        """The offsets, in file and content, of the last frame that starts at or before byte `start` of the content."""
        at = int(np.searchsorted(self.frames[:, 1], start, side='right')) - 1
        return (int(self.frames[at, 0]), int(self.frames[at, 1])) if at >= 0 else (0, 0)

    def first_lines(self, file: TextFile, positions: list[int]) -> list[int]:
        """For each byte position of the file, the first line that starts there or later.

        In a compressed file, the first line that starts in a frame that starts there or later.
        """
        if file.is_compressed:
            at = np.searchsorted(self.frames[:, 0], positions)
            contents = np.append(self.frames[:, 1], self.n_bytes)[at]
        else:
            contents = np.asarray(positions)
        return np.searchsorted(self.starts, contents).tolist()


def index_path(path: Path) -> Path:
    """The path of the index of a file."""
    return path.with_name(path.name + INDEX_SUFFIX)


def find_index(file: TextFile) -> LineIndex | None:
    """The index of a file, or None. Raises UserError if the index is damaged or the file has changed."""
    if not isinstance(file.path, Path) or file.kind != 'jsonl' or not (path := index_path(file.path)).exists():
        return None
    header = _read_header(path, file.path)
    if (header.size, header.stamp) != (file.state.size, file.state.stamp):
        raise UserError(f'{path}: {file.path.name} has changed since it was indexed\n{_again(file.path, path)}')
    n_values = header.n_lines + 2 * header.n_frames
    values = np.empty(0, '<u8')
    if is_whole := path.stat().st_size == _HEADER + values.itemsize * n_values:
        values = np.memmap(path, '<u8', 'r', _HEADER) if n_values else values
    if not is_whole or zlib.crc32(values) != header.crc32:
        raise UserError(f'{path}: the index is damaged\n{_again(file.path, path)}')
    return LineIndex(header.n_bytes, values[: header.n_lines], values[header.n_lines :].reshape(-1, 2))


def write_index(file: TextFile, say: Callable[[int], None] = lambda _: None) -> LineIndex:
    """Indexes a local .jsonl file, and replaces an older index atomically.

    Args:
        say: called with the number of decompressed bytes read so far.

    Raises:
        UserError: the file is remote, of another kind or changing, or the index cannot be written.
    """
    if not isinstance(file.path, Path):
        raise UserError(f'{file.path}: only local files can be indexed\n  copy the file to a local disk first')
    if file.kind != 'jsonl':
        raise UserError(
            f'{file.path}: only .jsonl files are indexed, plain or compressed\n  {file.kind} files need no index'
        )
    frames = array('Q')
    n_bytes = n_lines = crc = 0
    place = index_path(file.path)
    with system_errors(f'{place}: cannot write the index'), _replacing(place) as out:
        out.write(bytes(_HEADER))
        last = np.zeros(1, '<u8')  # where the next line would start
        for block in read_content(file.path, began=lambda *offsets: frames.extend(offsets)):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord('\n')) + (n_bytes + 1)
            n_bytes += len(block)
            starts = np.concatenate([last, ends.astype('<u8')])
            last = starts[-1:]
            n_lines += len(starts) - 1
            crc = zlib.crc32(starts[:-1].tobytes(), crc)
            out.write(starts[:-1].tobytes())
            say(n_bytes)
            _refuse_changed(file)  # after each block, since a growing file has no end
        rest = last.tobytes() if last[0] < n_bytes else b''
        n_lines += bool(rest)
        rest += np.array(frames, '<u8').tobytes()
        out.write(rest)
        _refuse_changed(file)
        header = Header(
            version=VERSION,
            size=file.state.size or 0,
            stamp=file.state.stamp,
            n_bytes=n_bytes,
            n_lines=n_lines,
            n_frames=len(frames) // 2,
            crc32=zlib.crc32(rest, crc),
        )
        sync_file(out)
        out.seek(0)
        out.write(MAGIC + header.model_dump_json().encode().ljust(_HEADER - len(MAGIC)))
    index = find_index(file)
    assert index is not None
    return index


def _refuse_changed(file: TextFile) -> None:
    if state(file.path) != file.state:
        raise UserError(f'{file.path}: the file changed while it was indexed\n  index it when nothing writes to it')


def _read_header(path: Path, of: Path) -> Header:
    with path.open('rb') as stream:
        raw = stream.read(_HEADER)
    try:
        header = Header.model_validate(parse_json(raw.removeprefix(MAGIC)) if raw.startswith(MAGIC) else None)
    except (ValidationError, ValueError):
        raise UserError(f'{path}: not a line index\n{_again(of, path)}') from None
    if header.version != VERSION:
        raise UserError(f'{path}: version {header.version}, expected {VERSION}\n{_again(of, path)}')
    return header


def _again(of: Path, path: Path) -> str:
    return f'  rebuild it: pretrax data index {of}\n  or remove it: rm {path}'


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Writes a file that replaces `path` when the block ends without an exception.

    Only one process at a time may write it. The partial file of a killed process is overwritten.
    """
    partial = path.with_name(f'.{path.name}.partial')
    with partial.open('ab') as held:
        try:
            lock(held)
        except BlockingIOError:
            raise UserError(f'{path}: another process is writing this index') from None
        if not is_at(held, partial):
            raise UserError(f'{path}: another process has just written this index')
        try:
            with partial.open('r+b') as out:
                out.truncate(0)
                yield out
                sync_file(out)
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    sync_directory(path.parent)
