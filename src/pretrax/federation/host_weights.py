"""Weights in the memory of the host, as numpy arrays: what the devices of this process hold of each array, once.

A mesh cuts each dimension of an array at some places, the same for all parts, so each part is a cell of a grid.
"""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import xxhash

from pretrax.checkpoint.chunks import Index, bounds, within
from pretrax.checkpoint.manifest import named_leaves
from pretrax.checkpoint.state_files import held_shards
from pretrax.federation.fragments import Fragment, Run

_THREADS = 8
_TILE = 1 << 15  # numbers that are digested at a time, so that they stay in the cache

type Cuts = tuple[tuple[int, ...], ...]  # where the cells start along each dimension, and the end


@dataclasses.dataclass(frozen=True)
class HostArray:
    """The f32 parts of an array that this process holds. Each part is one cell of the grid.

    Attributes:
        own: those that this process writes: of equal parts in several processes, one is written.
    """

    cuts: Cuts
    parts: Mapping[Index, np.ndarray]
    own: frozenset[Index]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(cuts[-1] for cuts in self.cuts)


type HostWeights = dict[str, HostArray]  # by dotted name


def to_host(weights: Any) -> HostWeights:
    """Copies arrays to the host as f32. The result stays as it is when a step reuses their memory."""
    leaves = named_leaves(weights)
    shards = {name: held_shards(leaf) for name, leaf in leaves}
    for shard in itertools.chain.from_iterable(shards.values()):
        shard.data.copy_to_host_async()
    return {name: _host_array(leaf, shards[name]) for name, leaf in leaves}


def _host_array(leaf: jax.Array, shards: list[Any]) -> HostArray:
    sizes = leaf.sharding.shard_shape(leaf.shape)
    cuts = tuple(tuple(range(0, n + 1, step)) if n else (0, 0) for n, step in zip(leaf.shape, sizes, strict=True))
    parts = {bounds(shard.index, leaf.shape): np.array(shard.data, np.float32, order='C') for shard in shards}
    own = frozenset(bounds(shard.index, leaf.shape) for shard in held_shards(leaf, replicas=False))
    return HostArray(cuts, parts, own)


def to_devices(weights: HostWeights, like: Any) -> Any:
    """Arrays with the structure, shapes, dtypes and shardings of `like`, from all parts that this process holds."""

    def array(name: str, leaf: Any) -> jax.Array:
        parts = weights[name].parts
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: parts[bounds(index or (), leaf.shape)].astype(leaf.dtype)
        )

    return jax.tree.unflatten(jax.tree.structure(like), [array(name, leaf) for name, leaf in named_leaves(like)])


def zeros_like(weights: HostWeights) -> HostWeights:
    """Zeros in the same parts."""
    return mapped(np.zeros_like, weights)


def mapped(function: Callable[..., np.ndarray], *weights: HostWeights) -> HostWeights:
    """Applies a function to the corresponding parts of weights in the same grids, in parallel."""
    keys = [(name, index) for name, array in weights[0].items() for index in array.parts]
    results = in_parallel([(function, *(one[name].parts[index] for one in weights)) for name, index in keys])
    values = dict(zip(keys, results, strict=True))
    return {
        name: dataclasses.replace(array, parts={index: values[name, index] for index in array.parts})
        for name, array in weights[0].items()
    }


def in_parallel(calls: Sequence[tuple]) -> list[Any]:
    """The results of calls (function, arguments), in their order. Raises the first error."""
    with ThreadPoolExecutor(_THREADS, 'weights') as pool:
        results = [pool.submit(*call) for call in calls]
        try:
            return [result.result() for result in results]
        finally:
            pool.shutdown(cancel_futures=True)


def select(weights: HostWeights, fragment: Fragment) -> HostWeights:
    """The parts of weights in a fragment: views, so that changes to them change the weights."""
    return {name: refined(weights[name], weights[name].cuts, runs) for name, runs in fragment.items()}


def refined(array: HostArray, cuts: Cuts, runs: Sequence[Run] | None = None) -> HostArray:
    """Views of the parts in a finer grid; of the rows in some runs, if they are given."""
    if runs is not None:
        cuts = (tuple(sorted({*cuts[0], *itertools.chain.from_iterable(runs)})), *cuts[1:])
    parts, own = {}, set()
    for index, values in array.parts.items():
        for cell in cells(cuts, index):
            if runs is None or any(start <= cell[0][0] < stop for start, stop in runs):
                parts[cell] = values[within(cell, index)]
                own |= {cell} if index in array.own else set()
    return HostArray(cuts, parts, frozenset(own))


def cells(cuts: Cuts, index: Index) -> Iterator[Index]:
    """The cells of a grid that overlap a part of an array."""
    along = [
        [(a, b) for a, b in itertools.pairwise(places) if a < stop and start < b]
        for places, (start, stop) in zip(cuts, index, strict=True)
    ]
    return itertools.product(*along)


def digest_of(weights: HostWeights) -> dict[str, int]:
    """For each array, a u32 of the bits of the parts that this process owns, as `shardlib.digests.digest` has it.

    The sums over all processes modulo 2**32 do not depend on the mesh.
    """
    names = [name for name, array in weights.items() for _ in array.own]
    sums = in_parallel([(_digest, a.shape, index, a.parts[index]) for a in weights.values() for index in a.own])
    digests = dict.fromkeys(weights, 0)
    for name, one in zip(names, sums, strict=True):
        digests[name] = (digests[name] + one) % 2**32
    return digests


def joined_digest(digests: Sequence[Mapping[str, int]]) -> str:
    """The digest of whole weights from those of all processes: 32 hexadecimal digits."""
    names = sorted(set().union(*digests))
    sums = {name: sum(one.get(name, 0) for one in digests) % 2**32 for name in names}
    return xxhash.xxh3_128_hexdigest(json.dumps(sums).encode())


def _digest(shape: tuple[int, ...], index: Index, values: np.ndarray) -> int:
    """The sum of the bits of a part, mixed with their positions in the whole array (the finalizer of MurmurHash3)."""
    strides = [math.prod(shape[i + 1 :]) % 2**32 for i in range(len(shape))]
    along = [np.arange(*one, dtype=np.uint32) * np.uint32(n) for one, n in zip(index, strides, strict=True)]
    *outer, within_row = [np.zeros(1, np.uint32), *along]
    starts = functools.reduce(np.add.outer, outer, np.zeros((), np.uint32)).reshape(-1)
    rows = values.reshape(len(starts), within_row.size)
    total, step = 0, max(1, _TILE // max(1, within_row.size))
    for row in range(0, len(rows), step):
        positions = starts[row : row + step, None] + within_row
        positions *= np.uint32(0x9E3779B1)
        positions ^= rows[row : row + step].view(np.uint32)
        positions *= np.uint32(0x85EBCA6B)
        positions ^= positions >> 13
        positions *= np.uint32(0xC2B2AE35)
        positions ^= positions >> 16
        total += int(positions.sum(dtype=np.uint64))
    return total % 2**32
