"""Keeps blocks of tokens that were read from a bucket on a local disk, within a bound, for later epochs and restarts.

A file has the crc32 of its values, then the values. The least recently used files are removed. Processes of one machine
share the directory.
"""

import os
import shutil
import threading
import zlib
from pathlib import Path

import numpy as np

from pretrax.errors import Report
from pretrax.system.atomic import new_file
from pretrax.system.cache import cache_directory

_SMALLEST = 1 << 16  # bytes; smaller reads are not kept
_MARGIN = 2 << 30  # bytes that stay free on the disk
_HEADER = 4  # bytes


class BlockFiles:
    """A cache of ranges of arrays.

    Args:
        most: bytes to keep.
        directory: where; None: `tokens` in the cache directory of the user.
    """

    def __init__(self, most: int, report: Report, directory: Path | None = None):
        self._most, self._report = most, report
        self.directory = directory or cache_directory() / 'tokens'
        self._lock = threading.Lock()
        self._size: int | None = None  # None: not known yet
        self._failed = False

    def read(self, sha256: str, span: tuple[int, int], dtype: np.dtype) -> np.ndarray | None:
        """The values [start, stop) of the array with this digest; None: not kept, or their file is damaged."""
        path = self._path(sha256, span)
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        values = memoryview(content)[_HEADER:]
        n_bytes = (span[1] - span[0]) * dtype.itemsize
        if len(values) != n_bytes or zlib.crc32(values) != int.from_bytes(content[:_HEADER], 'little'):
            path.unlink(missing_ok=True)
            return None
        return np.frombuffer(values, dtype)

    def write(self, sha256: str, span: tuple[int, int], values: np.ndarray) -> None:
        """Keeps some values. A disk that cannot be written is reported once; the values are then read again."""
        if self._failed or not _SMALLEST <= values.nbytes <= self._most:
            return
        path, content = self._path(sha256, span), np.ascontiguousarray(values).data.cast('B')
        with self._lock:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._make_room(len(content) + _HEADER)
                with new_file(path) as file:
                    file.write(zlib.crc32(content).to_bytes(_HEADER, 'little'))
                    file.write(content)
            except OSError as error:
                self._failed = True
                self._report(f'tokens: nothing is kept in {self.directory}: {error.strerror or error}')

    def _path(self, sha256: str, span: tuple[int, int]) -> Path:
        return self.directory / sha256[:32] / f'{span[0]}-{span[1]}'

    def _make_room(self, n_bytes: int) -> None:
        """Removes the files that were used least recently, until the others and `n_bytes` are within the bound."""
        free = shutil.disk_usage(self.directory).free - _MARGIN
        if self._size is not None and self._size + n_bytes <= self._most and n_bytes <= free:
            self._size += n_bytes
            return
        found = sorted((entry.stat().st_mtime_ns, entry.stat().st_size, path) for path, entry in self._files())
        self._size = sum(size for _, size, _ in found) + n_bytes
        too_many = max(self._size - self._most, n_bytes - free)
        if too_many > 0:
            too_many += self._most // 10  # so that the next search is not soon
        for _, size, path in found:
            if too_many <= 0:
                break
            too_many -= size
            path.unlink(missing_ok=True)
            self._size -= size

    def _files(self) -> list[tuple[Path, os.DirEntry]]:
        return [
            (Path(entry.path), entry)
            for array in os.scandir(self.directory)
            if array.is_dir()
            for entry in os.scandir(array)
            if not entry.name.startswith('.')
        ]
