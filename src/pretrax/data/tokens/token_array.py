"""An array of flat-tokens on a disk or in a bucket, read with TensorStore."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorstore as ts

from pretrax.data.tokens.block_files import BlockFiles
from pretrax.errors import UnavailableError, UserError
from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.connection import BucketError, as_os_error, disk_error, kind_of_error
from pretrax.storage.settings import retry_seconds

# A bucket is asked for this many times as long as a request is repeated, 10 minutes by default. Then the run ends.
PATIENCE = 10
LARGEST_CHUNK = 1 << 30  # bytes
_PAUSE = 5.0  # seconds
# What TensorStore says of a file whose content is wrong. It also raises ValueError for a name or a request that it
# refuses.
_DAMAGE = re.compile(
    r'^(NOT_FOUND|DATA_LOSS)|is missing|[Bb]yte range|[Dd]igest|decompress|[Dd]ecod|Invalid JSON|corrupt|truncat'
)


class TokenArray:
    """A stored array of one dimension.

    Args:
        sha256: SHA-256 of its values.
        cache: keeps what is read from a bucket; None: nothing is kept.

    Attributes:
        length: number of values.
        shard_length: values per file.

    Raises:
        UserError: it is missing, damaged or of another type.
    """

    def __init__(self, path: AnyPath, dtype: str, sha256: str, cache: BlockFiles | None = None):
        self._path, self._dtype, self._sha256 = path, np.dtype(dtype), sha256
        self._cache = cache if isinstance(path, BucketPath) else None
        if not (path / 'zarr.json').is_file():
            raise damaged(path / 'zarr.json', 'missing')
        spec = {'driver': 'zarr3', 'fill_missing_data_reads': False}
        try:
            if isinstance(path, Path):
                spec['kvstore'] = {'driver': 'file', 'path': f'{path}/'}  # pyright: ignore[reportArgumentType]
                self._array = ts.open(spec, read=True).result()
            else:
                self._array = ts.open(spec, kvstore=path.kvstore('/'), read=True).result()
        except ValueError as error:
            raise _refusal(path, path / 'zarr.json', error) from None
        if self._array.rank != 1 or self._array.dtype.name != dtype:
            raise UserError(
                f'{path / "zarr.json"}: {self._array.dtype.name} of rank {self._array.rank}\n'
                f'  expected {dtype} of rank 1'
            )
        refuse_large_chunks(self._array, path / 'zarr.json')
        self.length = int(self._array.shape[0])
        shape = self._array.chunk_layout.write_chunk.shape
        assert shape  # a stored array has chunks
        self.shard_length = int(shape[0] or 0)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The values of each range [start, stop), read concurrently.

        A bucket that fails is asked again for `PATIENCE` times as long as each request is repeated.

        Raises:
            UserError: the data is damaged.
            UnavailableError: the bucket does not answer.
        """
        if self._cache is None:
            return self._fetch(ranges)
        found = [self._cache.read(self._sha256, span, self._dtype) for span in ranges]
        missing = [number for number, values in enumerate(found) if values is None]
        for number, values in zip(missing, self._fetch([ranges[number] for number in missing]), strict=True):
            self._cache.write(self._sha256, ranges[number], values)
            found[number] = values
        return [values for values in found if values is not None]

    def _fetch(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        if not ranges:
            return []
        began = time.monotonic()
        while True:
            batch = ts.Batch()  # reads neighboring chunks of a file with one request
            reads = [self._array[start:stop].read(batch=batch) for start, stop in ranges]
            batch.submit()
            try:
                return [read.result() for read in reads]
            except ValueError as error:
                refused = _refusal(self._path, None, error)
                is_late = time.monotonic() - began > PATIENCE * retry_seconds()
                if not isinstance(refused, UnavailableError) or is_late:
                    raise refused from None
            time.sleep(min(_PAUSE, retry_seconds()))


def refuse_large_chunks(array: ts.TensorStore, file: AnyPath) -> None:
    """Raises UserError if a chunk of an array, or the index of a shard, would take more than LARGEST_CHUNK bytes.

    Its metadata may claim any size, and TensorStore ends the process if memory does not hold it.
    """
    layout = array.chunk_layout
    chunk, shard = ((shape or [1])[0] or 1 for shape in (layout.read_chunk.shape, layout.write_chunk.shape))
    n_bytes = max(chunk * array.dtype.numpy_dtype.itemsize, 16 * shard // chunk)
    if n_bytes > LARGEST_CHUNK:
        raise UserError(
            f'{file}: chunks of {n_bytes:,} bytes\n'
            f'  expected at most {LARGEST_CHUNK >> 20:,} MiB: write the tokens again with smaller chunks'
        )


def damaged(path: AnyPath | str, reason: str) -> UserError:
    """The error for a file whose content cannot be right."""
    return UserError(
        f'{path}: damaged token file: {reason}\n'
        '  restore the file from a copy, or tokenize the text into another directory'
    )


def unreadable(path: AnyPath | str, error: OSError) -> UserError:
    """The error for a file that may be whole, but cannot be read."""
    if '://' in str(path):
        return kind_of_error(error)(
            f'{path}: cannot be read: {error.strerror}\n  the tokens may be whole: check the network, the credentials '
            'and the endpoint'
        )
    return UserError(f'{path}: cannot be read: {error.strerror or error}\n  the tokens may be whole: keep them')


def _refusal(array: AnyPath, file: AnyPath | None, error: ValueError) -> UserError:
    """The error for what TensorStore reports; it raises ValueError for all reasons.

    Args:
        file: the file that was read; None: the error names it.
    """
    said = str(error).split(' [')[0]
    if isinstance(array, BucketPath):
        keys = re.findall(r'([^\s":]*/c/\d+)', said)
        path = file or (array / f'c/{keys[-1].rpartition("/")[2]}' if keys else array)
        found = as_os_error(error, str(path))
        is_temporary = isinstance(found, BucketError) and found.is_temporary
        if is_temporary or '[http_' in str(error) or '[curl_' in str(error):
            return unreadable(str(path), found)
        reason = 'missing' if said.startswith('NOT_FOUND') else re.split(r'/c/\d+"?: ', said)[-1]
        return damaged(path, reason) if _DAMAGE.search(said) else unreadable(str(path), found)
    # '... Error reading shard index in local file "/x/c/1": Digest mismatch, ...'
    found = re.findall(r'local file "([^"]*)"(?:: | is )(.*)', said)
    path, reason = (file, said) if file is not None else found[-1] if found else (array, said)
    if failed := disk_error(str(error)):
        return unreadable(path, failed)
    return damaged(path, reason) if _DAMAGE.search(said) else unreadable(path, OSError(0, reason))
