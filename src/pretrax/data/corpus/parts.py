"""A part of a file, as one worker reads it: rows in order, each a record or the error that it is.

A file that is one document, and one whose documents are lines of JSON, are here; tables are in data/corpus/tables.py. Text is
UTF-8 and stays as it is, NUL characters and line ends included; the byte order mark that a file may begin with is no
text.
"""

import codecs
import itertools
import json
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from pretrax.data.corpus.blocks import blocks, lines
from pretrax.data.corpus.files import TextFile
from pretrax.data.corpus.line_index import LineIndex, find_index
from pretrax.data.corpus.storage import Url, state
from pretrax.errors import UserError


class Row(NamedTuple):
    """What lies at a place: a text, a record with fields, or what is wrong with it alone."""

    place: str
    content: str | dict[str, Any] | UserError


class Part(Protocol):
    """Consecutive rows of a file. Picklable; reading raises UserError where the file is damaged or has changed."""

    def rows(self, start: int = 0) -> Iterator[Row]:
        """The rows but for the first `start`."""
        ...

    def count(self) -> int:
        """How many rows it has."""
        ...

    def exact(self, place: str) -> str:
        """A place of this part in the words for a message, which may take another look at the file."""
        ...


@dataclass(frozen=True)
class Whole:
    """A file that is one document."""

    file: TextFile

    def rows(self, start: int = 0) -> Iterator[Row]:
        if start:
            return
        refuse_changed(self.file)
        place = str(self.file.path)
        raw = b''.join(blocks(self.file.path))
        refuse_changed(self.file, afterwards=True)
        try:
            yield Row(place, _python_text(raw, place) if self.file.kind == 'python' else _text(raw, place))
        except UserError as error:
            yield Row(place, error)

    def count(self) -> int:
        return 1

    def exact(self, place: str) -> str:
        return place


@dataclass(frozen=True)
class Lines:
    """The lines of JSON that begin at the bytes start to stop - 1 of the decompressed content.

    `first_line` is the number of the line that begins at `start`. It is None where nobody has counted those before; the
    first line is then the next one to begin, places tell the byte, and `exact` counts. `frame` is where a compressed file
    is entered: the place of a frame in the file and in the content.
    """

    file: TextFile
    start: int = 0
    stop: int | None = None
    first_line: int | None = 1
    frame: tuple[int, int] = (0, 0)

    def rows(self, start: int = 0) -> Iterator[Row]:
        refuse_changed(self.file)
        path = self.file.path
        part, skipped = self._from(start) if start else (self, 0)
        for number, (position, line) in enumerate(part._lines(), skipped):
            if number < start:
                continue
            place = f'{path}@{position}' if self.first_line is None else f'{path}:{self.first_line + number}'
            try:
                yield Row(place, _record(line, place) if line.strip() else '')
            except UserError as error:
                yield Row(place, error)
        refuse_changed(self.file, afterwards=True)

    def count(self) -> int:
        if (index := find_index(self.file)) is None:
            return sum(1 for _ in self._lines())
        bounds = [self.start, index.n_bytes if self.stop is None else self.stop]
        return int(np.diff(np.searchsorted(index.starts, bounds))[0])

    def exact(self, place: str) -> str:
        path, at, position = place.rpartition('@')
        if self.first_line is not None or not at:
            return place
        left = int(position)
        number = 1
        for block in blocks(self.file.path):
            number += block[:left].count(b'\n')
            left -= len(block)
            if left <= 0:
                break
        return f'{path}:{number}'

    def cut(self, positions: Sequence[int]) -> list['Lines | None']:
        """Parts of the whole file, cut near these of its bytes; None where the part before goes on."""
        index = find_index(self.file)
        if index is None:
            # Nobody knows where the frames of a compressed file begin, and a server of http may send all or nothing.
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
        """The same lines, reached by the shortest way."""
        return replace(self, frame=index.frame(self.start)) if self.file.is_compressed else self

    def _from(self, row: int) -> tuple['Lines', int]:
        """Lines of this part of which the first is at or before a row, and its number."""
        index = find_index(self.file)
        if index is None:
            return self, 0
        first = int(np.searchsorted(index.starts, self.start))
        start = int(np.append(index.starts[first + row : first + row + 1], index.n_bytes)[0])
        return replace(self, start=start, first_line=first + row + 1).entered(index), row

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """(first byte, line) of each line."""
        path = self.file.path
        searched = self.start > 0 and self.first_line is None
        before = self.start - searched  # a line begins at `start` if the byte before ends one
        if self.file.is_compressed:
            content = _without(blocks(path, self.frame[0]), before - self.frame[1])
        else:
            content = blocks(path, before)
        found = lines(content, path)
        position = before
        if searched:
            position += len(next(found, b'')) + 1
        for line in found:
            if self.stop is not None and position >= self.stop:
                return
            yield position, line.removeprefix(codecs.BOM_UTF8) if position == 0 else line
            position += len(line) + 1


def refuse_changed(file: TextFile, afterwards: bool = False) -> None:
    """Raises UserError if a file is not as it was found. An object far away is asked once only, after it was read."""
    if isinstance(file.path, Url) and not afterwards:
        return
    if not state(file.path).is_of(file.state):
        raise UserError(
            f'{file.path}: the file has changed since this run began\n'
            '  start again when the files are at rest'
        )  # fmt: skip


def _record(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(_decode(line, 'utf-8', place))
    except json.JSONDecodeError as error:
        raise UserError(
            f'{place}: not JSON: {error.msg} at character {error.pos}\n  expected one object a line'
        ) from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets within brackets
        if isinstance(error, UserError):
            raise
        raise UserError(f'{place}: not to be read as JSON: {error}') from None
    if not isinstance(record, dict):
        raise UserError(f'{place}: a JSON {type(record).__name__}\n  expected an object, with the text in a field')
    return record


def _text(raw: bytes, place: str) -> str:
    return _decode(raw.removeprefix(codecs.BOM_UTF8), 'utf-8', place)


def _python_text(raw: bytes, place: str) -> str:
    encoding = tokenize.detect_encoding(iter(raw.splitlines(keepends=True)).__next__)[0]
    return _decode(raw, encoding, place).replace('\r\n', '\n')


def _decode(raw: bytes, encoding: str, place: str) -> str:
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        bad = raw[error.start : error.start + 4].hex(' ')
        utf_16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise UserError(
            f'{place}: not {encoding} at byte {error.start}: {bad} ({error.reason})\n'
            f'  convert the file, for example: iconv -f {"utf-16" if utf_16 else "latin1"} -t utf-8'
        ) from None


def _without(parts: Iterator[bytes], n_bytes: int) -> Iterator[bytes]:
    for part in parts:
        if n_bytes < len(part):
            yield part[n_bytes:] if n_bytes else part
        n_bytes = max(0, n_bytes - len(part))
