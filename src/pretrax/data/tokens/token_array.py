"""An array of flat-tokens on a disk or in a bucket."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pretrax.data.tokens.block_files import BlockFiles
from pretrax.data.tokens.zarr_shards import OtherArrayError, Shards
from pretrax.errors import UnavailableError, UserError
from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.connection import kind_of_error, retry_seconds

# A bucket is asked for this many times as long as a request is repeated, 10 minutes by default. Then the run ends.
PATIENCE = 10
LARGEST_CHUNK = 1 << 30  # bytes
_PAUSE = 5.0  # seconds
_LONGEST_SPAN = 1 << 24  # bytes that are read at once
_REQUESTS = 32  # to a bucket at once
_INDICES = 256  # of shards, kept in memory: 16 KB each


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
        with file_errors(path / 'zarr.json'):
            self._shards = shards = Shards.parse((path / 'zarr.json').read_bytes())
        if shards.dtype != self._dtype:
            raise UserError(f'{path / "zarr.json"}: {shards.dtype.name}\n  expected {dtype}')
        refuse_large_chunks(max(shards.chunk_size, shards.index_size), path / 'zarr.json')
        self.length, self.shard_length = shards.length, shards.shard
        self._index = functools.lru_cache(_INDICES)(self._read_index)

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The values of each range [start, stop), read concurrently from a bucket.

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
        began = time.monotonic()
        while True:
            try:
                return self._read_chunks(ranges)
            except UnavailableError:
                if time.monotonic() - began > PATIENCE * retry_seconds():
                    raise
            time.sleep(min(_PAUSE, retry_seconds()))

    def _read_chunks(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        size = self._shards.chunk
        wanted: dict[int, list[int]] = {}  # chunk -> the ranges that need it
        for number, (start, stop) in enumerate(ranges):
            if not 0 <= start <= stop <= self.length:
                raise damaged(self._path, f'values {start:,} to {stop:,} of {self.length:,} are wanted')
            for chunk in range(start // size, -(-stop // size)):
                wanted.setdefault(chunk, []).append(number)
        results = [np.empty(stop - start, self._dtype) for start, stop in ranges]

        def read(span: _Span) -> None:
            for chunk, values in self._read_span(span):
                first = chunk * size
                for number in wanted[chunk]:
                    begin, end = ranges[number]
                    start, stop = max(begin, first), min(end, first + size)
                    results[number][start - begin : stop - begin] = values[start - first : stop - first]

        with contextlib.ExitStack() as stack:
            each: Callable[..., Iterable[object]] = map
            if not isinstance(self._path, Path):
                each = stack.enter_context(concurrent.futures.ThreadPoolExecutor(_REQUESTS)).map
            n_chunks = self.shard_length // size
            list(each(self._index, sorted({chunk // n_chunks for chunk in wanted})))
            list(each(read, self._spans(sorted(wanted))))
        return results

    def _spans(self, chunks: Sequence[int]) -> list['_Span']:
        """Where these chunks are in their files; those that follow one another are one span."""
        spans: list[_Span] = []
        for chunk in chunks:
            shard, number = divmod(chunk, self.shard_length // self._shards.chunk)
            entry = self._index(shard)[number]
            if entry is None:
                raise damaged(self._path / f'c/{shard}', f'chunk {number} is missing')
            start, stop = entry
            if (
                spans
                and (spans[-1].shard, spans[-1].stop) == (shard, start)
                and stop - spans[-1].start <= _LONGEST_SPAN
            ):
                spans[-1].stop = stop
                spans[-1].chunks.append((chunk, start, stop))
            else:
                spans.append(_Span(shard, start, stop, [(chunk, start, stop)]))
        return spans

    def _read_span(self, span: '_Span') -> Iterator[tuple[int, np.ndarray]]:
        file = self._path / f'c/{span.shard}'
        with file_errors(file):
            content = _read_range(file, span.start, span.stop)
            for chunk, start, stop in span.chunks:
                yield chunk, self._shards.decode(content[start - span.start : stop - span.start])

    def _read_index(self, shard: int) -> list[tuple[int, int] | None]:
        file = self._path / f'c/{shard}'
        with file_errors(file):
            return self._shards.index(_read_range(file, -self._shards.index_size, None))


@dataclasses.dataclass
class _Span:
    """Chunks that follow one another in a shard, each with the bytes where it starts and stops."""

    shard: int
    start: int
    stop: int
    chunks: list[tuple[int, int, int]]


def _read_range(file: AnyPath, start: int, stop: int | None) -> bytes:
    """The bytes [start, stop) of a file; a negative `start` counts from its end. Fewer if it has fewer."""
    if isinstance(file, BucketPath):
        return file.read_range(start, stop)
    with file.open('rb', buffering=0) as stream:
        stream.seek(start if start >= 0 else max(0, file.stat().st_size + start))
        return stream.read(-1 if stop is None else stop - start)


@contextlib.contextmanager
def file_errors(file: AnyPath) -> Iterator[None]:
    """Turns an error of reading a file into a UserError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise damaged(file, 'missing') from None
    except OSError as error:
        raise unreadable(file, error) from None
    except OtherArrayError as error:  # of a newer version, or of another program
        raise unreadable(file, OSError(0, str(error))) from None
    except ValueError as error:
        raise damaged(file, str(error)) from None


def refuse_large_chunks(n_bytes: int, file: AnyPath) -> None:
    """Raises UserError if a chunk of an array, or the index of a shard, takes more than LARGEST_CHUNK bytes.

    Its metadata may claim any size.
    """
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
