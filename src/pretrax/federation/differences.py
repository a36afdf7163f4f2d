"""Reads and writes the numbers of weights as chunk objects in a directory or a bucket: differences and anchors.

    PREFIX/PROCESS/index.json        the grid of each array, and the chunks in each object with their digests
    PREFIX/PROCESS/0, 1, ...         encoded chunks, one after another

Each process writes the parts that it owns, and any process of any other mesh reads the chunks that overlap its parts.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import numpy as np
import pydantic
import xxhash

from pretrax.checkpoint.chunks import Index, overlap, within
from pretrax.errors import UserError
from pretrax.federation.encoding import Encoding, NotFiniteError, decode, encode, encoded_size
from pretrax.federation.host_weights import Cuts, HostWeights, cells, refined
from pretrax.federation.objects import Digest, ObjectError, Piece, Stored
from pretrax.federation.outer import add_weighted
from pretrax.storage import BucketPath
from pretrax.storage.shared_path import ConditionalPath

_CHUNK = 1 << 20  # numbers of a chunk at most; they stay in the cache while they are encoded
_OBJECT = 32 << 20  # bytes of an object at most, unless a chunk is larger
_THREADS = 8


class _Listing(Stored):
    """An index. Attributes: the grids of arrays, by name; of each object, the digests of its chunks, 'NAME/CELL'."""

    largest: ClassVar[int] = 128 << 20

    encoding: Encoding
    arrays: dict[str, tuple[tuple[Annotated[int, pydantic.Field(ge=0, le=1 << 52)], ...], ...]]
    objects: list[dict[str, Digest]]


class DamagedPiecesError(UserError):
    """Chunks are missing, damaged, incomplete or not finite. The message names their author and the object."""


class Written(NamedTuple):
    """What this process has written: its index, and the bytes of all objects."""

    piece: Piece
    size: int


def write(
    place: ConditionalPath, prefix: str, weights: HostWeights, encoding: Encoding, residual: HostWeights | None = None
) -> Written:
    """Encodes and writes the parts that this process owns, in parallel. All processes call it with the same prefix.

    Args:
        prefix: of another name for each attempt: objects are never replaced by others.
        residual: gets what the encoding loses, of all parts, whether this process owns them or not.

    Raises:
        NotFiniteError: a number is not finite. The message names its array.
        OSError: a write failed. The weights are as they were, and may be written again.
    """
    chunks = {name: refined(array, _bounded(array.cuts, _CHUNK)) for name, array in weights.items()}
    left = None if residual is None else {name: refined(residual[name], chunks[name].cuts) for name in chunks}
    cut = [(name, cell) for name, array in chunks.items() for cell in sorted(array.parts)]
    folder = f'{prefix}/{jax.process_index()}'

    def content(name: str, cell: Index) -> np.ndarray:
        try:
            encoded, lost = encode(chunks[name].parts[cell], encoding)
        except NotFiniteError as error:
            raise NotFiniteError(f'{name}: {error}') from None
        if left is not None:
            left[name].parts[cell][...] = 0 if lost is None else lost
        return encoded

    def write_object(number: int, keys: Sequence[tuple[str, Index]]) -> dict[str, str]:
        contents = [content(*key) for key in keys]
        (place / f'{folder}/{number}').write_bytes(b''.join(contents))
        return {
            _key(name, chunks[name].cuts, cell): xxhash.xxh3_128_hexdigest(encoded)
            for (name, cell), encoded in zip(keys, contents, strict=True)
        }

    own = [(name, cell) for name, cell in cut if cell in chunks[name].own]
    others = [(name, cell) for name, cell in cut if cell not in chunks[name].own and left is not None]
    objects = list(_grouped(own, lambda key: encoded_size(_volume(key[1]), encoding)))
    with ThreadPoolExecutor(_THREADS, 'write') as pool:
        writes = [pool.submit(write_object, number, keys) for number, keys in enumerate(objects)]
        encodings = [pool.submit(content, *key) for key in others]
        try:
            listed = [write.result() for write in writes]
            for one in encodings:
                one.result()
        finally:
            pool.shutdown(cancel_futures=True)
    listing = _Listing(encoding=encoding, arrays={name: a.cuts for name, a in chunks.items()}, objects=listed)
    index = listing.content()
    (place / f'{folder}/index.json').write_bytes(index)
    piece = Piece(object=f'{folder}/index.json', size=len(index), xxh3=xxhash.xxh3_128_hexdigest(index))
    size = len(index) + sum(encoded_size(_volume(cell), encoding) for _, cell in own)
    return Written(piece=piece, size=size)


def add(
    place: ConditionalPath, pieces: Sequence[Piece], totals: HostWeights, author: str, weight: float | np.float32 = 1.0
) -> int:
    """totals += weight * (the numbers that an author has written), in place and in parallel.

    Args:
        pieces: of all processes of the author.
        author: for errors, such as "the difference of island 'b' in round 7".

    Returns:
        The bytes read.

    Raises:
        DamagedPiecesError: a chunk is missing, damaged or not finite. Some totals have changed.
        OSError: the place is out of reach. Some totals may have changed.
    """
    return _read(place, pieces, totals, author, lambda total, values: add_weighted(total, np.float32(weight), values))


def read(place: ConditionalPath, pieces: Sequence[Piece], targets: HostWeights, author: str) -> int:
    """Replaces the targets by the numbers that an author has written. As `add`."""
    return _read(place, pieces, targets, author, np.copyto)


def check(place: ConditionalPath, pieces: Sequence[Piece], like: HostWeights, author: str) -> int:
    """Reads what `add` would read, and raises the same errors. As `add`."""
    return _read(place, pieces, like, author, lambda target, values: None)


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A chunk in an object that this process has to read."""

    name: str
    cell: Index
    offset: int
    size: int
    xxh3: str


