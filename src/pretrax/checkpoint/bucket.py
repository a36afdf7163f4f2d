"""Checkpoints in a bucket: `<step>/...`, uploaded from host memory by all processes in parallel.

A checkpoint is whole exactly when its `manifest.json` exists, which is written last and deleted first. Arrays are stored as
on a disk: `.zarray` (zarr v2, uncompressed) and row-major chunks, one object per chunk.
"""

import concurrent.futures
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import xxhash

from pretrax.checkpoint.manifest import MANIFEST, STATE, Array, File, is_step, manifest_content, named_leaves, steps_in
from pretrax.storage import BucketPath

_LARGEST = 64 << 20  # bytes of an object
_THREADS = 16  # requests at a time; each has its chunk in memory twice


class Bucket:
    """The prefix `<run_dir>/checkpoints`. Processes call `write` and `finish` together; process 0 calls the rest.

    Every method but `write` raises OSError.
    """

    def __init__(self, path: BucketPath):
        self.path = path
        self._chunks: list[tuple[str, np.ndarray]] = []  # what this process will upload
        self._manifests: set[int] = set()  # steps whose manifests may exist

    def steps(self) -> list[int]:
        """The steps of the checkpoints, oldest first."""
        return steps_in(self.path)

    def prepare(self, step: int) -> None:
        """Makes the checkpoint that will be replaced incomplete; this is rarely needed."""
        if step in self._manifests:
            (self.path / f'{step}/{MANIFEST}').unlink(missing_ok=True)

    def check(self, step: int) -> None:
        """Does nothing: a process that cannot write to the bucket reports it when it uploads."""

    def write(self, step: int, state: Any) -> None:
        """Copies the state of a step off the devices."""
        del step
        shards = [
            (name, leaf, shard)
            for name, leaf in named_leaves(state)
            for shard in leaf.addressable_shards
            if shard.replica_id == 0
        ]
        for _, _, shard in shards:
            shard.data.copy_to_host_async()
        self._chunks = [
            (f'{STATE}/{name}/{chunk}', values)
            for name, leaf, shard in shards
            for chunk, values in _split(leaf, shard.index, _in_host(shard.data))
        ]
        if jax.process_index() == 0:
            self._chunks += [(f'{STATE}/{name}/.zarray', _metadata(leaf)) for name, leaf in named_leaves(state)]

    def finish(self, step: int) -> dict[str, File]:
        """Uploads what this process has copied. Returns the digests. Stops at the first failure."""

        def upload(file: str, values: np.ndarray) -> tuple[str, File]:
            content = values.tobytes()
            (self.path / f'{step}/{file}').write_bytes(content)
            return file, File(size=len(content), xxh3=xxhash.xxh3_128_hexdigest(content))

        chunks, self._chunks = self._chunks, []
        with concurrent.futures.ThreadPoolExecutor(_THREADS, 'upload') as pool:
            uploads = [pool.submit(upload, *chunk) for chunk in chunks]
            try:
                return dict(future.result() for future in concurrent.futures.as_completed(uploads))
            finally:
                pool.shutdown(cancel_futures=True)

    def publish(self, step: int, description: dict[str, Any], arrays: dict[str, Array], files: dict[str, File]) -> None:
        """Removes leftovers, also those with the prefix of this step, and writes the manifest."""
        self.clear({f'{step}/{file}' for file in files})
        self._manifests.add(step)
        content = manifest_content(step, description, arrays, files)
        (self.path / f'{step}/{MANIFEST}').write_bytes(content)

    def discard(self, step: int) -> None:
        """Leaves what a failed save has uploaded to the next `publish`: the bucket may be out of reach."""

    def remove(self, step: int) -> None:
        """Removes a checkpoint."""
        (self.path / f'{step}/{MANIFEST}').unlink(missing_ok=True)
        self._manifests.discard(step)
        (self.path / str(step)).remove_tree()

    def clear(self, keep: Iterable[str] = ()) -> None:
        """Removes the objects of incomplete checkpoints, left by killed processes and failed saves, but for `keep`."""
        files = self.path.files()
        steps = {file: file.partition('/')[0] for file in files}
        complete = {step for step in steps.values() if is_step(step) and f'{step}/{MANIFEST}' in steps}
        self._manifests = {int(step) for step in complete}
        stale = {file for file, step in steps.items() if is_step(step) and step not in complete}
        self.path.unlink_below(stale.difference(keep))

    def close(self) -> None:
        """Has nothing to do."""


def _in_host(data: jax.Array) -> np.ndarray:
    """The values of an array on one device, which stay as they are when a step reuses its memory."""
    values = np.asarray(data)  # on CPUs a view; JAX does not reuse memory while there is a view of it
    is_offloaded = data.sharding.memory_kind == 'pinned_host' and next(iter(data.devices())).platform != 'cpu'
    return values.copy() if is_offloaded else values


def _metadata(leaf: jax.Array) -> np.ndarray:
    """The content of `.zarray`."""
    dtype = leaf.dtype.str if leaf.dtype.kind in 'biufc' else leaf.dtype.name
    content = {
        'zarr_format': 2,
        'shape': leaf.shape,
        'chunks': _chunk_shape(leaf),
        'dtype': dtype,
        'compressor': None,
        'filters': None,
        'fill_value': None,
        'order': 'C',
        'dimension_separator': '.',
    }
    return np.frombuffer(json.dumps(content).encode(), np.uint8)


def _chunk_shape(leaf: jax.Array) -> list[int]:
    """The shape of a shard, with some dimensions divided by their smallest factors until it fits in an object."""
    chunk = list(leaf.sharding.shard_shape(leaf.shape))
    while math.prod(chunk) * leaf.dtype.itemsize > _LARGEST:
        factor, axis = min((_smallest_factor(size), axis) for axis, size in enumerate(chunk) if size > 1)
        chunk[axis] //= factor
    return chunk


def _smallest_factor(number: int) -> int:
    return next((n for n in range(2, math.isqrt(number) + 1) if number % n == 0), number)


def _split(leaf: jax.Array, index: tuple[slice, ...], values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The name and the values of each chunk of a shard."""
    chunk = _chunk_shape(leaf)
    first = [part.indices(size)[0] // step for part, size, step in zip(index, leaf.shape, chunk, strict=True)]
    counts = [size // step for size, step in zip(values.shape, chunk, strict=True)]
    for at in itertools.product(*map(range, counts)):
        name = '.'.join(str(a + b) for a, b in zip(first, at, strict=True)) or '0'
        yield name, values[tuple(slice(i * step, (i + 1) * step) for i, step in zip(at, chunk, strict=True))]
