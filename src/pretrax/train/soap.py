"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner. Vyas et al. 2024, arXiv:2409.11321, algorithm 3.

Letters, as in the paper: G gradient, L and R preconditioners of the inputs and outputs of a matrix, Q_L and Q_R their
eigenvectors, M and V Adam's moments; V is in the eigenbasis, M is not.

In a run, the owner of a matrix has its state (`owners.py`): a step sends gradients to the owners, and directions back.
Checkpoints have the state by weight, so that it fits every mesh.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from pretrax.model.base import MatrixAxes
from pretrax.shardlib.types import current_mesh
from pretrax.train.muon import Matrices
from pretrax.train.owners import Layout, Owners, Stack, layout_of, on_owners, per_device, stacks_of

_Pair = tuple[jax.Array | None, jax.Array | None]


class SoapState(NamedTuple):
    """The state by weight, as checkpoints have it: moments of every weight, and preconditioners and their eigenvectors.

    A preconditioner is f32[..., inputs, inputs] or f32[..., outputs, outputs], where ... are the dimensions that count
    matrices, such as layers. It is None for a weight that is not a matrix, and for a dimension that is too wide.
    """

    gradients: jax.Array  # i32[]: how many so far
    m: Any
    v: Any
    left: Any  # L
    right: Any  # R
    left_basis: Any  # Q_L
    right_basis: Any  # Q_R


class Slots(NamedTuple):
    """The state of the matrices of a stack, at their owners. Each array is f32[chunks, slots, ...]."""

    m: jax.Array  # [..., rows, columns]
    v: jax.Array
    rows: jax.Array | None  # [..., rows, rows]: L, or R where rows are outputs
    columns: jax.Array | None  # [..., columns, columns]
    rows_basis: jax.Array | None
    columns_basis: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnedState:
    """The state in a run. Its shapes depend on the mesh."""

    gradients: jax.Array  # i32[]: how many so far
    m: Any  # of weights without preconditioners; others are None
    v: Any
    numbers: tuple[jax.Array, ...]  # of each stack, i32[chunks, slots]: the numbers of its matrices
    slots: tuple[Slots, ...]  # of each stack
    tree: Any = dataclasses.field(metadata={'static': True})  # the structure of the weights
    shapes: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={'static': True})  # of the weights
    # `Layout` of each; None: no preconditioners
    layouts: tuple[Any, ...] = dataclasses.field(metadata={'static': True})

    @property
    def stacks(self) -> list[Stack]:
        return stacks_of(self.shapes, self.layouts)


def scale_by_soap(
    matrices: Matrices, b1: float, b2: float, eps: float, precondition_frequency: int, max_precond_dim: int
) -> optax.GradientTransformationExtraArgs:
    """SOAP's direction. As in the authors' code, the first gradient only gives the first eigenvectors: its direction is
    zero.

    A basis of the same gradient that is divided by its own moments would be a poor start: in it, the gradient is
    diagonal, so that all other entries of V would be zero.

    The authors' code improves all eigenvectors in the same step. Here those of matrix i improve with gradient t if
    `precondition_frequency` divides t + i, so that all steps take about as long. Matrices are counted in the order of
    the weights.

    The products and decompositions run in f32, whatever the default precision of the device.
    """

    rule = _Rule(b1, b2, eps, precondition_frequency)

    def init(params: Any) -> SoapState:
        leaves, tree = jax.tree.flatten(params)
        dims = _dimensions(matrices, params)
        parts = [_first(w, each, max_precond_dim) for w, each in zip(leaves, dims, strict=True)]
        zeros, fields = jnp.zeros((), jnp.int32), (tree.unflatten(field) for field in zip(*parts, strict=True))
        return SoapState(zeros, optax.tree.zeros_like(params), optax.tree.zeros_like(params), *fields)

    def update(updates: Any, state: Any, params: Any = None, *, shardings: Any = None, **_: Any) -> tuple[Any, Any]:
        del params
        if isinstance(state, SoapState):
            direction, after = update(updates, at_owners(state, fresh(state, matrices, shardings)))
            return direction, by_weight(after)
        t, (leaves, m, v) = state.gradients, map(state.tree.flatten_up_to, (updates, state.m, state.v))
        directions = list[Any](leaves)
        for i, (g, layout) in enumerate(zip(leaves, state.layouts, strict=True)):
            if layout is None:
                directions[i], m[i], v[i] = rule.adam(g, m[i], v[i], (None, None), t)
        owned = [(i, layout) for i, layout in enumerate(state.layouts) if layout is not None]
        weights, layouts = [leaves[i] for i, _ in owned], [layout for _, layout in owned]
        states = list(zip(state.numbers, state.slots, strict=True))
        moments, bases = (functools.partial(step, t) for step in (rule.next_moments, rule.next_bases))
        found, after = on_owners(moments, weights, layouts, states, bases)
        for (i, _), direction in zip(owned, found, strict=True):
            directions[i] = direction
        m, v, direction = map(state.tree.unflatten, (m, v, directions))
        slots = tuple(slots for _, slots in after)
        return direction, dataclasses.replace(state, gradients=t + 1, m=m, v=v, slots=slots)

    return optax.GradientTransformationExtraArgs(init, update)


