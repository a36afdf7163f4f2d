"""Work on whole matrices, such as Newton-Schulz iterations, in which each matrix has one device: its owner.

At rest a device has a slice of every matrix. Matrices of one shape make a stack, which is exchanged chunk by chunk:
each device gets whole matrices, works on them, and sends the slices of the results back. So an element is sent twice,
whatever the work. While a device works on one chunk, the next is on its way, and so are the results of the last.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from pretrax.model.base import MatrixAxes
from pretrax.shardlib import all_gather, all_to_all, axis_index, axis_size, num, scope, type_of, typed_shard_map
from pretrax.shardlib.types import current_mesh

CHUNK = 1 << 24  # elements of a chunk on one device; one matrix if it has more
MOST_CHUNKS = 16  # of a stack; they are larger if it needs more

Axes = tuple[str, ...]  # of the mesh
Work = Callable[[jax.Array], jax.Array]  # [matrices, rows, columns] -> the same shape


class Layout(NamedTuple):
    """How a weight that consists of matrices is sharded. Each field has a tuple for each of its dimensions."""

    batch: tuple[int, ...]  # the dimensions that count matrices
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    axes: tuple[Axes, ...]  # the mesh axes of each dimension
    transposed: bool = False  # whether rows are outputs

    @property
    def type(self) -> Any:
        """The shardlib type of the weight."""
        return num[' '.join('/'.join(('_', *axes)) for axes in self.axes)]

    @property
    def stack(self) -> tuple[str, str, str]:
        """The dimensions of a stack of these matrices, as in ('N/p', 'R/d', 'C/t')."""
        groups = zip('NRC', (self.batch, self.rows, self.columns), strict=True)
        batch, rows, columns = ('/'.join((name, *(a for i in dims for a in self.axes[i]))) for name, dims in groups)
        return batch, rows, columns

    def matrices(self, w: jax.Array) -> jax.Array:
        """A slice of the weight as slices of its matrices: [matrices, rows, columns]."""
        rows, columns = (math.prod(w.shape[i] for i in dims) for dims in (self.rows, self.columns))
        return w.transpose(*self.batch, *self.rows, *self.columns).reshape(-1, rows, columns)

    def weight(self, matrices: jax.Array, like: jax.Array) -> jax.Array:
        """The inverse of `matrices`, for a slice with the shape of `like`."""
        order = *self.batch, *self.rows, *self.columns
        return matrices.reshape([like.shape[i] for i in order]).transpose(
            sorted(range(len(order)), key=order.__getitem__)
        )


def layout_of(w: jax.Array, dims: MatrixAxes, sharding: NamedSharding | None) -> Layout:
    """The layout of a weight with these input and output dimensions.

    Matrices are taken so that `d` shards rows, where it shards any: those of inputs and those of outputs then make one
    stack. The work has to do with the transpose what it does with the matrix.
    """
    inputs, outputs = dims
    axes = tuple(dim.axes for dim in type_of(sharding, w.ndim).dims)
    batch = tuple(i for i in range(w.ndim) if i not in (*inputs, *outputs))
    one = Layout(batch, inputs, outputs, axes)
    return one if one.stack[1][1:] <= one.stack[2][1:] else one._replace(rows=outputs, columns=inputs, transposed=True)


def on_owners(work: Work, weights: Sequence[jax.Array], layouts: Sequence[Layout]) -> list[jax.Array]:
    """Applies `work` to every matrix of some weights. Each runs on one device, which has the whole matrix.

    Args:
        work: a function that treats each matrix independently. It commutes with transposition and with permutations of
            rows and of columns, as orthogonalization does.
        weights: sharded as `layouts` say.
        layouts: of each weight. Without a mesh, a device has them whole.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return [layout.weight(work(layout.matrices(w)), w) for layout, w in zip(layouts, weights, strict=True)]
    types = tuple[*(layout.type for layout in layouts)]

    @typed_shard_map
    def exchange(shards: types) -> types:
        slices = [layout.matrices(w) for layout, w in zip(layouts, shards, strict=True)]
        chunks, results = _chunks(layouts, slices), list[list[jax.Array]]([] for _ in slices)
        for chunk, done in zip(chunks, _in_turn(work, chunks, slices), strict=True):
            cuts = itertools.accumulate(stop - start for _, start, stop in chunk.parts[:-1])
            for (i, _, _), part in zip(chunk.parts, jnp.split(done, list(cuts)), strict=True):
                results[i].append(part)
        return tuple(
            layout.weight(jnp.concatenate(parts), w) for layout, parts, w in zip(layouts, results, shards, strict=True)
        )

    return list(exchange(tuple(weights)))


