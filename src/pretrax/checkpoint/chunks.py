"""Reads the files of one array of a checkpoint straight into the arrays that need them. Imports no JAX.

An array is a directory with `.zarray` (zarr v2, uncompressed) and one row-major file per chunk.
"""

import dataclasses
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

from pretrax.checkpoint.files import REQUEST, File, Files, Place, open_file, read_file
from pretrax.checkpoint.manifest import STATE, Array, Manifest, damaged
from pretrax.system.digest import BLOCK
from pretrax.system.json_file import parse_json

type Index = tuple[tuple[int, int], ...]  # start and stop along each dimension


@dataclasses.dataclass
class Chunks:
    """The files of an array."""

    place: Place
    manifest: Manifest
    name: str

    def __post_init__(self):
        self.folder = f'{STATE}/{self.name}'
        try:
            content = parse_json(check_file(self.place, self.manifest, f'{self.folder}/.zarray'))
            said = Array(shape=content['shape'], dtype=content['dtype'])
            chunk = Array(shape=content['chunks'], dtype=content['dtype']).shape
            self.dtype = np.dtype(ml_dtypes.bfloat16 if said.dtype == 'bfloat16' else said.dtype)
            self.counts = [-(-size // step) for size, step in zip(said.shape, chunk, strict=True)]
            is_plain = content['compressor'] is None and not content.get('filters') and content['order'] == 'C'
            self.separator = content.get('dimension_separator', '.')
            # The manifest of a piece does not list the files of the others.
            are_too_many = not isinstance(self.place, Files) and math.prod(self.counts) > len(self.manifest.files)
            if not is_plain or self.dtype.hasobject or are_too_many or self.separator not in ('.', '/'):
                raise ValueError('it is not an array as pretrax writes one')
            if said.shape != self.manifest.arrays[self.name].shape:
                raise ValueError(f'the shape {list(said.shape)} is not that of the manifest')
        except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
            reason = ' '.join(str(error).split())[:200]
            raise damaged(self.place, f'{self.folder}/.zarray: {reason}') from error
        self.shape, self.chunk = said.shape, chunk

    def __iter__(self) -> Iterator[tuple[str, Index]]:
        """Yields each file with the part of the array it holds. At the edges a chunk may extend beyond the array."""
        for at in itertools.product(*map(range, self.counts)):
            file = self.separator.join(map(str, at)) or '0'
            place = tuple((i * step, (i + 1) * step) for i, step in zip(at, self.chunk, strict=True))
            yield f'{self.folder}/{file}', place

    def overlapping(self, index: Index) -> Iterator[tuple[str, Index]]:
        """The files that overlap a part of the array."""
        return ((file, at) for file, at in self if overlap(index, at) is not None)

    def read(self, file: str, at: Index, targets: list[tuple[Index, np.ndarray]], compare: bool) -> None:
        """Reads a chunk into the target arrays that it overlaps, and checks its digest if `compare` is set."""
        entry = _entry(self.place, self.manifest, file)
        expected = math.prod(self.chunk) * self.dtype.itemsize
        if entry.size != expected:
            raise damaged(self.place, f'{file} has {entry.size} bytes, not {expected}')
        total = xxhash.xxh3_128()
        with open_file(self.place, file, entry, REQUEST if compare else BLOCK) as stream:
            for block in _blocks(at, self.dtype.itemsize):
                wanted = [(index, array) for index, array in targets if overlap(index, block) is not None]
                size = math.prod(stop - start for start, stop in block) * self.dtype.itemsize
                if not wanted and not compare:
                    stream.seek(size, 1)
                    continue
                into = next((part for t in wanted if (part := self._whole(t, block)) is not None), None)
                content = _scratch(size) if into is None else into
                for first in range(0, size, BLOCK):
                    part = content[first : first + BLOCK]
                    _fill(part, stream, self.place, file)
                    if compare:
                        total.update(part)
                values = np.frombuffer(content, self.dtype).reshape([stop - start for start, stop in block])
                for index, array in wanted:
                    both = overlap(index, block)
                    assert both is not None
                    if not np.may_share_memory(array, values):
                        array[within(both, index)] = values[within(both, block)]
            if stream.read(1):
                raise damaged(self.place, f'{file} does not have {entry.size} bytes')
        if compare and total.hexdigest() != entry.xxh3:
            raise damaged(self.place, f'{file} differs from what was written')

    def whole(self, file: str) -> np.ndarray:
        """Reads a chunk into new memory, and checks its digest."""
        return np.frombuffer(check_file(self.place, self.manifest, file), self.dtype).reshape(self.chunk)

    def _whole(self, target: tuple[Index, np.ndarray], block: Index) -> memoryview | None:
        """The memory of a target that holds the whole block contiguously, as in the file; None if there is none."""
        index, array = target
        if overlap(index, block) != block or array.dtype != self.dtype:
            return None
        part = array[within(block, index)]
        return memoryview(part.reshape(-1).view(np.uint8)) if part.flags.c_contiguous else None


def _blocks(at: Index, itemsize: int) -> Iterator[Index]:
    """Splits a chunk into blocks of about `BLOCK` bytes that are contiguous in its file."""
    lengths = [stop - start for start, stop in at]
    axis = next((i for i, length in enumerate(lengths) if length > 1), None)
    if axis is None:
        yield at
        return
    start, stop = at[axis]
    rows = max(1, BLOCK // (itemsize * math.prod(lengths[axis + 1 :])))
    for first in range(start, stop, rows):
        yield (*at[:axis], (first, min(first + rows, stop)), *at[axis + 1 :])


def bounds(index: Sequence[slice], shape: Sequence[int]) -> Index:
    """The part of an array of this shape that slices select."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def overlap(one: Index, other: Index) -> Index | None:
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def within(part: Index, whole: Index) -> tuple[Any, ...]:
    slices = (slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, whole, strict=True))
    return (*slices, ...)  # the ellipsis keeps a view of a 0-d array


_own = threading.local()


def _scratch(size: int) -> memoryview:
    """A buffer that this thread reuses: allocating fresh memory costs more than reading into it."""
    if len(getattr(_own, 'memory', b'')) < size:
        _own.memory = bytearray(size)
    return memoryview(_own.memory)[:size]


def _fill(content: memoryview, stream: Any, place: Place, file: str) -> None:
    done = 0
    while done < len(content):
        n = stream.readinto(content[done:])
        if not n:
            raise damaged(place, f'{file} is truncated')
        done += n


def _entry(place: Place, manifest: Manifest, file: str) -> File:
    if file not in manifest.files:
        raise damaged(place, f'its manifest does not list {file}')
    return manifest.files[file]


def check_file(place: Place, manifest: Manifest, file: str) -> bytes:
    """Reads a small file and checks its digest."""
    entry = _entry(place, manifest, file)
    content = read_file(place, file, entry)
    if xxhash.xxh3_128_hexdigest(content) != entry.xxh3:
        raise damaged(place, f'{file} differs from what was written')
    return content