_KEEP, _IMPROVE, _DECOMPOSE = range(3)  # what happens to the eigenvectors of a matrix


class _Rule(NamedTuple):
    b1: float
    b2: float
    eps: float
    frequency: int

    def adam(self, g: jax.Array, m: jax.Array, v: jax.Array, bases: _Pair, t: jax.Array) -> tuple[jax.Array, ...]:
        """The direction, M and V after gradient number t, counted from 0."""
        m = self.b1 * m + (1 - self.b1) * g
        v = self.b2 * v + (1 - self.b2) * jnp.square(_rotate(g, bases))
        correction = jnp.sqrt(1 - self.b2**t) / (1 - self.b1 ** jnp.maximum(t, 1))
        direction = correction * _rotate(_rotate(m, bases) / (jnp.sqrt(v) + self.eps), bases, back=True)
        return tuple(jnp.where(t == 0, 0.0, x) for x in (direction, m, v))

    def next_moments(
        self, t: jax.Array, g: jax.Array, state: tuple[jax.Array, Slots]
    ) -> tuple[jax.Array, tuple[jax.Array, Slots]]:
        """The directions of matrices [slots, rows, columns], and their next state, but with the same eigenvectors."""
        numbers, slots = state
        direction, m, v = self.adam(g, slots.m, slots.v, (slots.rows_basis, slots.columns_basis), t)
        rows, columns = _outer_products(g, slots, self.b2)
        return direction, (numbers, slots._replace(m=m, v=v, rows=rows, columns=columns))

    def next_bases(self, t: jax.Array, state: tuple[jax.Array, Slots]) -> tuple[jax.Array, Slots]:
        """The state with the eigenvectors after gradient number t."""
        numbers, slots = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), state)
        what = jnp.where(t == 0, _DECOMPOSE, jnp.where((t + numbers) % self.frequency == 0, _IMPROVE, _KEEP))
        products = slots.rows, slots.columns

        # One matrix after the other, so that what is not chosen is not computed
        def turn(i: jax.Array, after: tuple[_Pair, jax.Array]) -> tuple[_Pair, jax.Array]:
            matrix = jax.tree.map(lambda x: x[i], (products, *after))
            one = jax.lax.switch(what[i], (_keep, _improve, _decompose), *matrix)
            return jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, i, 0), after, one)

        bases, v = jax.lax.fori_loop(0, len(numbers), turn, ((slots.rows_basis, slots.columns_basis), slots.v))
        after = slots._replace(v=v, rows_basis=bases[0], columns_basis=bases[1])
        return jax.tree.map(lambda x, before: x.reshape(before.shape), (numbers, after), state)


