"""Reads the files of a checkpoint, on a disk or in a bucket. Imports no JAX."""

import errno
import io
from collections.abc import Buffer

from pretrax.errors import UnavailableError, UserError
from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.connection import BucketError

REQUEST = 64 << 20  # bytes of an object that are asked for at once
# Of the user, the process or the network, not of the content of a file.
_OUT_OF_REACH = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT)


def names_in(place: AnyPath) -> set[str]:
    """The paths of all files below a directory, relative to it."""
    if isinstance(place, BucketPath):
        return set(place.files())
    return {str(path.relative_to(place)) for path in place.rglob('*') if path.is_file()}


def open_file(path: AnyPath, size: int, request: int = REQUEST) -> io.RawIOBase:
    """Opens a file to be read in order.

    Args:
        request: bytes of an object to ask for at once.
    """
    return _Object(path, size, request) if isinstance(path, BucketPath) else path.open('rb', buffering=0)


def raise_if_unreachable(place: AnyPath, error: OSError) -> None:
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
        try:
            return self._path.read_range(self._at, None if stop >= self._size else stop)
        except BucketError as error:
            if error.is_temporary:
                raise
            return b''  # the object ends before this part
