"""Parts of files, as workers read them: rows in order, each with a record or an error.

This module reads files that are one document, and files of JSON lines; data/corpus/tables.py reads tables. Text is
UTF-8 and is kept unchanged, including NUL characters and line endings. A byte order mark at the start of a file is
dropped.
"""

import abc
import codecs
import functools
import io
import itertools
import json
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pretrax.data.corpus.content import read_content, read_document, split_lines
from pretrax.data.corpus.files import TextFile
from pretrax.data.corpus.line_index import LineIndex, find_index
from pretrax.data.corpus.storage import Url, state
from pretrax.errors import UserError

# A value of 3 bytes of JSON takes 72 bytes of memory, so a long line has to be text.
_LONG = 8 << 20
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


class Row(NamedTuple):
    """The origin of a row, and its content: a text, a record with fields, or the error in this row."""

    origin: str
    content: str | dict[str, Any] | UserError


def in_memory[P: Any](rows: Callable[[P, int], Iterator[Row]]) -> Callable[..., Iterator[Row]]:
    """A method that yields the rows of a file, with a UserError if one of them does not fit in memory."""

    @functools.wraps(rows)
    def bounded(part: P, start: int = 0) -> Iterator[Row]:
        try:
            yield from rows(part, start)
        except MemoryError:
            raise UserError(
                f'{part.file.path}: a document does not fit in memory\n'
                '  use fewer processes (data.workers=1), give them more memory, or split the document'
            ) from None

    return bounded


class Part(abc.ABC):
    """Consecutive rows of a file. Picklable; reading raises UserError if the file is damaged or has changed."""

    @abc.abstractmethod
    def rows(self, start: int = 0) -> Iterator[Row]:
        """The rows after the first `start`."""

    @abc.abstractmethod
    def count(self) -> int:
        """The number of rows."""

    def exact(self, origin: str) -> str:
        """An origin of this part, as messages print it; may read the file again."""
        return origin


@dataclass(frozen=True)
class Whole(Part):
    """A file that is one document."""

    file: TextFile

    @in_memory
    def rows(self, start: int = 0) -> Iterator[Row]:
        if start:
            return
        refuse_changed(self.file)
        origin = str(self.file.path)
        raw = read_document(self.file.path)
        refuse_changed(self.file, afterwards=True)
        try:
            yield Row(origin, _python_text(raw, origin) if self.file.kind == 'python' else _text(raw, origin))
        except UserError as error:
            yield Row(origin, error)

    def count(self) -> int:
        return 1


@dataclass(frozen=True)
class Lines(Part):
    """The JSON lines that start at the bytes start to stop - 1 of the decompressed content."""

    file: TextFile
    start: int = 0
    stop: int | None = None
    # Number of the line that starts at `start`. None if unknown: the part then starts at the first line that starts
    # after `start`, origins are byte positions, and `exact` counts the lines.
    first_line: int | None = 1
    # Byte offsets, in the file and in the content, of the frame at which a compressed file is entered
    frame: tuple[int, int] = (0, 0)

    @in_memory
    def rows(self, start: int = 0) -> Iterator[Row]:
        refuse_changed(self.file)
        path = self.file.path
        part, skipped = self._from(start) if start else (self, 0)
        for number, (position, line) in enumerate(part._lines(), skipped):
            if number < start:
                continue
            origin = f'{path}@{position}' if self.first_line is None else f'{path}:{self.first_line + number}'
            try:
                yield Row(origin, _record(line, origin) if line.strip() else '')
            except UserError as error:
                yield Row(origin, error)
        refuse_changed(self.file, afterwards=True)

    def count(self) -> int:
        if (index := find_index(self.file)) is None:
            return sum(1 for _ in self._lines())
        bounds = [self.start, index.n_bytes if self.stop is None else self.stop]
        return int(np.diff(np.searchsorted(index.starts, bounds))[0])

    def exact(self, origin: str) -> str:
        path, at, position = origin.rpartition('@')
        if self.first_line is not None or not at:
            return origin
        left = int(position)
        number = 1
        for block in read_content(self.file.path):
            number += block[:left].count(b'\n')
            left -= len(block)
            if left <= 0:
                break
        return f'{path}:{number}'

    def cut(self, positions: Sequence[int]) -> list['Lines | None']:
        """Parts of the whole file, cut near these byte positions; None if the preceding part covers that range too."""
        index = find_index(self.file)
        if index is None:
            # Without an index, the frames of a compressed file are unknown; an HTTP server may not support ranges.
            if self.file.is_compressed or (isinstance(self.file.path, Url) and self.file.path.is_http):
                return [self, *[None] * len(positions)]
            bounds = [0, *positions, None]
            return [
                replace(self, start=start, stop=stop, first_line=None if start else 1)
                for start, stop in itertools.pairwise(bounds)
            ]
        lines = [0, *index.first_lines(self.file, list(positions)), len(index.starts)]
        starts = np.append(index.starts, index.n_bytes)
        return [
            replace(self, start=int(starts[line]), stop=int(starts[after]), first_line=line + 1).entered(index)
            if line < after or not number
            else None
            for number, (line, after) in enumerate(itertools.pairwise(lines))
        ]

    def entered(self, index: LineIndex) -> 'Lines':
        """Reads the lines from the nearest frame before them."""
        return replace(self, frame=index.frame(self.start)) if self.file.is_compressed else self

    def _from(self, row: int) -> tuple['Lines', int]:
        """Lines of this part that start at or before a row, and the number of their first row."""
        index = find_index(self.file)
        if index is None:
            return self, 0
        first = int(np.searchsorted(index.starts, self.start))
        start = int(np.append(index.starts[first + row : first + row + 1], index.n_bytes)[0])
        return replace(self, start=start, first_line=first + row + 1).entered(index), row

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """(first byte, line) for each line."""
        path = self.file.path
        searched = self.start > 0 and self.first_line is None
        before = self.start - searched  # a line starts at `start` if the byte before it is a newline
        if self.file.is_compressed:
            content = _without(read_content(path, self.frame[0]), before - self.frame[1])
        else:
            content = read_content(path, before)
        found = split_lines(content, path)
        position = before
        if searched:
            position += len(next(found, b'')) + 1
        for line in found:
            if self.stop is not None and position >= self.stop:
                return
            yield position, line.removeprefix(codecs.BOM_UTF8) if position == 0 else line
            position += len(line) + 1


