"""An object or a prefix in a bucket, with the methods of `pathlib.Path` that pretrax uses."""

import contextlib
import errno
import functools
import io
import posixpath
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

from pretrax.errors import UserError
from pretrax.storage.connection import BucketError, as_os_error, open_bucket

SCHEMES = ('gs', 's3')
_MISSING = b'\x02'  # TensorStore's version of every object that does not exist


class Versioned(NamedTuple):
    """The content of an object, None if it does not exist, with the version that a conditional write expects."""

    content: bytes | None
    version: bytes


@functools.total_ordering
class BucketPath:
    """gs://BUCKET/KEY or s3://BUCKET/KEY. Immutable; creating one makes no request.

    A directory is a prefix with objects: it needs no `mkdir`, and it is gone when its last object is. Writing an object
    is atomic: readers see the old content or the new one. Every method raises an `OSError` with `filename` and
    `strerror` if its request fails, after the retries of `StorageSettings`: FileNotFoundError, PermissionError or
    BucketError.

    Args:
        url: with the scheme gs or s3.

    Raises:
        UserError: the URL has no bucket, or a key with '..'.
    """

    def __init__(self, url: str):
        scheme, _, rest = url.partition('://')
        bucket, _, key = rest.partition('/')
        parts = [part for part in key.split('/') if part not in ('', '.')]
        if scheme not in SCHEMES or not bucket:
            raise UserError(f'{url}: expected gs://BUCKET/PATH or s3://BUCKET/PATH')
        if '..' in parts:
            raise UserError(f"{url}: a path in a bucket has no '..'\nwrite the path that is meant")
        self.scheme, self.bucket, self.key = scheme, bucket, '/'.join(parts)

    def __str__(self) -> str:
        return f'{self.scheme}://{self.bucket}/{self.key}'.rstrip('/')

    def __repr__(self) -> str:
        return f'BucketPath({str(self)!r})'

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketPath) and str(self) == str(other)

    def __lt__(self, other: 'BucketPath') -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> 'BucketPath':
        return BucketPath(f'{self}/{name}')

    @property
    def name(self) -> str:
        return posixpath.basename(self.key)

    @property
    def suffix(self) -> str:
        return posixpath.splitext(self.key)[1]

    @property
    def stem(self) -> str:
        return posixpath.splitext(self.name)[0]

    @property
    def parent(self) -> 'BucketPath':
        return BucketPath(f'{self.scheme}://{self.bucket}/{posixpath.dirname(self.key)}')

    def with_name(self, name: str) -> 'BucketPath':
        return self.parent / name

    def as_posix(self) -> str:
        return str(self)

    def absolute(self) -> 'BucketPath':
        return self

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: a prefix exists when it has objects."""

    def read_bytes(self) -> bytes:
        """The content of the object."""
        content = self.read_version().content
        if content is None:
            raise FileNotFoundError(errno.ENOENT, 'No such object', str(self))
        return content

    def read_text(self, encoding: str = 'utf-8') -> str:
        return self.read_bytes().decode(encoding)

    def read_range(self, start: int, stop: int | None) -> bytes:
        """The bytes [start, stop) of the object, which must have them; None: to its end."""
        found = self._read(byte_range=slice(start, stop))
        if found.state != 'value':
            raise FileNotFoundError(errno.ENOENT, 'No such object', str(self))
        return found.value

    def write_bytes(self, content: bytes) -> int:
        """Writes the object, or replaces it. Returns its size."""
        with self._errors():
            self._bucket().write(self.key, content).result()
        return len(content)

    def write_text(self, text: str, encoding: str = 'utf-8') -> int:
        return self.write_bytes(text.encode(encoding))

    def read_version(self, largest: int | None = None) -> Versioned:
        """The content and the version of the object; the version of an object that does not exist is valid too.

        Args:
            largest: bytes that it may have. One more request finds out whether it has more, and reads one byte.

        Raises:
            OSError: with EFBIG if it is larger.
        """
        if largest is not None:
            try:
                found = self._read(byte_range=slice(largest, largest + 1))
            except BucketError as error:
                if error.is_temporary:
                    raise  # otherwise it has no such byte
            else:
                if found.state == 'value':
                    raise too_large(self, largest)
                return Versioned(None, found.stamp.generation)
        found = self._read()
        return Versioned(found.value if found.state == 'value' else None, found.stamp.generation)

    def write_version(self, content: bytes | None, expected: bytes) -> bytes | None:
        """Writes the object, or deletes it if `content` is None, unless it has another version than `expected`.

        If the connection breaks, a request may have been carried out although its repetition finds another version:
        read the object to find out.

        Returns:
            The new version; None if the object has another version, and nothing was written.
        """
        with self._errors():
            stamp = self._bucket().write(self.key, content, if_equal=expected).result()
        return stamp.generation or None

    def create(self, content: bytes) -> bool:
        """Writes the object unless it exists. Returns whether it has this content now.

        Content that no other process writes tells a request whose answer was lost from an object of another process.
        """
        return self.write_version(content, _MISSING) is not None or has_content(self, content)

    def open(self, mode: str = 'r', encoding: str = 'utf-8') -> IO[Any]:
        """Opens the object for reading, with its content in memory. To write, use `write_bytes`."""
        if mode not in ('r', 'rb'):
            raise ValueError(f'an object can only be opened to be read, not with mode {mode!r}')
        stream = io.BytesIO(self.read_bytes())
        return stream if mode == 'rb' else io.TextIOWrapper(stream, encoding)

    def is_file(self) -> bool:
        """Whether the object exists."""
        return self.key in self._keys(self.key, f'{self.key}\0')

    def is_dir(self) -> bool:
        """Whether there are objects below this prefix."""
        return any(True for _ in self.files())

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator['BucketPath']:
        """The objects and prefixes directly below this one, sorted. Lists all objects below it."""
        for name in sorted({file.partition('/')[0] for file in self.files()}):
            yield self / name

    def files(self) -> list[str]:
        """The paths of all objects below this prefix, relative to it, sorted."""
        prefix = f'{self.key}/' if self.key else ''
        keys = self._keys(prefix, f'{self.key}0' if self.key else '')  # '0' follows '/'
        return sorted(key[len(prefix) :] for key in keys if len(key) > len(prefix))

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes the object."""
        if not missing_ok and not self.is_file():
            raise FileNotFoundError(errno.ENOENT, 'No such object', str(self))
        with self._errors():
            self._bucket().write(self.key, None).result()

    def remove_tree(self) -> None:
        """Deletes all objects below this prefix, in any order."""
        if not self.key:
            raise ValueError(f'{self} is a whole bucket')
        self.unlink_below(self.files())

    def unlink_below(self, files: Iterable[str]) -> None:
        """Deletes these objects below this prefix, in any order; an object that does not exist is not an error."""
        store = self.kvstore('/')
        with self._errors():
            for deletion in [store.write(file, None) for file in files]:
                deletion.result()

    def kvstore(self, suffix: str = '') -> Any:
        """The TensorStore KvStore whose keys follow this path and `suffix`, to open arrays."""
        with self._errors():
            store = self._bucket()
        store.path = f'{self.key}{suffix}'
        return store

    def _read(self, **options: slice) -> Any:
        with self._errors():
            return self._bucket().read(self.key, **options).result()

    def _bucket(self) -> Any:
        return open_bucket(self.scheme, self.bucket).copy()

    def _keys(self, first: str, end: str) -> list[str]:
        import tensorstore as ts

        with self._errors():
            keys = [key.decode() for key in self._bucket().list(ts.KvStore.KeyRange(first, end)).result()]
        return [key for key in keys if first <= key and (not end or key < end)]  # some services ignore the range

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # the drivers share no base class
            raise as_os_error(error, str(self)) from error


def has_content(path: Any, content: bytes) -> bool:
    """Whether a file or an object has this content. It is not read if it is larger."""
    try:
        return path.read_version(len(content)).content == content
    except OSError as error:
        if error.errno == errno.EFBIG:
            return False
        raise


def too_large(path: object, largest: int) -> OSError:
    """The error for a file or an object of more bytes than it may have."""
    return OSError(errno.EFBIG, f'it is larger than {largest >> 10} KiB', str(path))
