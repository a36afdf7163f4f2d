"""Checkpoints in a bucket, uploaded from host memory by all processes in parallel.

Each attempt to save a step writes below a prefix of its own, `<step>/<attempt>/`, its manifest last. It becomes the
checkpoint of the step when the index names it (storage/index.py). Arrays are stored as on a disk: `.zarray` (zarr v2,
uncompressed) and row-major chunks, one object per chunk.
"""

import concurrent.futures
import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import xxhash

from pretrax.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Array,
    File,
    manifest_content,
    named_leaves,
    published,
    steps_in,
)
from pretrax.storage import BucketPath
from pretrax.storage.index import Entries, Index

_LARGEST = 64 << 20  # bytes of an object
_THREADS = 16  # requests at a time; each has its chunk in memory twice


class Bucket:
    """The prefix `<run_dir>/checkpoints`. Processes call `write` and `finish` together; process 0 calls the rest.

    Every method but `write` raises OSError, or what `confirm` raises.

    Args:
        path: the prefix.
        token: names the attempts of these processes.
        confirm: raises an exception if another process has taken over the run. Called in process 0.
    """

    def __init__(self, path: BucketPath, token: str, confirm: Callable[[], None]):
        self.path = path
        self._token, self._attempts = token, 0
        self._index = Index(path, confirm, _copied)
        self._chunks: list[tuple[str, np.ndarray]] = []  # what this process will upload

    def begin(self) -> None:
        """Takes over the checkpoints, and removes what earlier processes have left."""
        self._index.claim()
        self._index.remove_unlisted()

    def steps(self) -> list[int]:
        """The steps of the checkpoints, oldest first."""
        return steps_in(self.path)

    def prepare(self, step: int) -> None:
        """Does nothing: an attempt touches no other one."""

    def check(self, step: int) -> None:
        """Does nothing: a process that cannot write to the bucket reports it when it uploads."""

    def write(self, step: int, state: Any) -> None:
        """Copies the state of a step off the devices."""
        del step
        self._attempts += 1
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
            (self.path / f'{self._attempt(step)}/{file}').write_bytes(content)
            return file, File(size=len(content), xxh3=xxhash.xxh3_128_hexdigest(content))

        chunks, self._chunks = self._chunks, []
        with concurrent.futures.ThreadPoolExecutor(_THREADS, 'upload') as pool:
            uploads = [pool.submit(upload, *chunk) for chunk in chunks]
            try:
                return dict(future.result() for future in concurrent.futures.as_completed(uploads))
            finally:
                pool.shutdown(cancel_futures=True)

    def publish(self, step: int, description: dict[str, Any], arrays: dict[str, Array], files: dict[str, File]) -> None:
        """Removes leftovers, writes the manifest, and makes what was written the checkpoint of its step."""
        attempt = self._attempt(step)
        self._index.remove_unlisted({attempt})
        content = manifest_content(step, description, arrays, files)
        (self.path / f'{attempt}/{MANIFEST}').write_bytes(content)
        self._index.change({str(step): attempt})

    def discard(self, step: int) -> None:
        """Leaves what a failed save has uploaded to the next `publish`: the bucket may be out of reach."""

    def remove(self, step: int) -> None:
        """Removes a checkpoint, whose objects were written by earlier attempts only."""
        prefix = self._index.entries.get(str(step)) or str(step)
        self._index.change({str(step): None})
        if prefix == str(step):  # copied from a disk: attempts of this step are below it too
            self._index.remove_unlisted()
        else:
            (self.path / prefix).remove_tree()

    def close(self) -> None:
        """Has nothing to do."""

    def _attempt(self, step: int) -> str:
        """The prefix of the current attempt. All processes count alike."""
        return f'{step}/{self._token}-{self._attempts}'


def _copied(files: list[str], entries: Entries | None) -> Entries:
    """The checkpoints that the index does not name: they were written by an earlier version, or copied from a disk."""
    return {step: prefix for step, prefix in published(files, entries).items() if step not in (entries or {})}


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