class _Chunk(NamedTuple):
    """Matrices that are exchanged together. `parts`: the number of a weight, and which of its matrices."""

    stack: tuple[str, str, str]
    parts: tuple[tuple[int, int, int], ...]  # weight, start, stop

    @property
    def matrices(self) -> int:
        return sum(stop - start for _, start, stop in self.parts)

    @property
    def split(self) -> int:
        """Slices of a matrix."""
        return math.prod(current_mesh().shape[axis] for dim in self.stack[1:] for axis in _axes(dim))

    @property
    def idle(self) -> str:
        """The axes along which devices have the same slices; each device takes a share of the matrices."""
        taken = {axis for dim in self.stack for axis in _axes(dim)}
        return ' '.join(axis for axis, size in current_mesh().shape.items() if size > 1 and axis not in taken)


def _chunks(layouts: Sequence[Layout], slices: Sequence[jax.Array]) -> list[_Chunk]:
    """Chunks of matrices of one shape and sharding, the smallest matrices first."""
    stacks = dict[Any, list[int]]()
    for i, (layout, x) in enumerate(zip(layouts, slices, strict=True)):
        stacks.setdefault((layout.stack, x.shape[1:]), []).append(i)
    found = []
    for (stack, shape), members in sorted(stacks.items(), key=lambda item: math.prod(item[0][1])):
        places = [(i, k) for i in members for k in range(len(slices[i]))]
        one = _Chunk(stack, ())
        owners, start = one.split * (axis_size(one.idle) if one.idle else 1), 0
        for size in chunk_sizes(len(places), math.prod(shape) * one.split, owners):
            inside = places[start : start + size]
            ranges = {i: [k for j, k in inside if j == i] for i in dict(inside)}
            found.append(_Chunk(stack, tuple((i, ks[0], ks[-1] + 1) for i, ks in ranges.items())))
            start += size
    return found


def chunk_sizes(n: int, elements: int, owners: int) -> list[int]:
    """Matrices per chunk, for a stack of n matrices. `elements`: of one matrix."""
    each = -(-n // owners)  # matrices of a device
    chunks = -(-each // max(1, CHUNK // elements, -(-each // MOST_CHUNKS)))
    return [n * (k + 1) // chunks - n * k // chunks for k in range(chunks)]


def _in_turn(work: Work, chunks: Sequence[_Chunk], slices: Sequence[jax.Array]) -> list[jax.Array]:
    """The slices of the results of each chunk. While a device works on one, its neighbors are on their way.

    XLA for GPUs would do all work first and then send all results; the barriers separate the turns.
    """
    sent: list[Any] = []
    own, done = _to_owners(chunks[0], slices), jnp.zeros(())
    for before, after in zip((None, *chunks[:-1]), (*chunks[1:], None), strict=True):
        following = after and _to_owners(after, slices)
        back = before and _from_owners(before, done)
        own, done, back = jax.lax.optimization_barrier((following, work(own), back))
        sent.append(back)
    return [*sent[1:], _from_owners(chunks[-1], done)]


def _to_owners(chunk: _Chunk, slices: Sequence[jax.Array]) -> jax.Array:
    """The whole matrices of a chunk that this device owns, and zeros if they do not divide."""
    (n, rows, columns), idle = chunk.stack, chunk.idle
    x = jnp.concatenate([slices[i][start:stop] for i, start, stop in chunk.parts])
    if idle:
        x = _padded(x, axis_size(idle))
        x = x.reshape(axis_size(idle), -1, *x.shape[1:])[axis_index(idle)]
        n = '/'.join((n, *idle.split()))
    if chunk.split == 1:
        return x
    with scope():
        moved = '/'.join((n, *_axes(rows), *_axes(columns)))
        return all_to_all(f'{n} {rows} {columns} -> {moved} R C', _padded(x, chunk.split))


def _from_owners(chunk: _Chunk, x: jax.Array) -> jax.Array:
    """The inverse of `_to_owners`."""
    (n, rows, columns), idle = chunk.stack, chunk.idle
    shared = '/'.join((n, *idle.split()))
    if chunk.split > 1:
        with scope():
            moved = '/'.join((shared, *_axes(rows), *_axes(columns)))
            x = all_to_all(f'{moved} R C -> {shared} {rows} {columns}', x)
    if idle:
        with scope():  # without the zeros
            x = x[: -(-chunk.matrices // axis_size(idle))]
            x = all_gather(f'{shared} {rows} {columns} -> {n} {rows} {columns}', x)
    return x[: chunk.matrices]


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    """A stack with zeros at its end, so that the number of its matrices is a multiple."""
    return jnp.pad(x, ((0, -len(x) % multiple), (0, 0), (0, 0)))


def _axes(dim: str) -> Axes:
    return tuple(dim.split('/')[1:])