def _read(
    place: ConditionalPath,
    pieces: Sequence[Piece],
    targets: HostWeights,
    author: str,
    use: Callable[[np.ndarray, np.ndarray], object],
) -> int:
    reader = _Reader(place, pieces, targets, author, use)
    ranges = reader.find()
    with ThreadPoolExecutor(_THREADS, 'read') as pool:
        reads = [pool.submit(reader.read, *one) for one in ranges]
        try:
            return reader.size + sum(read.result() for read in reads)
        finally:
            pool.shutdown(cancel_futures=True)


class _Reader:
    """Finds and reads the chunks that overlap the targets."""

    def __init__(
        self, place: ConditionalPath, pieces: Sequence[Piece], targets: HostWeights, author: str, use: Callable
    ):
        self._place, self._pieces, self._targets, self._author, self._use = place, pieces, targets, author, use
        self.size = 0  # bytes of the indices
        self._encoding: Encoding = 'f32'

    def find(self) -> list[tuple[ConditionalPath, list[_Chunk]]]:
        """The chunks to read, in ranges of objects. Indices are read until all chunks are found."""
        first = jax.process_index() % max(1, len(self._pieces))  # on the same mesh, it has most of what is needed
        arrays: Mapping[str, Cuts] | None = None
        missing: dict[str, tuple[str, Index]] = {}
        ranges = []
        for piece in (*self._pieces[first:], *self._pieces[:first]):
            listing = self._listing(piece)
            if arrays is None:
                arrays, self._encoding = listing.arrays, listing.encoding
                missing = self._needed(piece, arrays)
            if listing.arrays != arrays or listing.encoding != self._encoding:
                raise self._damaged(piece.object, 'its arrays are not those of the other processes')
            folder = self._place / piece.object.rpartition('/')[0]
            for number, digests in enumerate(listing.objects):
                found = [chunk for key, chunk in self._chunks(digests, arrays) if missing.pop(key, None)]
                ranges += [(folder / str(number), run) for run in _adjacent(found)]
            if not missing:
                return ranges
        raise self._damaged(next(iter(missing)) if missing else 'it', 'no process has written it')

    def read(self, path: ConditionalPath, chunks: list[_Chunk]) -> int:
        """Reads adjacent chunks of an object. Returns their bytes."""
        start, stop = chunks[0].offset, chunks[-1].offset + chunks[-1].size
        try:
            content = memoryview(_read_range(path, start, stop))
        except FileNotFoundError:
            raise self._damaged(str(path), 'it is missing') from None
        for chunk in chunks:
            encoded = content[chunk.offset - start :][: chunk.size]
            if len(encoded) != chunk.size:
                raise self._damaged(str(path), 'it is truncated')
            if xxhash.xxh3_128_hexdigest(encoded) != chunk.xxh3:
                raise self._damaged(str(path), f'{chunk.name} differs from what was written')
            try:
                values = decode(encoded, self._encoding, _volume(chunk.cell))
            except NotFiniteError as error:
                raise self._damaged(str(path), f'{chunk.name}: {error}') from None
            values = values.reshape([stop - start for start, stop in chunk.cell])
            for index, target in self._targets[chunk.name].parts.items():
                if (both := overlap(index, chunk.cell)) is not None:
                    self._use(target[within(both, index)], values[within(both, chunk.cell)])
        return stop - start

    def _listing(self, piece: Piece) -> _Listing:
        try:
            content = (self._place / piece.object).read_bytes()
        except FileNotFoundError:
            raise self._damaged(piece.object, 'it is missing') from None
        self.size += len(content)
        if xxhash.xxh3_128_hexdigest(content) != piece.xxh3:
            raise self._damaged(piece.object, 'it differs from what was written')
        try:
            return _Listing.parse(content, self._place / piece.object)
        except ObjectError as error:
            raise self._damaged(piece.object, str(error)) from None

    def _needed(self, piece: Piece, arrays: Mapping[str, Cuts]) -> dict[str, tuple[str, Index]]:
        """The chunks that overlap the targets, by key."""
        needed = {}
        for name, target in self._targets.items():
            cuts = arrays.get(name)
            if cuts is None:
                raise self._damaged(piece.object, f'{name} is not in it')
            shape = [places[-1:] for places in cuts]
            grows = all(
                places[0] == 0 and all(a < b for a, b in itertools.pairwise(places)) for places in cuts if places
            )
            if shape != [(n,) for n in target.shape] or not (grows or 0 in target.shape):
                raise self._damaged(piece.object, f'{name} has another shape')
            for index in target.parts:
                needed |= {_key(name, cuts, cell): (name, cell) for cell in cells(cuts, index)}
        return needed

    def _chunks(self, digests: Mapping[str, str], arrays: Mapping[str, Cuts]) -> Iterator[tuple[str, _Chunk]]:
        """The chunks of an object, in their order."""
        offset = 0
        for key, digest in digests.items():
            name, _, at = key.rpartition('/')
            try:
                numbers = [int(number) for number in at.split('.') if at]
                cell = tuple((places[i], places[i + 1]) for i, places in zip(numbers, arrays[name], strict=True))
            except (ValueError, IndexError, KeyError):
                raise self._damaged(key, 'the arrays have no such chunk') from None
            size = encoded_size(_volume(cell), self._encoding)
            yield key, _Chunk(name, cell, offset, size, digest)
            offset += size

    def _damaged(self, what: str, reason: str) -> DamagedPiecesError:
        return DamagedPiecesError(f'{self._author} cannot be used: {what}: {reason}')


