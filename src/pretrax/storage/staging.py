"""Directories that are written or read on a disk, and kept in a bucket."""

import contextlib
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pretrax.storage.bucket_path import BucketPath
from pretrax.storage.locate import AnyPath

_LAST = 'manifest.json'  # makes a checkpoint, or a part of a prepared teacher, whole


@contextlib.contextmanager
def written_directory(place: AnyPath) -> Iterator[Path]:
    """The directory itself; for one in a bucket a temporary directory, uploaded when the block succeeds.

    If the upload fails, what has been uploaded is removed. One file at a time is in memory.
    """
    if isinstance(place, Path):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix='pretrax-') as temporary:
        local = Path(temporary) / (place.name or place.bucket)
        yield local
        try:
            upload(local, place)
        except BaseException:
            with contextlib.suppress(OSError):  # the reason of the first error is likely that of the second
                place.remove_tree()
            raise


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


def upload(local: Path, place: BucketPath) -> None:
    """Copies the files of a directory below a prefix, what makes it whole last. Raises OSError."""
    files = [path.relative_to(local).as_posix() for path in local.rglob('*') if path.is_file()]
    for name in sorted(files, key=lambda name: (name.endswith(_LAST), name)):
        (place / name).write_bytes((local / name).read_bytes())
