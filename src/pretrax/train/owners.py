"""Work on whole matrices, such as Newton-Schulz iterations, in which each matrix has one device: its owner.

At rest a device has a slice of every matrix. Matrices of one shape make a stack, which is exchanged chunk by chunk:
each device gets whole matrices, works on them, and sends the slices of the results back. So an element is sent twice,
whatever the work. While a device works on one chunk, the next is on its way.
"""

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

Axes = tuple[str, ...]  # of the mesh
Work = Callable[[jax.Array], jax.Array]  # [matrices, rows, columns] -> the same shape


class Layout(NamedTuple):
    """How a weight that consists of matrices is sharded. Each field has a tuple for each of its dimensions."""

    batch: tuple[int, ...]  # the dimensions that count matrices
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    axes: tuple[Axes, ...]  # the mesh axes of each dimension

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
    return one if one.stack[1][1:] <= one.stack[2][1:] else one._replace(rows=outputs, columns=inputs)


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
    def everywhere(shards: types) -> types:
        found, stacks = list(shards), dict[Any, list[int]]()
        slices = [layout.matrices(w) for layout, w in zip(layouts, shards, strict=True)]
        for i, (layout, one) in enumerate(zip(layouts, slices, strict=True)):
            stacks.setdefault((layout.stack, one.shape[1:]), []).append(i)
        for (dims, _), members in stacks.items():
            with scope():
                done = _stacked(work, dims, jnp.concatenate([slices[i] for i in members]))
            ends = [sum(slices[i].shape[0] for i in members[:k]) for k in range(1, len(members))]
            for i, part in zip(members, jnp.split(done, ends), strict=True):
                found[i] = layouts[i].weight(part, shards[i])
        return tuple(found)

    return list(everywhere(tuple(weights)))


def _stacked(work: Work, dims: tuple[str, str, str], x: jax.Array) -> jax.Array:
    """The work on a stack [N, R, C] that is sharded as `dims` say, chunk by chunk."""
    (n, rows, columns), sizes = x.shape, dict(current_mesh().shape)
    taken = {axis for dim in dims for axis in _axes(dim)}
    idle = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in taken)
    split = math.prod(sizes[axis] for dim in dims[1:] for axis in _axes(dim))  # slices of a matrix
    owners = split * math.prod(sizes[axis] for axis in idle)
    each = -(-n // owners)  # matrices of a device
    chunks = -(-each // max(1, CHUNK // (rows * columns * split)))
    size = -(-each // chunks) * owners
    x = jnp.pad(x, ((0, chunks * size - n), (0, 0), (0, 0))).reshape(chunks, size, rows, columns)

    def turn(own: jax.Array, following: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _to_owners(dims, idle, following), _from_owners(dims, idle, work(own))

    last, done = jax.lax.scan(turn, _to_owners(dims, idle, x[0]), x[1:])
    done = jnp.concatenate([done, _from_owners(dims, idle, work(last))[None]])
    return done.reshape(-1, rows, columns)[:n]


def _to_owners(dims: tuple[str, str, str], idle: Axes, x: jax.Array) -> jax.Array:
    """The whole matrices that this device owns. Along `idle` slices are the same, and each device takes a share."""
    n, rows, columns = dims
    if idle:
        x = x.reshape(axis_size(' '.join(idle)), -1, *x.shape[1:])[axis_index(' '.join(idle))]
        n = '/'.join((n, *idle))
    if not _axes(rows) + _axes(columns):
        return x
    return all_to_all(f'{n} {rows} {columns} -> {"/".join((n, *_axes(rows), *_axes(columns)))} R C', x)


def _from_owners(dims: tuple[str, str, str], idle: Axes, x: jax.Array) -> jax.Array:
    """The inverse of `_to_owners`."""
    n, rows, columns = dims
    shared = '/'.join((n, *idle))
    if _axes(rows) + _axes(columns):
        x = all_to_all(f'{"/".join((shared, *_axes(rows), *_axes(columns)))} R C -> {shared} {rows} {columns}', x)
    return all_gather(f'{shared} {rows} {columns} -> {n} {rows} {columns}', x) if idle else x


def _axes(dim: str) -> Axes:
    return tuple(dim.split('/')[1:])
