"""Reads and writes the numbers of weights as chunk objects in a directory or a bucket: differences and anchors.

    PREFIX/PROCESS/index.json        the grid of each array, and the chunks in each object with their digests
    PREFIX/PROCESS/0, 1, ...         encoded chunks, one after another

Each process writes the parts that it owns, and any process of any other mesh reads the chunks that overlap its parts.
"""

import bisect
import collections
import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, ClassVar, NamedTuple

import jax
import numpy as np
import pydantic
import xxhash

from pretrax.checkpoint.chunks import Index, overlap, within
from pretrax.checkpoint.files import read_range
from pretrax.errors import UserError
from pretrax.federation.encoding import Encoding, NotFiniteError, decode, encode, encoded_size
from pretrax.federation.host_weights import Cuts, HostWeights, cells, in_parallel, refined
from pretrax.federation.objects import Digest, ObjectError, Piece, Stored
from pretrax.federation.outer import add_weighted
from pretrax.storage.shared_path import ConditionalPath

_CHUNK = 1 << 20  # numbers of a chunk at most; they stay in the cache while they are encoded
_LARGEST = 1 << 26  # numbers of a chunk that is read
_OBJECT = 32 << 20  # bytes of an object, and of a request

type _Use = Callable[[np.ndarray, np.ndarray], object]  # of a part of the targets, and of the numbers for it


class DamagedPiecesError(UserError):
    """Chunks are missing, damaged, incomplete or not finite. The message names their author and the object."""


class _Listing(Stored):
    """An index. Attributes: the grids of arrays, by name; of each object, the digests of its chunks, 'NAME/CELL'."""

    largest: ClassVar[int] = 128 << 20

    encoding: Encoding
    arrays: dict[str, tuple[tuple[Annotated[int, pydantic.Field(ge=0, le=1 << 52)], ...], ...]]
    objects: list[dict[str, Digest]]


class Written(NamedTuple):
    """The index that this process has written, and the bytes of all its objects."""

    piece: Piece
    size: int


