"""The files of a state: uncompressed chunks of arrays, as zarr v2 stores them, and what Orbax needs to find them.

    step/.zarray, step/0                             an array: its metadata, and one file per chunk
    weights.layers.q/.zarray, weights.layers.q/0.1
    packed.0.0                                       many small files of process 0, one after another
    _METADATA                                        on a disk, the tree of the arrays, for Orbax
    manifest.ocdbt, keys.ocdbt                       on a disk, if files are packed, where each is, for Orbax

Random mantissas do not compress, and trying takes most of the time (benchmarks/lab-notes.md).
"""

import collections
import concurrent.futures
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import xxhash

from pretrax.checkpoint.chunks import bounds
from pretrax.checkpoint.files import LARGEST_PACKED, File
from pretrax.checkpoint.manifest import STATE, named_leaves

_THREADS = 16  # files that are written at a time; in a bucket, each is in memory twice

_FEW = 64 << 20  # bytes
_MANY = 256  # small files of a process from which on they are packed: creating, syncing and removing each takes long
_PACK = 64 << 20  # bytes of small files in a pack

_EMPTY = {dict: 'Dict', list: 'List', tuple: 'Tuple'}  # what Orbax calls containers without a value

type HostFile = tuple[str, np.ndarray]  # path inside the checkpoint, and its content


def copy_to_host(state: Any, largest: int | None = None, *, replicas: bool = False) -> list[HostFile]:
    """Copies a state off the devices. Returns the files that this process has to write.

    Args:
        largest: bytes of a chunk at most; None: each shard is one chunk.
        replicas: everything that the devices of this process hold, though other processes hold it too.
    """
    leaves = named_leaves(state)
    shards = [(name, leaf, shard) for name, leaf in leaves for shard in held_shards(leaf, replicas)]
    for _, _, shard in shards:
        shard.data.copy_to_host_async()
    chunk_shapes = {name: _chunk_shape(leaf, largest) for name, leaf in leaves}
    files = [
        (f'{STATE}/{name}/{chunk}', values)
        for name, leaf, shard in shards
        for chunk, values in _split(leaf, shard.index, _in_host(shard.data), chunk_shapes[name])
    ]
    if jax.process_index() == 0 or replicas:
        files += [array_metadata(name, leaf.shape, chunk_shapes[name], leaf.dtype) for name, leaf in leaves]
    return files


def held_shards(leaf: jax.Array, replicas: bool = True) -> list[Any]:
    """The shards on the devices of this process, each once. `replicas`: also if another process has to write them."""
    shards = {
        bounds(shard.index, leaf.shape): shard for shard in leaf.addressable_shards if replicas or not shard.replica_id
    }
    return list(shards.values())


def write_files(path: str, files: Sequence[HostFile], write: Callable[[str, memoryview], object]) -> dict[str, File]:
    """Writes files one after another to a path, which is the name of a single one. Returns sizes and digests."""
    contents = [np.ascontiguousarray(values).reshape(-1).view(np.uint8).data for _, values in files]
    write(path, contents[0] if len(contents) == 1 else memoryview(b''.join(contents)))
    starts = itertools.accumulate(map(len, contents), initial=0)
    digests, pack = map(xxhash.xxh3_128_hexdigest, contents), None if files[0][0] == path else path
    return {
        name: File(size=len(content), xxh3=digest, pack=pack, offset=start)
        for (name, _), content, digest, start in zip(files, contents, digests, starts, strict=False)
    }


def _by_path(files: Sequence[HostFile]) -> dict[str, list[HostFile]]:
    """The files by the path that they are written to. Many small files are written into packs."""
    are_many = sum(values.nbytes <= LARGEST_PACKED for _, values in files) >= _MANY
    paths, packed = collections.defaultdict(list), 0
    for name, values in files:
        path = name
        if are_many and values.nbytes <= LARGEST_PACKED:
            path = f'{STATE}/packed.{jax.process_index()}.{packed // _PACK}'
            packed += values.nbytes
        paths[path].append((name, values))
    return paths


