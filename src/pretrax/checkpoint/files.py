"""Reads the files of a checkpoint, on a disk or in a bucket. Imports no JAX."""

import errno
import io
import os
from collections.abc import Buffer

import pydantic

from pretrax.errors import UnavailableError, UserError
from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.connection import BucketError

REQUEST = 64 << 20  # bytes of an object that are asked for at once
LARGEST_PACKED = 1 << 20  # bytes of a file that may be a part of another one
# Of the user, the process or the network, not of the content of a file.
_OUT_OF_REACH = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT)


class File(pydantic.BaseModel):
    """Size in bytes and XXH3 digest (128 bits, hexadecimal) of a file, which may be a part of another one: a pack."""

    size: int = pydantic.Field(ge=0, le=1 << 60)
    xxh3: str
    pack: str | None = pydantic.Field(default=None, exclude_if=lambda pack: pack is None)
    offset: int = pydantic.Field(default=0, ge=0, le=1 << 60, exclude_if=lambda offset: not offset)


class Files:
    """Files of a state that are not all in one directory; as text, it follows `the checkpoint`."""

    def open(self, name: str) -> io.RawIOBase | io.BytesIO:
        """Opens a file to be read in order. Its digest was checked. Raises OSError, or DamagedError."""
        raise NotImplementedError


type Place = AnyPath | Files


def names_in(place: AnyPath) -> set[str]:
    """The paths of all files below a directory, relative to it."""
    if isinstance(place, BucketPath):
        return set(place.files())
    return {str(path.relative_to(place)) for path in place.rglob('*') if path.is_file()}


def open_file(place: Place, name: str, file: File, request: int = REQUEST) -> io.RawIOBase | io.BytesIO:
    """Opens a file of a checkpoint to be read in order.

    Args:
        request: bytes of an object to ask for at once.
    """
    if isinstance(place, Files):
        return place.open(name)
    if file.pack is not None:
        return io.BytesIO(read_file(place, name, file))
    if isinstance(place, BucketPath):
        return _Object(place / name, file.size, request)
    return (place / name).open('rb', buffering=0)


def read_file(place: Place, name: str, file: File) -> bytes:
    """Reads a small file of a checkpoint. The result is shorter than its size if its pack ends early."""
    if isinstance(place, Files):
        with place.open(name) as stream:
            return stream.read() or b''
    if file.pack is None:
        return (place / name).read_bytes()
    return read_range(place / file.pack, file.offset, file.offset + min(file.size, LARGEST_PACKED))


def raise_if_unreachable(place: Place, error: OSError) -> None:
    """Raises an error that says nothing about the files: a checkpoint that is out of reach is not damaged.

    Raises:
        UnavailableError: the bucket does not answer.
        UserError: a local file may not be opened now.
        OSError: it denies access, or the request is wrong.
    """
    if isinstance(error, BucketError) and error.is_temporary:
        raise UnavailableError(
            f'{error.filename}: {error.strerror}\nrun the same command again when the bucket can be reached'
        ) from error
    if error.errno in _OUT_OF_REACH and not isinstance(place, BucketPath):
        raise UserError(
            f'{error.filename or place}: {error.strerror}\n'
            'the checkpoint may be whole: make it readable for this user, and try again'
        ) from error
    if isinstance(place, BucketPath) and not isinstance(error, FileNotFoundError):
        raise error


class _Object(io.RawIOBase):
    """Reads an object in large parts, only those that are used. A part is asked for once."""

    def __init__(self, path: BucketPath, size: int, request: int):
        self._path, self._size, self._request = path, size, request
        self._at, self._start, self._part = 0, 0, memoryview(b'')

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        assert whence == 1, 'an object is read in order'
        self._at += offset
        return self._at

    def readinto(self, target: Buffer, /) -> int:
        content = memoryview(target).cast('B')
        if self._at >= self._start + len(self._part) and (self._at < self._size or self._at == 0):
            self._start, self._part = self._at, memoryview(self._fetch())
        found = self._part[self._at - self._start :][: len(content)]
        content[: len(found)] = found
        self._at += len(found)
        return len(found)

    def _fetch(self) -> bytes:
        """The next part. The last one is read to the end of the object, so that a longer one is noticed."""
        stop = self._at + self._request
        if self._at == 0 and stop >= self._size:
            return self._path.read_bytes()
        return read_range(self._path, self._at, None if stop >= self._size else stop)


def read_range(path: AnyPath, start: int, stop: int | None) -> bytes:
    """The bytes [start, stop) of a file or an object; None: to its end. Fewer, or none, if it ends before them."""
    if not isinstance(path, BucketPath):
        with path.open('rb') as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(start)
            return stream.read(max(0, (size if stop is None else min(stop, size)) - start))
    try:
        return path.read_range(start, stop)
    except BucketError as error:
        if error.is_temporary:
            raise
        return b''