def fresh(state: SoapState, matrices: Matrices, shardings: Any = None) -> OwnedState:
    """The state in a run before the first gradient. Only the shapes of `state` count.

    Args:
        state: by weight.
        matrices: `Model.matrix_dimensions`.
        shardings: of the weights on the current mesh, as a tree; None: they are not sharded.
    """
    flat, tree = jax.tree_util.tree_flatten_with_path(state.m)
    known, weights = dict(jax.tree_util.tree_leaves_with_path(shardings)), [w for _, w in flat]
    sides = list(zip(tree.flatten_up_to(state.left), tree.flatten_up_to(state.right), strict=True))
    layouts: tuple[Any, ...] = tuple(
        None if dims is None or side == (None, None) else _in_order(layout_of(w, dims, known.get(path)))
        for (path, w), dims, side in zip(flat, _dimensions(matrices, state.m), sides, strict=True)
    )
    slots, shapes = list[Slots](), tuple(w.shape for w in weights)
    stacks = stacks_of(shapes, layouts)
    for stack in stacks:
        i = stack.members[0]
        side = sides[i][::-1] if layouts[i].transposed else sides[i]
        sizes = [None if x is None else x.shape[-1] for x in side]
        zeros = [None if n is None else stack.zeros(n, n, dtype=weights[i].dtype) for n in sizes]
        bases = _identities(zeros)
        moment = stack.zeros(stack.rows, stack.columns, dtype=weights[i].dtype)
        slots.append(Slots(moment, moment, *zeros, *bases))
    others = tree.unflatten([jnp.zeros_like(w) if a is None else None for w, a in zip(weights, layouts, strict=True)])
    numbers = tuple(jnp.asarray(stack.numbers(shapes, layouts)) for stack in stacks)
    static = {'tree': tree, 'shapes': shapes, 'layouts': layouts}
    return OwnedState(jnp.zeros((), jnp.int32), others, others, numbers, tuple(slots), **static)


def shardings_of(state: OwnedState, others: tuple[Any, Any]) -> OwnedState:
    """The sharding of every array, where `others` are those of M and V of weights without preconditioners."""
    mesh = current_mesh()
    axes = [NamedSharding(mesh, PartitionSpec(None, stack.axes)) for stack in state.stacks]
    slots = tuple(jax.tree.map(lambda _, one=one: one, x) for one, x in zip(axes, state.slots, strict=True))
    gradients = NamedSharding(mesh, PartitionSpec())
    return dataclasses.replace(state, gradients=gradients, m=others[0], v=others[1], numbers=tuple(axes), slots=slots)


class _Stored(NamedTuple):
    """The part of an array of slots that belongs to one weight."""

    field: str  # of SoapState
    weight: int
    shape: tuple[int, ...]
    layout: Layout


def _stored(state: OwnedState) -> Iterator[tuple[Stack, Owners, list[_Stored]]]:
    """For each array of `state.slots`: its stack, its owners, and the part of each weight in it."""
    for stack, slots in zip(state.stacks, state.slots, strict=True):
        for name, x in slots._asdict().items():
            side, _, basis = name.partition('_')
            if x is not None and side in ('m', 'v'):
                yield stack, stack.owners, [_Stored(name, i, state.shapes[i], state.layouts[i]) for i in stack.members]
            elif x is not None:
                n, parts = x.shape[-1], list[_Stored]()
                square = stack.owners.square(n)
                for i in stack.members:
                    layout = state.layouts[i]
                    field = 'left' if (side == 'rows') != layout.transposed else 'right'
                    shape = *(state.shapes[i][j] for j in layout.batch), n, n
                    parts.append(_Stored(f'{field}_basis' if basis else field, i, shape, layout.square(square)))
                yield stack, square, parts


