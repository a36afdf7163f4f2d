"""A file in a directory that several machines share, with the conditional writes of `BucketPath`.

A file is created by a link to a file that is whole, which fails if the name exists, also on a file server. It is
replaced under a lock that the operating system releases when its process ends.
"""

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Buffer, Iterator
from pathlib import Path

import xxhash

from pretrax.storage.bucket_path import BucketPath, Versioned, has_content, too_large
from pretrax.storage.locate import AnyPath, locate
from pretrax.system.atomic import write_file
from pretrax.system.locks import lock

_MISSING = b'missing'
_LONGEST_WAIT = 10.0  # seconds for the lock, which is held for one write


class SharedPath(Path):
    """A path on a disk whose writes are atomic, and conditional where `BucketPath` has a condition.

    The directory of a file is made when the file is written. Every method raises OSError.
    """

    def read_version(self, largest: int | None = None) -> Versioned:
        """The content and the version of the file; the version of a file that does not exist is valid too.

        Raises OSError with EFBIG if it has more than `largest` bytes.
        """
        try:
            if largest is not None and self.stat().st_size > largest:
                raise too_large(self, largest)
            content = self.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return Versioned(None, _MISSING)
        return Versioned(content, xxhash.xxh3_128_digest(content))

    def write_bytes(self, data: Buffer) -> int:
        """Writes the whole file, or leaves the old one. Returns its size."""
        self.parent.mkdir(parents=True, exist_ok=True)
        write_file(self, bytes(data), sync=True)
        return memoryview(data).nbytes

    def write_version(self, content: bytes | None, expected: bytes) -> bytes | None:
        """Writes the file, or deletes it if `content` is None, unless it has another version than `expected`.

        Returns:
            The new version; None if the file has another version, and nothing was written.
        """
        self.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if self.read_version().version != expected:
                return None
            if content is None:
                self.unlink(missing_ok=True)
            else:
                self.write_bytes(content)
            return self.read_version().version

    def create(self, content: bytes) -> bool:
        """Writes the file unless it exists. Returns whether it has this content now."""
        self.parent.mkdir(parents=True, exist_ok=True)
        whole = self.with_name(f'.{self.name}.new-{secrets.token_hex(8)}')
        try:
            whole.write_bytes(content)
            os.link(whole, self)
        except FileExistsError:
            return has_content(self, content)
        finally:
            whole.unlink(missing_ok=True)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        end = time.monotonic() + _LONGEST_WAIT
        with self.with_name(f'.{self.name}.lock').open('ab') as file:
            while True:
                try:
                    lock(file)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        reason = 'another process has its lock'
                        raise BlockingIOError(errno.EWOULDBLOCK, reason, str(self)) from None
                    time.sleep(0.02)
            yield


type ConditionalPath = BucketPath | SharedPath


def shared(path: AnyPath) -> ConditionalPath:
    """A path with the conditional writes that a federation needs."""
    return path if isinstance(path, BucketPath) else SharedPath(path.absolute())


def locate_shared(text: str) -> ConditionalPath:
    """The path of a text, as `locate`, whose files are written under conditions. Raises UserError as it does."""
    return shared(locate(text))


def delete(path: ConditionalPath) -> None:
    """Deletes a file, if there is one, and the directories above it that are empty now. Raises OSError."""
    path.unlink(missing_ok=True)
    if isinstance(path, SharedPath):
        with contextlib.suppress(OSError):  # the first directory with other files
            for directory in path.parents:
                directory.rmdir()