class _Chunk(NamedTuple):
    """A chunk in an object, from byte `start` to `stop`: a cell of the grid of an array."""

    key: str
    name: str
    cell: Index
    start: int
    stop: int
    xxh3: str


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
    chunks = {name: refined(array, _bounded(array.cuts)) for name, array in weights.items()}
    left = {name: refined(array, chunks[name].cuts).parts for name, array in (residual or {}).items()}
    folder = f'{prefix}/{jax.process_index()}'

    def content(name: str, cell: Index) -> np.ndarray:
        try:
            encoded, lost = encode(chunks[name].parts[cell], encoding)
        except NotFiniteError as error:
            raise NotFiniteError(f'{name}: {error}') from None
        if left:
            left[name][cell][...] = 0 if lost is None else lost
        return encoded

    def write_object(number: int, keys: Sequence[tuple[str, Index]]) -> dict[str, str]:
        contents = [content(*key) for key in keys]
        (place / f'{folder}/{number}').write_bytes(b''.join(contents))
        names = (_key(name, chunks[name].cuts, cell) for name, cell in keys)
        return dict(zip(names, map(xxhash.xxh3_128_hexdigest, contents), strict=True))

    keys = [(name, cell) for name, array in chunks.items() for cell in sorted(array.parts)]
    own = [(name, cell) for name, cell in keys if cell in chunks[name].own]
    ends = itertools.accumulate(encoded_size(_volume(cell), encoding) for _, cell in own)
    numbered = zip((end // _OBJECT for end in ends), own, strict=True)
    objects = [[key for _, key in group] for _, group in itertools.groupby(numbered, lambda one: one[0])]
    calls: list[tuple] = [(write_object, number, some) for number, some in enumerate(objects)]
    if left:
        calls += [(content, *key) for key in set(keys).difference(own)]
    listed = in_parallel(calls)[: len(objects)]
    grids = {name: array.cuts for name, array in chunks.items()}
    index = _Listing(encoding=encoding, arrays=grids, objects=listed).content()
    (place / f'{folder}/index.json').write_bytes(index)
    piece = Piece(object=f'{folder}/index.json', size=len(index), xxh3=xxhash.xxh3_128_hexdigest(index))
    return Written(piece, len(index) + sum(encoded_size(_volume(cell), encoding) for _, cell in own))


def add(
    place: ConditionalPath, pieces: Sequence[Piece], totals: HostWeights, author: str, weight: float | np.float32 = 1.0
) -> int:
    """totals += weight * (the numbers that an author has written), in place and in parallel.

    Args:
        pieces: of all processes of the author.
        author: for errors, such as "the difference of island 'b' for round 7".

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


def stored(place: ConditionalPath, piece: Piece) -> list[ConditionalPath]:
    """The objects of a process, and then their index; [] if that is gone. A damaged index names no objects.

    Raises OSError.
    """
    index = place / piece.object
    try:
        listing = _Listing.read(index)
    except ObjectError:
        return [index]
    return [] if listing is None else [*(index.parent / str(i) for i in range(len(listing.objects))), index]


def _read(place: ConditionalPath, pieces: Sequence[Piece], targets: HostWeights, author: str, use: _Use) -> int:
    """Uses the chunks that overlap the targets. Indices are read until all of these are found. Returns bytes."""

    def use_run(path: ConditionalPath, encoding: Encoding, run: Sequence[_Chunk]) -> int:
        """Reads adjacent chunks of an object."""
        first, count = run[0].start, run[-1].stop - run[0].start
        with _blaming(author, path):
            content = memoryview(read_range(path, first, first + count))
            for chunk in run:
                encoded = content[chunk.start - first : chunk.stop - first]
                _check_digest(encoded, chunk.xxh3)
                values = decode(encoded, encoding, _volume(chunk.cell)).reshape([b - a for a, b in chunk.cell])
                for index in needed[chunk.key]:
                    both = overlap(index, chunk.cell)
                    assert both is not None
                    use(targets[chunk.name].parts[index][within(both, index)], values[within(both, chunk.cell)])
        return count

    first = jax.process_index() % max(1, len(pieces))  # on the same mesh, it has most of what is needed
    like: _Listing | None = None
    needed: dict[str, list[Index]] = {}
    missing = {'any chunk'} if targets else set()
    calls, size = [], 0
    for piece in (*pieces[first:], *pieces[:first]):
        if not missing:
            break
        path = place / piece.object
        with _blaming(author, path):
            content = read_range(path, 0, min(piece.size, _Listing.largest))
            _check_digest(content, piece.xxh3)
            listing, size = _Listing.parse(content, path), size + len(content)
            if like is None:
                like, needed = listing, _needed(listing, targets)
                missing = set(needed)
            if (listing.arrays, listing.encoding) != (like.arrays, like.encoding):
                raise ValueError('its arrays are not those of the other processes')
            for number in range(len(listing.objects)):
                chunks = _chunks(listing, number)
                for chunk_missing, run in itertools.groupby(chunks, lambda chunk, keys=missing: chunk.key in keys):
                    if chunk_missing:
                        calls.append((use_run, path.parent / str(number), listing.encoding, list(run)))
                missing -= {chunk.key for chunk in chunks}
    if missing:
        raise DamagedPiecesError(f'{author} cannot be used: no process has written {min(missing)}')
    return size + sum(in_parallel(calls))


def _needed(listing: _Listing, targets: HostWeights) -> dict[str, list[Index]]:
    """The parts of the targets that each chunk overlaps, by its key. Raises ValueError if the arrays are others."""
    needed = collections.defaultdict(list)
    for name, target in targets.items():
        cuts = listing.arrays.get(name)
        if cuts is None or not all(a < b for places in cuts for a, b in itertools.pairwise(places) if b):
            raise ValueError(f'{name} is missing, or its grid is not one')
        if [(*places[:1], *places[-1:]) for places in cuts] != [(0, size) for size in target.shape]:
            raise ValueError(f'{name} has not the shape {list(target.shape)}')
        for index in target.parts:
            for cell in cells(cuts, index):
                needed[_key(name, cuts, cell)].append(index)
    return needed


def _chunks(listing: _Listing, number: int) -> list[_Chunk]:
    """The chunks of an object, in their order. Raises ValueError, IndexError or KeyError if one has a wrong key."""
    chunks, stop = [], 0
    for key, digest in listing.objects[number].items():
        name, _, at = key.rpartition('/')
        cuts = listing.arrays[name]
        cell = tuple((c[int(i)], c[int(i) + 1]) for i, c in zip(at.split('.') if at else (), cuts, strict=True))
        if not 0 < _volume(cell) <= _LARGEST:
            raise ValueError(f'{key} has {_volume(cell)} numbers')
        start, stop = stop, stop + encoded_size(_volume(cell), listing.encoding)
        chunks.append(_Chunk(key, name, cell, start, stop, digest))
    return chunks


@contextlib.contextmanager
def _blaming(author: str, path: ConditionalPath) -> Iterator[None]:
    """Raises DamagedPiecesError if the block finds that an object is missing or not as its author says."""
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedPiecesError(f'{author} cannot be used: {path} is missing') from error
    except (ObjectError, ValueError, IndexError, KeyError) as error:
        raise DamagedPiecesError(f'{author} cannot be used: {path}: {error}') from error


def _check_digest(content: bytes | memoryview, xxh3: str) -> None:
    if xxhash.xxh3_128_hexdigest(content) != xxh3:
        raise ValueError('it differs from what was written')


def _bounded(cuts: Cuts) -> Cuts:
    """The grid with cells of at most `_CHUNK` numbers. The first dimensions are cut first: chunks stay contiguous."""
    finer = list(cuts)
    longest = [max((b - a for a, b in itertools.pairwise(places)), default=1) for places in cuts]
    for dimension, places in enumerate(cuts):
        inner = math.prod(longest[dimension + 1 :])
        rows = max(1, _CHUNK // max(1, inner))
        finer[dimension] = tuple(
            sorted({*places, *(i for a, b in itertools.pairwise(places) for i in range(a, b, rows))})
        )
        if inner <= _CHUNK:
            break
    return tuple(finer)


def _key(name: str, cuts: Cuts, cell: Index) -> str:
    """The name of a chunk: its array, and the number of its cell along each dimension."""
    at = (bisect.bisect_left(places, start) for places, (start, _) in zip(cuts, cell, strict=True))
    return f'{name}/{".".join(map(str, at))}'


def _volume(cell: Index) -> int:
    return math.prod(stop - start for start, stop in cell)