def _types(arrays: Sequence[tuple[Stack, Owners, list[_Stored]]]) -> tuple[Any, Any]:
    """The shardlib types of the arrays of slots, and of their parts by weight."""
    of_weights = (part.layout.type for _, _, parts in arrays for part in parts)
    return tuple[*(stack.type(4) for stack, _, _ in arrays)], tuple[*of_weights]


def by_weight(state: OwnedState) -> SoapState:
    """The state as checkpoints have it, with the same values on every mesh."""
    arrays = list(_stored(state))
    of_slots, of_weights = _types(arrays)

    def by_weight(slots: of_slots) -> of_weights:
        found = list[jax.Array]()
        for (stack, owners, parts), x in zip(arrays, slots, strict=True):
            slices = [part.layout.slice_of(part.shape) for part in parts]
            counts = [math.prod(part.layout.batch_sizes(one.shape)) for part, one in zip(parts, slices, strict=True)]
            matrices = stack.from_slots(owners, x, counts)
            found += [part.layout.weight(y, one) for part, y, one in zip(parts, matrices, slices, strict=True)]
        return tuple(found)

    return _assembled(state, per_device(by_weight)(tuple(jax.tree.leaves(state.slots))))


def stored_shardings(state: OwnedState) -> SoapState:
    """The shardings of `by_weight(state)`: those of the weights; preconditioners are sharded by rows.

    Args:
        state: arrays, or their shapes and shardings.
    """
    mesh, of_others = current_mesh(), (state.gradients, state.m, state.v)
    gradients, m, v = jax.tree.map(lambda x: x.sharding, of_others)
    specs = (PartitionSpec(*part.layout.axes) for _, _, parts in _stored(state) for part in parts)
    others = dataclasses.replace(state, gradients=gradients, m=m, v=v)
    return _assembled(others, [NamedSharding(mesh, spec) for spec in specs])


def _assembled(state: OwnedState, found: Sequence[Any]) -> SoapState:
    """The state by weight, of its parts in the order of `_stored`."""
    fields = {name: [None] * len(state.shapes) for name in SoapState._fields[1:]}
    fields |= {'m': state.tree.flatten_up_to(state.m), 'v': state.tree.flatten_up_to(state.v)}
    for part, x in zip((part for _, _, parts in _stored(state) for part in parts), found, strict=True):
        fields[part.field][part.weight] = x
    return SoapState(state.gradients, **{name: state.tree.unflatten(field) for name, field in fields.items()})


def at_owners(state: SoapState, like: OwnedState) -> OwnedState:
    """Returns the state of a run with the values of a checkpoint and the shapes of `like`."""
    arrays = list(_stored(like))
    of_slots, of_weights = _types(arrays)
    fields = {name: like.tree.flatten_up_to(field) for name, field in state._asdict().items() if name != 'gradients'}

    def at_owners(given: of_weights) -> of_slots:
        given, found = iter(given), list[jax.Array]()
        for stack, owners, parts in arrays:
            slices = [part.layout.matrices(x) for part, x in zip(parts, given, strict=False)]
            found.append(stack.to_slots(owners, slices))
        return tuple(found)

    stored = tuple(fields[part.field][part.weight] for _, _, parts in arrays for part in parts)
    slots = jax.tree.structure(like.slots).unflatten(per_device(at_owners)(stored))
    m, v = (
        like.tree.unflatten([None if layout else x for x, layout in zip(fields[name], like.layouts, strict=True)])
        for name in ('m', 'v')
    )
    numbers = tuple(jnp.asarray(stack.numbers(like.shapes, like.layouts)) for stack in like.stacks)
    return dataclasses.replace(like, gradients=state.gradients, m=m, v=v, numbers=numbers, slots=slots)


def _in_order(layout: Layout) -> Layout:
    """The layout in which owners have rows and columns in the order that checkpoints have, whatever the mesh."""
    later = (*layout.rows[1:], *layout.columns[1:])
    return layout._replace(axes=tuple(() if i in later else axes for i, axes in enumerate(layout.axes)))


