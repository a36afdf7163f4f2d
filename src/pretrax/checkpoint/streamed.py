"""Writes weights into a checkpoint in pieces, so that memory holds one tensor, not the model.

The result is an ordinary Orbax checkpoint whose state has only `weights`. A piece is (index along the leading
dimensions, values). Weights that are stacked over layers have one piece per layer.
"""

import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import future, type_handlers

from pretrax.checkpoint.manifest import STATE, digests, named_arrays, partial_directory, publish, written

Piece = tuple[tuple[int, ...], np.ndarray]


@dataclass(frozen=True)
class StreamedArray:
    """An f32 array that is not in memory. Its pieces are created when they are written."""

    shape: tuple[int, ...]
    counted: int  # leading dimensions that index the pieces
    pieces: Callable[[], Iterable[Piece]]

    dtype = np.dtype(np.float32)
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: int(np.prod(self.shape, dtype=np.int64)))
    nbytes = property(lambda self: 4 * self.size)


class _StreamedHandler(type_handlers.NumpyHandler):
    """Writes streamed arrays in Orbax's format, one after the other, with one chunk per piece."""

    def typestr(self) -> str:
        return 'jax.Array'  # the type to restore

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[future.Future]:
        del args

        async def write() -> None:
            for value, info in zip(values, infos, strict=True):
                await info.await_path_creation()
                chunk = (1,) * value.counted + value.shape[value.counted :]
                spec = type_handlers.get_json_tspec_write(
                    info, use_ocdbt=False, global_shape=value.shape, local_shape=chunk, dtype=value.dtype,
                    process_index=0,
                )  # fmt: skip
                array = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
                for at, piece in value.pieces():
                    await array[at].write(piece)

        return [future.CommitFutureAwaitingContractedSignals(write(), name='streamed')]


def write_streamed(
    directory: pathlib.Path, step: int, weights: Mapping[str, StreamedArray], description: dict[str, Any]
) -> pathlib.Path:
    """Writes weights, by their dotted paths, to `<directory>/<step>`.
    If interrupted, the directory keeps its temporary name.
    """
    registry = type_handlers.create_type_handler_registry(
        (StreamedArray, _StreamedHandler()), (jax.Array, type_handlers.ArrayHandler())
    )
    place = partial_directory(directory.absolute(), step)
    if place.exists():  # left by an interrupted import
        shutil.rmtree(place)
    place.mkdir(parents=True)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=registry)
    state = {'weights': _nested(weights)}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(place / STATE, args=ocp.args.PyTreeSave(state))
    publish(place, directory.absolute(), step, description, named_arrays(state), digests(place, written(place)))
    return directory / str(step)


def _nested(by_path: Mapping[str, StreamedArray]) -> dict[str, Any]:
    """{'a.b': leaf} -> {'a': {'b': leaf}}"""
    tree: dict[str, Any] = {}
    for path, leaf in by_path.items():
        *above, name = path.split('.')
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = leaf
    return tree
