"""Work on whole matrices with a state that stays on their owners, such as SOAP's.

As in `owners.py`, matrices of one shape make a stack, and each has an owner. Here an owner has slots for matrices: it
keeps what it knows of each from step to step.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.shardlib import all_gather, all_to_all, axis_index, axis_size, num, scope, typed_shard_map
from pretrax.train.owners import CHUNK, Axes, Layout


class Stack(NamedTuple):
    """Matrices of one shape in some weights, and the devices that own them.

    An owner has slots for its matrices, in chunks. If the owners do not divide the matrices, some slots are empty. An
    array of slots is [chunks, slots, ...], of which the second dimension is sharded over the owners.
    """

    members: tuple[int, ...]  # the positions of these weights among all
    dims: tuple[str, str, str]  # of `Layout.stack`
    idle: Axes  # the mesh axes along which slices are the same
    n: int  # matrices of which a device has slices
    rows: int
    columns: int

    @property
    def owners(self) -> Axes:
        """The mesh axes of the owners of these n matrices."""
        return (*self.idle, *_axes(self.dims[1]), *_axes(self.dims[2]))

    @property
    def chunks(self) -> tuple[int, int]:
        """How many chunks there are, and how many slots an owner has in each."""
        each = -(-self.n // _devices(self.owners))  # matrices of an owner
        chunks = -(-each // max(1, CHUNK // (self.rows * self.columns)))
        return chunks, -(-each // chunks)

    @property
    def slots(self) -> tuple[int, int]:
        """The first two dimensions of an array of slots."""
        chunks, each = self.chunks
        return chunks, each * _devices(self.axes)

    @property
    def axes(self) -> Axes:
        """The mesh axes of the second one."""
        return (*_axes(self.dims[0]), *self.owners)

    def type(self, ndim: int) -> Any:
        """The shardlib type of an array of slots."""
        return num[' '.join(('_', '/'.join(('_', *self.axes)), *'_' * (ndim - 2)))]

    def square(self, n: int) -> Self:
        """How [n, n] arrays that belong to the matrices are sharded outside: by rows, over as many owners as divide n.

        They have the same owners.
        """
        k = next(k for k in range(len(self.owners) + 1) if n % _devices(self.owners[k:]) == 0)
        dims = self.dims[0], '/'.join(('R', *self.owners[k:])), 'C'
        return self._replace(dims=dims, idle=self.owners[:k])

    def numbers(self, shapes: Sequence[Sequence[int]], layouts: Sequence[Layout | None]) -> np.ndarray:
        """The number of the matrix in each slot, counted over all weights with a layout. i32[chunks, slots]."""
        each, next_one = dict[int, np.ndarray](), 0
        for i, (shape, layout) in enumerate(zip(shapes, layouts, strict=True)):
            if layout is not None:
                each[i] = next_one + np.arange(math.prod(batch_sizes(layout, shape)), dtype=np.int32)
                next_one += len(each[i])
        found = []
        for i in self.members:
            layout: Any = layouts[i]
            parts = [_devices(layout.axes[j]) for j in layout.batch]
            sizes = zip(parts, batch_sizes(layout, shapes[i]), strict=True)
            x = each[i].reshape([k for devices, n in sizes for k in (devices, n // devices)])
            found.append(x.transpose(*range(0, x.ndim, 2), *range(1, x.ndim, 2)).reshape(math.prod(parts), -1))
        (chunks, slots), x = self.chunks, np.concatenate(found, axis=1)
        x = np.pad(x, ((0, 0), (0, chunks * slots * _devices(self.owners) - self.n)))
        return x.reshape(len(x), chunks, -1).swapaxes(0, 1).reshape(chunks, -1)

    def chunked(self, slices: Sequence[jax.Array]) -> jax.Array:
        """Slices of the matrices of each member, [matrices, rows, columns], as [chunks, matrices, rows, columns]."""
        (chunks, each), x = self.chunks, jnp.concatenate(slices)
        size = each * _devices(self.owners)
        x = jnp.pad(x, ((0, chunks * size - self.n), (0, 0), (0, 0)))
        return x.reshape(chunks, size, *x.shape[1:])

    def to_slots(self, slices: Sequence[jax.Array]) -> jax.Array:
        """Slices of the matrices of each member, in the slots of their owners."""
        return jax.lax.map(functools.partial(_to_owners, self), self.chunked(slices))

    def from_slots(self, x: jax.Array, counts: Sequence[int]) -> list[jax.Array]:
        """The inverse of `to_slots`. `counts`: the matrices of each member of which a device has slices."""
        return self.unchunked(jax.lax.map(functools.partial(_from_owners, self), x), counts)

    def unchunked(self, x: jax.Array, counts: Sequence[int]) -> list[jax.Array]:
        """The inverse of `chunked`. `counts`: the matrices of each member of which a device has slices."""
        ends = [sum(counts[:k]) for k in range(1, len(counts))]
        return jnp.split(x.reshape(-1, *x.shape[2:])[: self.n], ends)


def stacks_of(shapes: Sequence[Sequence[int]], layouts: Sequence[Layout | None]) -> list[Stack]:
    """The stacks of the weights that have a layout. Matrices with equal shapes and shardings make one."""
    counts, members = dict[int, int](), dict[Any, list[int]]()
    for i, (shape, layout) in enumerate(zip(shapes, layouts, strict=True)):
        if layout is not None:
            n, rows, columns = (math.prod(shape[j] for j in dims) for dims in layout[:3])
            counts[i] = n // _devices(_axes(layout.stack[0]))
            members.setdefault((layout.stack, rows, columns), []).append(i)
    return [
        Stack(tuple(some), dims, _idle(dims), sum(counts[i] for i in some), rows, columns)
        for (dims, rows, columns), some in members.items()
    ]


def with_states(
    work: Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]],
    weights: Sequence[jax.Array],
    layouts: Sequence[Layout],
    states: Sequence[Any],
    step: jax.Array | int = 0,
) -> tuple[list[jax.Array], list[Any]]:
    """Applies work with a state, which stays with the owners, to every matrix of some weights.

    Args:
        work: gets the matrices of some slots, their state, and `step`; returns results with the shape of the matrices,
            and the next state.
        weights: sharded as `layouts` say.
        layouts: of each weight.
        states: of each stack, in the order of `stacks_of`: trees of arrays of slots.
        step: a number that all owners get.

    Returns:
        The results, sharded like the weights, and the next states.
    """
    stacks, (leaves, tree) = stacks_of([w.shape for w in weights], layouts), jax.tree.flatten(list(states))

    of_state = [stack.type(x.ndim) for stack, one in zip(stacks, states, strict=True) for x in jax.tree.leaves(one)]
    types = tuple[*(layout.type for layout in layouts), *of_state]

    def everywhere(arrays: types, step: num['']) -> types:
        shards, after = list(arrays[: len(layouts)]), list[Any]()
        slices = [layout.matrices(w) for layout, w in zip(layouts, shards, strict=True)]
        for stack, state in zip(stacks, tree.unflatten(arrays[len(layouts) :]), strict=True):
            some = [slices[i] for i in stack.members]
            with scope():
                done, state = _in_turn(lambda x, one: work(x, one, step), stack, stack.chunked(some), state)
            for i, part in zip(stack.members, stack.unchunked(done, [len(x) for x in some]), strict=True):
                shards[i] = layouts[i].weight(part, shards[i])
            after.append(state)
        return (*shards, *jax.tree.leaves(after))

    run: Any = per_device(everywhere)
    found = run((*weights, *leaves), jnp.asarray(step))
    return list(found[: len(layouts)]), tree.unflatten(found[len(layouts) :])


def per_device[F: Callable](function: F) -> F:
    """`typed_shard_map` if there is a mesh; else the function."""
    return typed_shard_map(function) if _sizes() else function


def _in_turn(work: Any, stack: Stack, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """The work on the chunks [chunks, matrices, rows, columns] of a stack, of which a device has slices."""

    def turn(own: jax.Array, given: tuple[jax.Array, Any]) -> Any:
        done, after = work(own, given[1])
        return _to_owners(stack, given[0]), (_from_owners(stack, done), after)

    own, before = jax.lax.scan(turn, _to_owners(stack, x[0]), (x[1:], jax.tree.map(lambda s: s[:-1], state)))
    done, after = work(own, jax.tree.map(lambda s: s[-1], state))
    last = _from_owners(stack, done), after
    return jax.tree.map(lambda some, one: jnp.concatenate([some, one[None]]), before, last)


def _to_owners(stack: Stack, x: jax.Array) -> jax.Array:
    """The whole matrices that this device owns. Along `idle` slices are the same, and each device takes a share."""
    (n, rows, columns), idle = stack.dims, stack.idle
    if idle:
        x = x.reshape(axis_size(' '.join(idle)), -1, *x.shape[1:])[axis_index(' '.join(idle))]
        n = '/'.join((n, *idle))
    if not _axes(rows) + _axes(columns):
        return x
    return all_to_all(f'{n} {rows} {columns} -> {"/".join((n, *_axes(rows), *_axes(columns)))} R C', x)


def _from_owners(stack: Stack, x: jax.Array) -> jax.Array:
    """The inverse of `_to_owners`."""
    (n, rows, columns), idle = stack.dims, stack.idle
    shared = '/'.join((n, *idle))
    if _axes(rows) + _axes(columns):
        x = all_to_all(f'{"/".join((shared, *_axes(rows), *_axes(columns)))} R C -> {shared} {rows} {columns}', x)
    return all_gather(f'{shared} {rows} {columns} -> {n} {rows} {columns}', x) if idle else x


def _axes(dim: str) -> Axes:
    return tuple(dim.split('/')[1:])


def _idle(dims: tuple[str, ...]) -> Axes:
    taken = {axis for dim in dims for axis in _axes(dim)}
    return tuple(axis for axis, size in _sizes().items() if size > 1 and axis not in taken)


def _sizes() -> dict[str, int]:
    """The sizes of the axes of the mesh; none without a mesh."""
    return dict(jax.sharding.get_abstract_mesh().shape)


def _devices(axes: Axes) -> int:
    sizes = _sizes()
    return math.prod(sizes[axis] for axis in axes)


def slice_of(layout: Layout, shape: Sequence[int]) -> Any:
    """The shape of the slice that a device has of a weight."""
    sizes = tuple(n // _devices(axes) for n, axes in zip(shape, layout.axes, strict=True))
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def batch_sizes(layout: Layout, shape: Sequence[int]) -> list[int]:
    """The sizes of the dimensions that count matrices."""
    return [shape[i] for i in layout.batch]


def square_layout(layout: Layout, stack: Stack) -> Layout:
    """The layout of [..., n, n] arrays that belong to the matrices, sharded as the stack is."""
    n, axes = len(layout.batch), (*(layout.axes[i] for i in layout.batch), *map(_axes, stack.dims[1:]))
    return Layout(tuple(range(n)), (n,), (n + 1,), axes)