def _bounded(cuts: Cuts, largest: int) -> Cuts:
    """The grid with cells of at most `largest` numbers. The first dimensions are cut first: chunks stay contiguous."""
    finer = list(cuts)
    longest = [max((b - a for a, b in itertools.pairwise(places)), default=1) for places in cuts]
    for dimension, places in enumerate(cuts):
        inner = math.prod(longest[dimension + 1 :])
        rows = max(1, largest // max(1, inner))
        extra = (i for a, b in itertools.pairwise(places) for i in range(a, b, rows))
        finer[dimension] = tuple(sorted({*places, *extra})) if rows < longest[dimension] else places
        if inner <= largest:
            break
    return tuple(finer)


def _key(name: str, cuts: Cuts, cell: Index) -> str:
    """The name of a chunk: its array, and the number of its cell along each dimension."""
    at = (bisect.bisect_left(places, start) for places, (start, _) in zip(cuts, cell, strict=True))
    return f'{name}/{".".join(map(str, at))}'


def _volume(cell: Index) -> int:
    return math.prod(stop - start for start, stop in cell)


def _grouped(keys: Sequence[Any], size: Callable[[Any], int]) -> Iterator[list[Any]]:
    """The keys in groups of at most `_OBJECT` bytes."""
    group, total = [], 0
    for key in keys:
        if group and total + size(key) > _OBJECT:
            yield group
            group, total = [], 0
        group.append(key)
        total += size(key)
    if group:
        yield group


def _adjacent(chunks: Sequence[_Chunk]) -> Iterator[list[_Chunk]]:
    """The chunks of an object in runs that one request reads."""
    run: list[_Chunk] = []
    for chunk in chunks:
        if run and run[-1].offset + run[-1].size != chunk.offset:
            yield run
            run = []
        run.append(chunk)
    if run:
        yield run


def _read_range(path: ConditionalPath, start: int, stop: int) -> bytes:
    if isinstance(path, BucketPath):
        return path.read_range(start, stop)
    with path.open('rb', buffering=0) as stream:
        stream.seek(start)
        return stream.read(stop - start) or b''