def _dimensions(matrices: Matrices, weights: Any) -> list[MatrixAxes | None]:
    """The dimensions of each leaf that is a matrix, or a stack of matrices."""
    return jax.tree.structure(weights).flatten_up_to(matrices(weights, tables=True))


def _first(w: jax.Array, dims: MatrixAxes | None, max_precond_dim: int) -> tuple[jax.Array | None, ...]:
    """L, R, Q_L and Q_R of a weight before its first gradient: zeros, and identities as bases."""
    if dims is None:
        return None, None, None, None
    many = [n for i, n in enumerate(w.shape) if i not in (*dims[0], *dims[1])]
    sizes = [math.prod(w.shape[i] for i in axes) for axes in dims]
    zeros = [jnp.zeros((*many, n, n), w.dtype) if n <= max_precond_dim else None for n in sizes]
    return *zeros, *_identities(zeros)


def _identities(zeros: Sequence[jax.Array | None]) -> list[jax.Array | None]:
    """The eigenvectors that belong to preconditioners [..., n, n] of zeros."""
    return [None if x is None else x + jnp.eye(x.shape[-1], dtype=x.dtype) for x in zeros]


def _outer_products(g: jax.Array, slots: Slots, decay: float) -> tuple[jax.Array | None, jax.Array | None]:
    """L and R after a gradient, their moving averages of G G^T and G^T G."""
    rows = columns = None
    if slots.rows is not None:
        rows = decay * slots.rows + (1 - decay) * _product('...ij,...kj->...ik', g, g)
    if slots.columns is not None:
        columns = decay * slots.columns + (1 - decay) * _product('...ji,...jk->...ik', g, g)
    return rows, columns


def _keep(_: _Pair, bases: _Pair, v: jax.Array) -> tuple[_Pair, jax.Array]:
    return bases, v


def _decompose(products: _Pair, bases: _Pair, v: jax.Array) -> tuple[_Pair, jax.Array]:
    """The eigenvectors, largest eigenvalue first."""
    found = [None if p is None else jnp.flip(_eigenvectors(p), axis=-1) for p in products]
    return (found[0], found[1]), v


def _eigenvectors(p: jax.Array) -> jax.Array:
    """On TPUs by Jacobi's algorithm: in `shard_map`, JAX cannot lower the default one of matrices wider than 256."""
    jacobi = functools.partial(jax.lax.linalg.eigh, implementation=jax.lax.linalg.EighImplementation.JACOBI)
    return jax.lax.platform_dependent(p, tpu=lambda p: jacobi(p)[0], default=lambda p: jnp.linalg.eigh(p)[1])


def _improve(products: _Pair, bases: _Pair, v: jax.Array) -> tuple[_Pair, jax.Array]:
    """One step of power iteration, and a QR decomposition (algorithm 4).
    The order follows the eigenvalues, also in V.
    """
    found: list[jax.Array | None] = []
    for axis, (p, q) in zip((-2, -1), zip(products, bases, strict=True), strict=True):
        if p is None or q is None:
            found.append(None)
            continue
        powers = _product('...ij,...jk->...ik', p, q)
        order = jnp.argsort(-jnp.sum(q * powers, axis=-2), axis=-1)
        found.append(jnp.linalg.qr(jnp.take_along_axis(powers, order[..., None, :], axis=-1))[0])
        v = jnp.take_along_axis(v, jnp.expand_dims(order, -3 - axis), axis=axis)
    return (found[0], found[1]), v


def _rotate(x: jax.Array, bases: _Pair, back: bool = False) -> jax.Array:
    """Q_L^T x Q_R; or Q_L x Q_R^T. A basis that is None is the identity."""
    left, right = bases
    if left is not None:
        x = _product('...ij,...jk->...ik' if back else '...ji,...jk->...ik', left, x)
    if right is not None:
        x = _product('...ij,...kj->...ik' if back else '...ij,...jk->...ik', x, right)
    return x


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=jax.lax.Precision.HIGHEST)
