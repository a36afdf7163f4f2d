"""Follows a file of lines that another process appends to, on a disk or in a bucket.

A file may be replaced at any time: by a shorter one when a run resumes, by another one when a run is made again. The
last bytes that were read are compared with the file before each read, so a replaced file is not mistaken for a longer
one.
"""

import abc
import errno
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.connection import BucketError
from pretrax.storage.index import read_entries
from pretrax.storage.parts import PART, parts_of
from pretrax.view.federation.lines import Lines, as_file
from pretrax.view.federation.read import Federation, Silence, read_federation

CHUNK = 4 << 20  # bytes of one read
_LONGEST = 16 << 20  # bytes of a line; a longer one is not ours
_COMPARED = 256  # bytes before the place where reading continues


class Appended(NamedTuple):
    """The lines that were appended since the last read."""

    lines: bytes  # complete lines, each with its newline
    replaced: bool = False  # whether the file was replaced or removed. Then `lines` are from its beginning.
    more: bool = False  # whether there may be more to read now
    exists: bool = True


class Tail(abc.ABC):
    """Follows one file. Only one thread at a time may read."""

    def __init__(self) -> None:
        self._start_over()

    def read(self) -> Appended:
        """Reads at most `CHUNK` bytes more. Raises OSError, after which reading may be tried again."""
        was_read = self._offset > 0
        content = self._more()
        replaced = was_read and (content is None or self._restarted)
        self._restarted = False
        if content is None:
            self._start_over()
            return Appended(b'', replaced, exists=False)
        self._compared = (self._compared + content)[-_COMPARED:]
        lines, newline, rest = (self._torn + content).rpartition(b'\n')
        self._torn = rest if len(rest) <= _LONGEST else b'-'  # a line that begins so is not a JSON object
        return Appended(lines + newline, replaced, more=self._may_have_more(content))

    def _start_over(self) -> None:
        self._offset = 0  # bytes that were read
        self._torn = b''  # the end of them, which is not a complete line yet
        self._compared = b''  # the end of them
        self._restarted = False

    @abc.abstractmethod
    def _more(self) -> bytes | None:
        """Reads on, or from the start if the file was replaced; then `_restarted` is set. None: there is no file."""

    @abc.abstractmethod
    def _may_have_more(self, content: bytes) -> bool: ...


class DiskTail(Tail):
    """A file on a disk."""

    def __init__(self, path: Path):
        self._path = path
        super().__init__()

    def _start_over(self) -> None:
        super()._start_over()
        self._identity: tuple[int, int] | None = None

    def _more(self) -> bytes | None:
        try:
            if not stat.S_ISREG(self._path.stat().st_mode):
                raise OSError(errno.EINVAL, 'Not a file', str(self._path))
            with self._path.open('rb', buffering=0) as file:
                return self._read_on(file.fileno())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _read_on(self, descriptor: int) -> bytes:
        status = os.fstat(descriptor)
        identity, length = (status.st_dev, status.st_ino), len(self._compared)
        is_same = self._identity in (None, identity)
        if not is_same or os.pread(descriptor, length, self._offset - length) != self._compared:
            self._start_over()
            self._restarted = True
        self._identity = identity
        content = os.pread(descriptor, CHUNK, self._offset)
        self._offset += len(content)
        return content

    def _may_have_more(self, content: bytes) -> bool:
        return len(content) == CHUNK


class BucketTail(Tail):
    """A file in a bucket: its parts, or one object. A read that finds nothing new is one small request."""

    def __init__(self, path: BucketPath):
        self._path = path
        super().__init__()

    def _start_over(self) -> None:
        super()._start_over()
        self._part: int | None = None  # None: not known, or one object
        self._object: BucketPath | None = None
        self._in_object = 0  # bytes of this object that were read

    def _more(self) -> bytes | None:
        if self._object is not None:
            content = self._appended()
            if content is not None:
                return content or self._read_next_part()
            self._start_over()
            self._restarted = True
        parts = [part for part in parts_of(self._path) if re.match(r'\d{6}(-|$)', part.name)]
        if not parts and not self._path.is_file():
            return None
        self._part, self._object = (0, self._path / parts[0].name) if parts else (None, self._path)
        return self._read_object()

    def _appended(self) -> bytes | None:
        """The new bytes of the object, or of the one that has replaced it as its part; None: the file was replaced."""
        while self._part is not None:
            now, is_indexed = self._named(self._part)
            if now is None or (is_indexed and now == self._object and self._in_object):
                return None if now is None else b''
            self._object = now
            content = self._read_object()
            if content is not None or not is_indexed or self._named(self._part)[0] == now:
                return content
        return self._read_object()

    def _named(self, part: int) -> tuple[BucketPath | None, bool]:
        """The object that is a part now, and whether an index names it."""
        entries = read_entries(self._path)
        name = f'{part:06}' if entries is None else entries.get(f'{part:06}')
        return (None if name is None else self._path / name), entries is not None

    def _read_object(self) -> bytes | None:
        """The new bytes of the object; None: it was replaced or removed."""
        assert self._object is not None
        length = min(len(self._compared), self._in_object)
        try:
            content = self._object.read_range(self._in_object - length, None)
        except FileNotFoundError:
            return None
        except BucketError as error:
            if error.is_temporary or not self._in_object:
                raise
            return None  # it is shorter than what was read of it
        if content[:length] != self._compared[len(self._compared) - length :]:
            return None
        self._in_object += len(content) - length
        self._offset += len(content) - length
        return content[length:]

    def _read_next_part(self) -> bytes:
        if self._part is None or self._in_object < PART:
            return b''
        following, _ = self._named(self._part + 1)
        try:
            content = following.read_range(0, None) if following is not None else b''
        except FileNotFoundError:
            return b''
        if following is None:
            return b''
        self._part, self._object, self._in_object = self._part + 1, following, len(content)
        self._offset += len(content)
        return content

    def _may_have_more(self, content: bytes) -> bool:
        return self._part is not None and bool(content) and self._in_object >= PART


class FederationTail(Tail):
    """The rounds of a federation as lines of metrics. `federation`: as it was read last, without earlier rounds."""

    def __init__(self, path: AnyPath):
        self._path, self._lines, self._silence = path, Lines(), Silence()
        self.federation: Federation | None = None
        super().__init__()

    def _more(self) -> bytes:
        self.federation = read_federation(self._path, self._lines.next, silence=self._silence)
        return as_file(self._lines.make(self.federation.rounds, self.federation.taken))

    def _may_have_more(self, content: bytes) -> bool:
        return False


def open_tail(path: AnyPath) -> Tail:
    """Follows a file from its beginning. It need not exist yet."""
    return BucketTail(path) if isinstance(path, BucketPath) else DiskTail(path)
