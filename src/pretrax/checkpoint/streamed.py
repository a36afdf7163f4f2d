"""Writes weights into a checkpoint in pieces, so that memory holds one tensor, not the model.

The result is a checkpoint whose state has only `weights`. A piece is (index along the leading dimensions, values), and
becomes one chunk. Weights that are stacked over layers have one piece per layer.
"""

import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pretrax.checkpoint.directory import write_synced
from pretrax.checkpoint.files import File
from pretrax.checkpoint.manifest import STATE, Array, partial_directory, publish
from pretrax.checkpoint.pieces import Piece
from pretrax.checkpoint.state_files import array_metadata, chunk_name, tree_metadata, write_files
from pretrax.tables import nested


@dataclass(frozen=True)
class StreamedArray:
    """An f32 array that is not in memory. Its pieces are created when they are written."""

    shape: tuple[int, ...]
    counted: int  # leading dimensions that index the pieces
    pieces: Callable[[], Iterable[Piece]]


def write_streamed(
    directory: pathlib.Path, step: int, weights: Mapping[str, StreamedArray], description: dict[str, Any]
) -> pathlib.Path:
    """Writes weights, by dotted path, to `<directory>/<step>`, which keeps a temporary name if interrupted."""
    place = partial_directory(directory.absolute(), step)
    if place.exists():  # left by an interrupted import
        shutil.rmtree(place)
    place.mkdir(parents=True)
    files: dict[str, File] = {}

    def write(name: str, values: np.ndarray) -> None:
        files.update(write_files(name, [(name, values)], lambda name, content: write_synced(place / name, content)))

    for path, array in weights.items():
        rest = array.shape[array.counted :]
        write(*array_metadata(f'weights.{path}', array.shape, (1,) * array.counted + rest, np.dtype(np.float32)))
        for at, piece in array.pieces():
            chunk = chunk_name((*at, *(0 for _ in rest)))
            write(f'{STATE}/weights.{path}/{chunk}', np.asarray(piece, np.float32).reshape(rest))
    write(*tree_metadata({'weights': nested(weights)}))
    arrays = {f'weights.{path}': Array(shape=array.shape, dtype='float32') for path, array in weights.items()}
    publish(place, directory.absolute(), step, description, arrays, files)
    return directory / str(step)
