"""Directories that are written or read on a disk, and kept in a bucket."""

import contextlib
import errno
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pretrax.storage.bucket_path import BucketPath
from pretrax.storage.locate import AnyPath

_LAST = 'manifest.json'  # makes a checkpoint whole
UNFINISHED = '.unfinished'  # an object that marks a directory while it is uploaded


@contextlib.contextmanager
def written_directory(place: AnyPath) -> Iterator[Path]:
    """The directory itself; for one in a bucket a temporary directory, uploaded when the block succeeds.

    Other programs read such a directory, so its files have their names in the bucket from the start. The object
    `.unfinished` says which process uploads; every other object is created, and never replaced. If the upload fails,
    what has been uploaded is removed. One file at a time is in memory.

    Raises:
        FileExistsError: there are objects in the bucket already, or another process uploads, or was killed while it
            did.
        OSError: the bucket cannot be written.
    """
    if isinstance(place, Path):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix='pretrax-') as temporary:
        local = Path(temporary) / (place.name or place.bucket)
        yield local
        with _marked(place) as created:
            for name in sorted(files_below(local), key=lambda name: (name.endswith(_LAST), name)):
                if not (place / name).create((local / name).read_bytes()):
                    raise _exists(place, 'another process writes it too')
                created.append(name)


@contextlib.contextmanager
def _marked(place: BucketPath) -> Iterator[list[str]]:
    """Marks a directory during its upload. Yields a list of what is created: a failing block removes it."""
    mark, own, created = place / UNFINISHED, secrets.token_hex(8).encode(), list[str]()
    if not mark.create(own):
        raise _exists(
            place, 'another process uploads it, or was killed while it did; if none does, remove what is there'
        )
    try:
        if place.files() != [UNFINISHED]:
            raise _exists(place, 'it is not empty')
        yield created
    except BaseException:
        with contextlib.suppress(OSError):  # the reason of the first error is likely that of the second
            if mark.read_version().content == own:  # so what is there was not created by another process
                place.unlink_below(created)
                _remove_mark(mark, own)
        raise
    _remove_mark(mark, own)


def _remove_mark(mark: BucketPath, own: bytes) -> None:
    content, version = mark.read_version()
    if content == own:
        mark.write_version(None, version)


def _exists(place: BucketPath, why: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, why, str(place))


@contextlib.contextmanager
def read_directory(place: AnyPath) -> Iterator[Path]:
    """The directory itself; for one in a bucket a temporary copy."""
    if isinstance(place, Path):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix='pretrax-') as temporary:
        local = Path(temporary) / (place.name or place.bucket)
        download(place, local)
        yield local


def download(place: BucketPath, local: Path) -> None:
    """Copies all objects below a prefix to a directory. Raises OSError."""
    for name in place.files():
        if '..' in name.split('/'):
            raise OSError(errno.EINVAL, f'the name of the object {name!r} leads outside of the directory')
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_bytes((place / name).read_bytes())


def files_below(directory: Path) -> list[str]:
    """The paths of all files below a directory, relative to it."""
    return [path.relative_to(directory).as_posix() for path in directory.rglob('*') if path.is_file()]
