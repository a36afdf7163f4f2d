"""Work on whole matrices, such as Newton-Schulz iterations, in which each matrix has one device: its owner.

At rest a device has a slice of every matrix. Matrices of one shape make a stack, which is exchanged chunk by chunk:
each device gets whole matrices, works on them, and sends the slices of the results back. So an element is sent twice,
whatever the work. While a device works on one chunk, the next is on its way, and so are the results of the last. The
state of a matrix, such as SOAP's, stays with its owner.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from pretrax.model.base import MatrixAxes
from pretrax.shardlib import all_gather, all_to_all, axis_index, axis_size, num, scope, type_of, typed_shard_map

CHUNK = 1 << 24  # elements of a chunk on one device; one matrix if it has more
MOST_CHUNKS = 16  # of a stack; they are larger if it needs more

Axes = tuple[str, ...]  # of the mesh
# The matrices of a chunk [matrices, rows, columns] and their state -> results of the same shape, and the next state
Work = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


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

    def slice_of(self, shape: Sequence[int]) -> Any:
        """The shape of the slice that a device has of a weight."""
        sizes = tuple(n // _devices(axes) for n, axes in zip(shape, self.axes, strict=True))
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    def batch_sizes(self, shape: Sequence[int]) -> list[int]:
        """The sizes of the dimensions that count matrices."""
        return [shape[i] for i in self.batch]

    def square(self, owners: 'Owners') -> 'Layout':
        """The layout of [..., n, n] arrays that belong to the matrices, sharded as `owners.dims` says."""
        n, axes = len(self.batch), (*(self.axes[i] for i in self.batch), *map(_axes, owners.dims[1:]))
        return Layout(tuple(range(n)), (n,), (n + 1,), axes)

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


class Owners(NamedTuple):
    """The devices that own the matrices of a stack, and how slices of these matrices are sharded."""

    dims: tuple[str, str, str]  # of `Layout.stack`
    idle: Axes  # the mesh axes along which slices are the same: each device takes a share of the matrices

    @property
    def moved(self) -> Axes:
        """The mesh axes that shard rows or columns."""
        return _axes(self.dims[1]) + _axes(self.dims[2])

    @property
    def axes(self) -> Axes:
        """The mesh axes of the owners."""
        return self.idle + self.moved

    @property
    def split(self) -> int:
        """Slices of a matrix."""
        return _devices(self.moved)

    def share(self, n: int) -> int:
        """How many of n matrices the owners with one position along `idle` have together, at most."""
        return -(-n // _devices(self.idle))

    def most(self, n: int) -> int:
        """How many of n matrices one owner has, at most."""
        return -(-self.share(n) // self.split)

    def square(self, n: int) -> 'Owners':
        """Returns the same owners for [n, n] arrays, sharded by rows over as many owners as divide n."""
        k = next(k for k in range(len(self.axes) + 1) if n % _devices(self.axes[k:]) == 0)
        return Owners((self.dims[0], '/'.join(('R', *self.axes[k:])), 'C'), self.axes[:k])


class Stack(NamedTuple):
    """Matrices of one shape in some weights, and the devices that own them.

    An owner has slots for its matrices, in chunks. If the owners do not divide the matrices, some slots are empty. An
    array of slots is [chunks, slots, ...], of which the second dimension is sharded over `axes`.
    """

    members: tuple[int, ...]  # the positions of these weights among all
    owners: Owners
    n: int  # matrices of which a device has slices
    rows: int
    columns: int

    @property
    def slots(self) -> tuple[int, int]:
        """How many chunks there are, and how many slots an owner has in each."""
        most = self.owners.most(self.n)
        chunks = -(-most // max(1, CHUNK // (self.rows * self.columns), -(-most // MOST_CHUNKS)))
        return chunks, -(-most // chunks)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """The first matrix of each chunk, and the end."""
        chunks, _ = self.slots
        return [(self.n * k // chunks, self.n * (k + 1) // chunks) for k in range(chunks)]

    @property
    def owned(self) -> int:
        """The matrices on which an owner works, with padding."""
        return sum(self.owners.most(stop - start) for start, stop in self.chunks)

    @property
    def gathered(self) -> int:
        """The matrices whose slices are gathered along idle axes, with padding."""
        return sum(self.owners.share(stop - start) for start, stop in self.chunks) * _devices(self.owners.idle)

    @property
    def axes(self) -> Axes:
        """The mesh axes of the second dimension of an array of slots."""
        return (*_axes(self.owners.dims[0]), *self.owners.axes)

    def type(self, ndim: int) -> Any:
        """The shardlib type of an array of slots."""
        return num[' '.join(('_', '/'.join(('_', *self.axes)), *'_' * (ndim - 2)))]

    def zeros(self, *shape: int, dtype: Any) -> jax.Array:
        """An array of slots."""
        chunks, each = self.slots
        return jnp.zeros((chunks, each * _devices(self.axes), *shape), dtype)

    @property
    def places(self) -> np.ndarray:
        """The matrix in each slot of the owners of n matrices, or n if it is empty. i32[chunks, slots]."""
        chunks, each = self.slots
        places = np.full((chunks, _devices(self.owners.idle), self.owners.split, each), self.n, np.int32)
        for k, (start, stop) in enumerate(self.chunks):  # as `_to_owners` does
            n = stop - start
            sharer, i = np.divmod(np.arange(n), self.owners.share(n))
            places[k, sharer, *np.divmod(i, self.owners.most(n))] = np.arange(start, stop)
        return places.reshape(chunks, -1)

    def numbers(self, shapes: Sequence[Sequence[int]], layouts: Sequence[Layout | None]) -> np.ndarray:
        """The number of the matrix in each slot, counted over all weights with a layout. i32[chunks, slots]."""
        each, next_one = dict[int, np.ndarray](), 0
        for i, (shape, layout) in enumerate(zip(shapes, layouts, strict=True)):
            if layout is not None:
                each[i] = next_one + np.arange(math.prod(layout.batch_sizes(shape)), dtype=np.int32)
                next_one += len(each[i])
        found = []
        for i in self.members:
            layout: Any = layouts[i]
            parts = [_devices(layout.axes[j]) for j in layout.batch]
            sizes = zip(parts, layout.batch_sizes(shapes[i]), strict=True)
            x = each[i].reshape([k for devices, n in sizes for k in (devices, n // devices)])
            found.append(x.transpose(*range(0, x.ndim, 2), *range(1, x.ndim, 2)).reshape(math.prod(parts), -1))
        x = np.pad(np.concatenate(found, axis=1), ((0, 0), (0, 1)))[:, self.places]
        return x.swapaxes(0, 1).reshape(len(self.chunks), -1)

    def to_slots(self, owners: Owners, slices: Sequence[jax.Array]) -> jax.Array:
        """Slices of arrays of the matrices of each member, in the slots of their owners."""
        x = jnp.concatenate(slices)
        return jnp.stack(
            [_to_owners(owners, jnp.take(x, chunk, 0, mode='fill', fill_value=0)) for chunk in self.places]
        )

    def from_slots(self, owners: Owners, x: jax.Array, counts: Sequence[int]) -> list[jax.Array]:
        """The inverse of `to_slots`. `counts`: the matrices of each member of which a device has slices."""
        places = self.places
        x = jnp.concatenate([_from_owners(owners, chunk, places.shape[1]) for chunk in x])
        return _split(x[np.argsort(places, axis=None)[: self.n]], counts)


def stacks_of(shapes: Sequence[Sequence[int]], layouts: Sequence[Layout | None]) -> list[Stack]:
    """The stacks of the weights that have a layout, those of the smallest matrices first.

    Matrices with equal shapes and shardings make one.
    """
    counts, members = dict[int, int](), dict[Any, list[int]]()
    for i, (shape, layout) in enumerate(zip(shapes, layouts, strict=True)):
        if layout is not None:
            n, rows, columns = (math.prod(shape[j] for j in dims) for dims in layout[:3])
            counts[i] = n // _devices(_axes(layout.stack[0]))
            members.setdefault((layout.stack, rows, columns), []).append(i)
    found = list[Stack]()
    for (dims, rows, columns), some in members.items():
        taken = {axis for dim in dims for axis in _axes(dim)}
        idle = tuple(axis for axis, size in _sizes().items() if size > 1 and axis not in taken)
        found.append(Stack(tuple(some), Owners(dims, idle), sum(counts[i] for i in some), rows, columns))
    return sorted(found, key=lambda stack: stack.rows * stack.columns)


def on_owners(
    work: Work,
    weights: Sequence[jax.Array],
    layouts: Sequence[Layout],
    states: Sequence[Any] | None = None,
    then: Callable[[Any], Any] = lambda state: state,
) -> tuple[list[jax.Array], list[Any]]:
    """Applies `work` to every matrix of some weights. Each runs on one device, which has the whole matrix.

    Args:
        work: a function that treats each matrix independently. It gets the transpose where the layout is transposed.
            Where several dimensions make the rows, and one after the first is sharded, it gets the rows permuted; and
            so for columns.
        weights: sharded as `layouts` say.
        layouts: of each weight.
        states: of each stack, in the order of `stacks_of`: trees of arrays of slots. None: `work` gets None.
        then: gets the state that a device has of a stack after all of its chunks, and returns the next one.

    Returns:
        The results, sharded like the weights, and the next states.
    """
    stacks = stacks_of([w.shape for w in weights], layouts)
    states = [None] * len(stacks) if states is None else list(states)
    leaves, tree = jax.tree.flatten(states)
    of_state = [stack.type(x.ndim) for stack, state in zip(stacks, states, strict=True) for x in jax.tree.leaves(state)]
    types = tuple[*(layout.type for layout in layouts), *of_state]

    def exchange(arrays: types) -> types:
        shards, given = arrays[: len(layouts)], tree.unflatten(arrays[len(layouts) :])
        slices = [layout.matrices(w) for layout, w in zip(layouts, shards, strict=True)]
        results, after = _in_turn(work, stacks, slices, given)
        done = [layout.weight(x, w) for layout, x, w in zip(layouts, results, shards, strict=True)]
        return (*done, *jax.tree.leaves([then(state) for state in after]))

    found = per_device(exchange)((*weights, *leaves)) if weights else ()
    return list(found[: len(layouts)]), tree.unflatten(found[len(layouts) :])


def per_device[F: Callable](function: F) -> F:
    """`typed_shard_map` if there is a mesh; else the function."""
    return typed_shard_map(function) if _sizes() else function


class _Chunk(NamedTuple):
    """Matrices that are exchanged together. `parts`: the number of a weight, and which of its matrices."""

    stack: int
    k: int  # among the chunks of the stack
    owners: Owners
    parts: tuple[tuple[int, int, int], ...]  # weight, start, stop

    @property
    def counts(self) -> list[int]:
        return [stop - start for _, start, stop in self.parts]


def _chunks(stacks: Sequence[Stack], slices: Sequence[jax.Array]) -> list[_Chunk]:
    found = list[_Chunk]()
    for number, stack in enumerate(stacks):
        places = [(i, j) for i in stack.members for j in range(len(slices[i]))]
        for k, (start, stop) in enumerate(stack.chunks):
            inside = places[start:stop]
            ranges = {i: [j for member, j in inside if member == i] for i in dict(inside)}
            parts = tuple((i, some[0], some[-1] + 1) for i, some in ranges.items())
            found.append(_Chunk(number, k, stack.owners, parts))
    return found


def _in_turn(
    work: Work, stacks: Sequence[Stack], slices: Sequence[jax.Array], states: list[Any]
) -> tuple[list[jax.Array], list[Any]]:
    """The slices of the results, and the next states. While a device works on a chunk, its neighbors are on their way.

    XLA for GPUs would do all work first and then send all results; the barriers separate the turns.
    """
    chunks, sent, results = _chunks(stacks, slices), list[Any](), list[list[jax.Array]]([] for _ in slices)

    def get(chunk: _Chunk) -> jax.Array:
        return _to_owners(chunk.owners, jnp.concatenate([slices[i][start:stop] for i, start, stop in chunk.parts]))

    own, done = get(chunks[0]), jnp.zeros(())
    for before, chunk, after in zip((None, *chunks[:-1]), chunks, (*chunks[1:], None), strict=True):
        following = after and get(after)
        back = before and _from_owners(before.owners, done, sum(before.counts))
        done, states[chunk.stack] = _work_on_chunk(work, own, states[chunk.stack], chunk.k)
        own, done, back = jax.lax.optimization_barrier((following, done, back))
        sent.append(back)
    sent = [*sent[1:], _from_owners(chunks[-1].owners, done, sum(chunks[-1].counts))]
    for chunk, x in zip(chunks, sent, strict=True):
        for (i, _, _), part in zip(chunk.parts, _split(x, chunk.counts), strict=True):
            results[i].append(part)
    return [jnp.concatenate(parts) for parts in results], states


def _work_on_chunk(work: Work, own: jax.Array, state: Any, k: int) -> tuple[jax.Array, Any]:
    """The results for the matrices of chunk k, and the state of the stack with their next state."""
    done, after = work(own, jax.tree.map(lambda x: x[k, : len(own)], state))
    return done, jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_slice(x, new[None], (k, *[0] * new.ndim)), state, after
    )


def _to_owners(owners: Owners, x: jax.Array) -> jax.Array:
    """The whole matrices that this device owns, and zeros if they do not divide."""
    (n, rows, columns), idle = owners.dims, ' '.join(owners.idle)
    if idle:
        x = _padded(x, axis_size(idle))
        x = x.reshape(axis_size(idle), -1, *x.shape[1:])[axis_index(idle)]
        n = '/'.join((n, *owners.idle))
    if owners.split == 1:
        return x
    with scope():
        moved = '/'.join((n, *owners.moved))
        return all_to_all(f'{n} {rows} {columns} -> {moved} R C', _padded(x, owners.split))


def _from_owners(owners: Owners, x: jax.Array, n_matrices: int) -> jax.Array:
    """The inverse of `_to_owners`."""
    (n, rows, columns), idle = owners.dims, ' '.join(owners.idle)
    shared = '/'.join((n, *owners.idle))
    if owners.split > 1:
        with scope():
            moved = '/'.join((shared, *owners.moved))
            x = all_to_all(f'{moved} R C -> {shared} {rows} {columns}', x)
    if idle:
        with scope():  # without the zeros
            x = x[: owners.share(n_matrices)]
            x = all_gather(f'{shared} {rows} {columns} -> {n} {rows} {columns}', x)
    return x[:n_matrices]


def _padded(x: jax.Array, multiple: int) -> jax.Array:
    """A stack with zeros at its end, so that the number of its matrices is a multiple."""
    return jnp.pad(x, ((0, -len(x) % multiple), (0, 0), (0, 0)))


def _split(x: jax.Array, counts: Sequence[int]) -> list[jax.Array]:
    return jnp.split(x, list(itertools.accumulate(counts[:-1])))


def _axes(dim: str) -> Axes:
    return tuple(dim.split('/')[1:])


def _sizes() -> dict[str, int]:
    """The sizes of the axes of the mesh; none without a mesh."""
    return dict(jax.sharding.get_abstract_mesh().shape)


def _devices(axes: Axes) -> int:
    sizes = _sizes()
    return math.prod(sizes[axis] for axis in axes)