class HostFiles:
    """Files in host memory that this process has to write. An array is released as soon as it is written."""

    def __init__(self, files: Sequence[HostFile] = (), unpacked: Sequence[HostFile] = ()):
        self._files, self._changed = _by_path(files) | {file[0]: [file] for file in unpacked}, threading.Condition()
        self._bytes = sum(values.nbytes for _, values in (*files, *unpacked))
        self._few = max(_FEW, self._bytes // 8)

    def write(self, write: Callable[[str, memoryview], object]) -> dict[str, File]:
        """Writes the files in parallel. Returns sizes and digests. Stops at the first failure, and raises it."""

        def write_next() -> dict[str, File]:
            written = write_files(*self._files.popitem(), write)  # the arrays go before the waiting thread goes on
            with self._changed:
                self._bytes -= sum(file.size for file in written.values())
                self._changed.notify_all()
            return written

        with concurrent.futures.ThreadPoolExecutor(_THREADS, 'write') as pool:
            writes = [pool.submit(write_next) for _ in range(len(self._files))]
            try:
                done = concurrent.futures.as_completed(writes)
                return {name: file for future in done for name, file in future.result().items()}
            finally:
                pool.shutdown(cancel_futures=True)
                self._files.clear()

    def wait_until_few(self, has_ended: Callable[[], bool]) -> None:
        """Waits until an eighth of the bytes, or 64 MB, is not written yet, or the writing has ended."""
        with self._changed:
            while self._bytes > self._few and not has_ended():
                self._changed.wait(timeout=0.1)


def array_metadata(name: str, shape: Sequence[int], chunk: Sequence[int], dtype: np.dtype) -> HostFile:
    """The file `.zarray` of an array."""
    content = {
        'zarr_format': 2,
        'shape': shape,
        'chunks': chunk,
        'dtype': dtype.str if dtype.kind in 'biufc' else dtype.name,
        'compressor': None,
        'filters': None,
        'fill_value': None,
        'order': 'C',
        'dimension_separator': '.',
    }
    return f'{STATE}/{name}/.zarray', _json(content)


def tree_metadata(state: Any) -> HostFile:
    """The file `_METADATA`. A key of Orbax is the name of a field or a key of a dict (2), or a position (1)."""
    tree = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_empty):
        keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
        kinds = [1 if isinstance(key, jax.tree_util.SequenceKey) else 2 for key in path]
        value = {'value_type': 'jax.Array', 'skip_deserialize': False}
        if _is_empty(leaf):
            value = {'value_type': _EMPTY.get(type(leaf), 'None'), 'skip_deserialize': True}
        tree[str(tuple(keys))] = {
            'key_metadata': [{'key': key, 'key_type': kind} for key, kind in zip(keys, kinds, strict=True)],
            'value_metadata': value,
        }
    content = {'tree_metadata': tree, 'use_zarr3': False, 'custom_metadata': None}  # Orbax looks for `manifest.ocdbt`
    return f'{STATE}/_METADATA', _json(content | {'store_array_data_equal_to_fill_value': True})


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, dict | list | tuple) and not value)


def _json(content: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(content).encode(), np.uint8)


def _in_host(data: jax.Array) -> np.ndarray:
    """The values of an array on one device, which stay as they are when a step reuses its memory."""
    values = np.asarray(data)  # on CPUs a view; JAX does not reuse memory while there is a view of it
    is_offloaded = data.sharding.memory_kind == 'pinned_host' and next(iter(data.devices())).platform != 'cpu'
    return values.copy() if is_offloaded else values


def _chunk_shape(leaf: jax.Array, largest: int | None) -> list[int]:
    """The shape of a shard, with some dimensions divided by their smallest factors until it is small enough."""
    chunk = list(leaf.sharding.shard_shape(leaf.shape))
    while largest is not None and math.prod(chunk) * leaf.dtype.itemsize > largest:
        factor, axis = min((_smallest_factor(size), axis) for axis, size in enumerate(chunk) if size > 1)
        chunk[axis] //= factor
    return chunk


def _smallest_factor(number: int) -> int:
    return next((n for n in range(2, math.isqrt(number) + 1) if number % n == 0), number)


def _split(
    leaf: jax.Array, index: tuple[slice, ...], values: np.ndarray, chunk: Sequence[int]
) -> Iterator[tuple[str, np.ndarray]]:
    """The name and the values of each chunk of a shard."""
    first = [part.indices(size)[0] // step for part, size, step in zip(index, leaf.shape, chunk, strict=True)]
    counts = [size // step for size, step in zip(values.shape, chunk, strict=True)]
    for at in itertools.product(*map(range, counts)):
        place = tuple(slice(i * step, (i + 1) * step) for i, step in zip(at, chunk, strict=True))
        yield chunk_name([a + b for a, b in zip(first, at, strict=True)]), values[place]


def chunk_name(at: Sequence[int]) -> str:
    """The name of a chunk, from its number along each dimension."""
    return '.'.join(map(str, at)) or '0'