def refuse_changed(file: TextFile, afterwards: bool = False) -> None:
    """Raises UserError if a file has changed since it was found. Remote files are checked only after reading."""
    if isinstance(file.path, Url) and not afterwards:
        return
    if not state(file.path).is_of(file.state):
        raise UserError(
            f'{file.path}: the file has changed since this run started\n  start again when nothing writes to the files'
        )


# The first bytes of files that are not text.
_NOT_TEXT = {
    b'%PDF-': 'a PDF document',
    b'\x89PNG': 'an image (PNG)',
    b'\xff\xd8\xff': 'an image (JPEG)',
    b'GIF8': 'an image (GIF)',
    b'RIFF': 'an image, a sound or a film (RIFF)',
    b'PK\x03\x04': 'a ZIP archive, such as .docx, .xlsx or .epub',
    b'\xd0\xcf\x11\xe0': 'a document of Microsoft Office',
    b'\x1f\x8b': 'compressed by gzip, although its name does not end in .gz',
    b'\x28\xb5\x2f\xfd': 'compressed by zstd, although its name does not end in .zst',
    b'SQLite format': 'a database (SQLite)',
    b'\x7fELF': 'a program',
    b'\x93NUMPY': 'an array of NumPy',
}


def _record(line: bytes, origin: str) -> dict[str, Any]:
    if len(line) > _LONG and (n_bytes := len(_STRING.sub(b'', line))) > _LONG:
        raise UserError(
            f'{origin}: {n_bytes:,} bytes of JSON outside of its strings\n'
            f'  expected at most {_LONG:,}, and text in strings'
        )
    try:
        record = json.loads(_decode(line, 'utf-8', origin))
    except json.JSONDecodeError as error:
        raise UserError(
            f'{origin}: not JSON: {error.msg} at character {error.pos}\n  expected one object per line'
        ) from None
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits, deeply nested brackets
        if isinstance(error, UserError):
            raise
        raise UserError(f'{origin}: cannot be parsed as JSON: {error}') from None
    if not isinstance(record, dict):
        raise UserError(f'{origin}: a JSON {type(record).__name__}\n  expected an object with the text in a field')
    return record


def _text(raw: bytes, origin: str) -> str:
    return _decode(raw.removeprefix(codecs.BOM_UTF8), 'utf-8', origin)


def _python_text(raw: bytes, origin: str) -> str:
    encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
    return _decode(raw, encoding, origin).replace('\r\n', '\n')


def _decode(raw: bytes, encoding: str, origin: str) -> str:
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        if (content := next((name for magic, name in _NOT_TEXT.items() if raw.startswith(magic)), None)) is not None:
            raise UserError(f'{origin}: {content}, not text\n  write its text to a .txt file first') from None
        bad = raw[error.start : error.start + 4].hex(' ')
        utf_16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise UserError(
            f'{origin}: not {encoding} at byte {error.start}: {bad} ({error.reason})\n'
            f'  convert the file, for example: iconv -f {"utf-16" if utf_16 else "latin1"} -t utf-8'
        ) from None


def _without(parts: Iterator[bytes], n_bytes: int) -> Iterator[bytes]:
    for part in parts:
        if n_bytes < len(part):
            yield part[n_bytes:] if n_bytes else part
        n_bytes = max(0, n_bytes - len(part))
