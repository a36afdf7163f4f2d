"""Reads arrays of a checkpoint in pieces, so that the model need not fit in memory. Imports no JAX."""

import math
import pathlib
from collections.abc import Iterator

import numpy as np

from pretrax.checkpoint.chunks import Chunks
from pretrax.checkpoint.manifest import STATE, DamagedError, verify

_TOGETHER = 64 << 20  # bytes that `rows` reads at once, at least one row

type Piece = tuple[tuple[int, ...], np.ndarray]  # (index along the leading dimensions, values)


class CheckpointArrays:
    """The arrays of one field of a state, by path ('layers.q'), read in pieces and in f32.

    Args:
        directory: the `checkpoints` directory.
        step: step of the checkpoint.
        field: 'weights' or 'optimizer'.

    Attributes:
        shapes: shape of each array, by path.

    Raises:
        DamagedError: one of their files differs from what was written, or there are none.
    """

    def __init__(self, directory: pathlib.Path, step: int, field: str):
        self.place = (directory / str(step)).absolute()
        self._begins = f'{field}.'
        self._manifest = verify(directory, step, f'{STATE}/{self._begins}')
        arrays = self._manifest.arrays.items()
        self.shapes = {name[len(self._begins) :]: x.shape for name, x in arrays if name.startswith(self._begins)}
        if not self.shapes:
            raise DamagedError(f'the checkpoint {self.place} has no {field}')

    def read(self, path: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Reads an array, or its rows from `start` to `stop`."""
        shape = self.shapes[path]
        index = tuple((0, size) for size in shape)
        if shape:
            index = ((start, shape[0] if stop is None else stop), *index[1:])
        values = np.empty([last - first for first, last in index], np.float32)
        try:
            chunks = Chunks(self.place, self._manifest, self._begins + path)
            for file, at in chunks.overlapping(index):
                chunks.read(file, at, [(index, values)], compare=False)
        except OSError as error:
            raise DamagedError(
                f'the checkpoint {self.place} cannot be read\n{error.filename}: {error.strerror}'
            ) from error
        return values

    def rows(self, path: str) -> Iterator[tuple[slice, np.ndarray]]:
        """Reads an array in groups of rows that fit in little memory."""
        shape = self.shapes[path]
        if not shape:
            yield slice(None), self.read(path)[None]
            return
        together = max(1, _TOGETHER // (4 * math.prod(shape[1:])))
        for start in range(0, shape[0], together):
            stop = min(start + together, shape[0])
            yield slice(start, stop), self.read(path, start, stop)


class CheckpointWeights(CheckpointArrays):
    """The weights of a checkpoint."""

    def __init__(self, directory: pathlib.Path, step: int):
        super().__init__(directory, step, 'weights')

    def pieces(self, path: str) -> Iterator[Piece]:
        """Reads a weight: layer by layer if it is stacked over layers, otherwise in one piece."""
        if not is_stacked(path, self.shapes[path]):
            yield (), self.read(path)
            return
        for layer in range(self.shapes[path][0]):
            yield (layer,), self.read(path, layer, layer + 1)[0]


def is_stacked(path: str, shape: tuple[int, ...]) -> bool:
    """Whether the first dimension of a weight counts layers."""
    return path.startswith('layers.') and len(shape) > 0
