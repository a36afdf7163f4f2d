"""Reads arrays of a checkpoint in pieces, so that the model need not fit in memory. Imports no JAX."""

import concurrent.futures
import math
import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from pretrax.checkpoint.chunks import Chunks, Index, overlap, within
from pretrax.checkpoint.manifest import STATE, DamagedError, check_sizes, is_training_only, unreadable, verify
from pretrax.storage import AnyPath, BucketPath

_THREADS = 8
_MEMORY = 512 << 20  # bytes of objects that are kept, since each row of an array may need a part of each
_TOGETHER = 64 << 20  # bytes that `rows` reads at once, at least one row

type Piece = tuple[tuple[int, ...], np.ndarray]  # (index along the leading dimensions, values)


class CheckpointArrays:
    """The arrays of one field of a state, by path ('layers.q'), read in pieces and in f32.

    The digests of files are checked first. An object in a bucket is read as a whole when a part of it is first needed,
    and its digest is checked then.

    Args:
        field: 'weights', 'optimizer' or 'ema'.

    Attributes:
        shapes: shape of each array, by path, without those that only training uses.

    Raises:
        DamagedError: one of their files differs from what was written, or there are none.
    """

    def __init__(self, directory: AnyPath, step: int, field: str):
        self._begins = f'{field}.'
        self._objects = _Recent() if isinstance(directory, BucketPath) else None
        if self._objects is None:
            self._manifest = verify(directory, step, f'{STATE}/{self._begins}')
        else:
            self._manifest = check_sizes(directory, step)
        self.place = self._manifest.place
        names = (name for name in self._manifest.arrays if name.startswith(self._begins) and not is_training_only(name))
        self.shapes = {name[len(self._begins) :]: self._manifest.arrays[name].shape for name in names}
        if not self.shapes:
            raise DamagedError(f'the checkpoint {self.place} has no {field}')

    def read(self, path: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Reads an array, or its rows from `start` to `stop`."""
        shape = self.shapes[path]
        index = tuple((0, size) for size in shape)
        if shape:
            index = ((start, shape[0] if stop is None else stop), *index[1:])
        try:
            chunks = Chunks(self.place, self._manifest, self._begins + path)
            values = np.empty([last - first for first, last in index], np.float32)
            if self._objects is None:
                for file, at in chunks.overlapping(index):
                    chunks.read(file, at, [(index, values)], compare=False)
            else:
                self._read_objects(self._objects, chunks, index, values)
        except OSError as error:
            raise unreadable(self.place, error) from error
        return values

    def _read_objects(self, recent: '_Recent', chunks: Chunks, index: Index, values: np.ndarray) -> None:
        """Copies what `index` needs from each object that overlaps it."""

        def copy(file: str, at: Index) -> None:
            both = overlap(index, at)
            assert both is not None
            values[within(both, index)] = recent.get(file, chunks.whole)[within(both, at)]

        needed = list(chunks.overlapping(index))
        with concurrent.futures.ThreadPoolExecutor(_THREADS, 'download') as pool:
            list(pool.map(copy, *zip(*needed, strict=True)))

    def rows(self, path: str) -> Iterator[tuple[slice, np.ndarray]]:
        """Reads an array in groups of rows that fit in little memory."""
        shape = self.shapes[path]
        if not shape:
            yield slice(None), self.read(path)[None]
            return
        together = max(1, _TOGETHER // (4 * max(1, math.prod(shape[1:]))))
        for start in range(0, shape[0], together):
            stop = min(start + together, shape[0])
            yield slice(start, stop), self.read(path, start, stop)


class _Recent:
    """The objects that were read last."""

    def __init__(self):
        self._lock = threading.Lock()
        self._arrays: dict[str, np.ndarray] = {}  # the oldest first

    def get(self, file: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """The values of an object, which `read` reads."""
        with self._lock:
            values = self._arrays.pop(file, None)
        if values is None:
            values = read(file)
        with self._lock:
            self._arrays[file] = values
            while len(self._arrays) > 1 and sum(array.nbytes for array in self._arrays.values()) > _MEMORY:
                del self._arrays[next(iter(self._arrays))]
        return values


class CheckpointWeights(CheckpointArrays):
    """The weights of a checkpoint.

    Attributes:
        not_finite: how many numbers of the pieces that have been read are NaN or infinite, by name.
    """

    def __init__(self, directory: AnyPath, step: int):
        super().__init__(directory, step, 'weights')
        self.not_finite: dict[str, int] = {}

    def pieces(self, path: str) -> Iterator[Piece]:
        """Reads a weight: layer by layer if it is stacked over layers, otherwise in one piece."""
        if is_stacked(path, self.shapes[path]):
            layers = range(self.shapes[path][0])
            found: Iterable[Piece] = (((layer,), self.read(path, layer, layer + 1)[0]) for layer in layers)
        else:
            found = [((), self.read(path))]
        for at, piece in found:
            if count := piece.size - np.count_nonzero(np.isfinite(piece)):
                self.not_finite[path + (str(list(at)) if at else '')] = int(count)
            yield at, piece


def is_stacked(path: str, shape: tuple[int, ...]) -> bool:
    """Whether the first dimension of a weight counts layers."""
    return path.startswith('layers.') and len(shape) > 0
