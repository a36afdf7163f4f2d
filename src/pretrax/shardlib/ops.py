"""Collectives and einsum. A string gives the types of the operands and of the result, which are checked.

The string omits dtypes: `'M/d F/t -> M F/t'` gathers over `d`. `all_gather`, `psum_scatter` and `all_to_all` move data
and leave the global array unchanged, except that `psum_scatter`, like `psum`, first reduces partial sums. All functions
here run per device: call them inside `typed_shard_map`.

Along a mesh axis a value is one of three kinds. It may differ between devices (a slice or a partial sum). It may be
replicated, with a gradient that JAX reduces at each use. Or it may be replicated with a gradient that remains a partial
sum on each device, as the results of `all_gather` and `defer_reduction` are: the gradient of a gathered value is
reduced only by the `psum_scatter` that is the transpose of the gather.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pretrax.shardlib.check import check_array, current_scope
from pretrax.shardlib.errors import ShardingError
from pretrax.shardlib.replication import claim_differs, known_same, settle, varying_axes
from pretrax.shardlib.types import ArrayType, Dim, parse_dims

Dims = tuple[Dim, ...]
Moves = list[tuple[int, tuple[str, ...]]]  # (dimension, mesh axes) pairs


def all_gather(spec: str, x: Any, *, wire: Any = None, sums: Any = None) -> Any:
    """Gathers slices: `all_gather('M/d F/t -> M F/t', w)`. The gradient is reduced and scattered over the same axes.

    Args:
        spec: types of the argument and the result. The axes that the result lacks are gathered; they must be the last
            axes of their dimension.
        x: the slice on this device.
        wire: dtype in which slices are sent, to which values are rounded. The result and the reduced gradient keep x's
            dtype: `wire=jnp.bfloat16` halves the bytes of the gather and still reduces gradients in f32.
        sums: dtype in which the gradient is reduced and scattered, to which each device rounds its partial sum; None:
            x's dtype.
    """
    what = f"all_gather('{spec}')"
    (before,), after = _parse(what, spec, operands=1)
    x = _check_operand(what, x, before)
    moves = _removed_axes(what, before, after)
    wire, sums = (x.dtype if dtype is None else jnp.dtype(dtype) for dtype in (wire, sums))
    if x.dtype != wire or x.dtype != sums:
        return _checked(what, _gather_through(moves, wire, sums, x), after)
    return _checked(what, _gather(moves, x), after)


def psum_scatter(spec: str, x: Any) -> Any:
    """Reduces partial sums and keeps one slice: `psum_scatter('B/d L M -> B/d L/t M', x)`."""
    what = f"psum_scatter('{spec}')"
    (before,), after = _parse(what, spec, operands=1)
    moves = _removed_axes(what, after, before)
    axes = frozenset(axis for _, names in moves for axis in names)
    x = _check_operand(what, x, before, partial=axes)
    x = _need_partial(what, x, axes)
    for position, names in moves:
        _check_split(what, before[position], x.shape[position], names)
    return _checked(what, _scatter(moves, x), after)


def all_to_all(spec: str, x: Any, *, partial: str = '') -> Any:
    """Moves the sharding between dimensions, in one exchange: `all_to_all('B/e F -> B F/e', x)`.

    Several dimensions may give their axes to one, or get them from it: `'N R/d C/t -> N/d/t R C'` gives each device
    whole matrices, and `'N/d/t R C -> N R/d C/t'` sends them back.

    Along the axes `partial`, x may be a partial sum, and then the result is one too.
    """
    what = f"all_to_all('{spec}')"
    (before,), after = _parse(what, spec, operands=1)
    unreduced = frozenset(_axis_names(partial))
    x = _check_operand(what, x, before, partial=unreduced)
    lost, gained = _moves_between(before, after)
    moved = [tuple(axis for _, axes in moves for axis in axes) for moves in (lost, gained)]
    if sorted(moved[0]) != sorted(moved[1]) or not moved[0] or min(len(lost), len(gained)) > 1:
        raise ShardingError(
            f'{what}: all_to_all moves axes from the end of one dimension to the end of another',
            fix="write the same dimensions on both sides, as in 'B/e F -> B F/e'",
        )
    for position, axes in gained:
        _check_split(what, before[position], x.shape[position], axes)
    x = _merged(x, *gained[0], lost) if len(gained) == 1 else _spread(x, *lost[0], gained)
    return _checked(what, x, after, partial=unreduced)


def psum(axes: str, x: Any, *, wires: Mapping[str, Any] | None = None) -> Any:
    """Reduces partial sums over mesh axes: `psum('t', x)`, `psum('r d', x)`. Takes a pytree.

    Args:
        axes: the mesh axes.
        x: partial sums.
        wires: for some axes, the dtype in which sums are sent over them, to which they are rounded. These axes come
            after the others. The result keeps x's dtype: `wires={'r': jnp.bfloat16}` halves the bytes over `r`.
    """
    return _reduce('psum', functools.partial(_psum_through, wires or {}), axes, x)


def as_partial_sum(axes: str, x: Any) -> Any:
    """Makes a partial sum of a value that is replicated along mesh axes: it is zero except on the first device.

    A `psum` over these axes gives the value again, so copies count once. Takes a pytree.
    """
    names = _axis_names(axes)
    is_first = jax.lax.axis_index(names) == 0 if names else True
    return jax.tree.map(lambda leaf: jnp.where(is_first, vary(leaf, names), jnp.zeros((), leaf.dtype)), x)


def pmean(axes: str, x: Any) -> Any:
    """The mean over mesh axes of values that vary over them. Takes a pytree."""
    return _reduce('pmean', jax.lax.pmean, axes, x)


def pmax(axes: str, x: Any) -> Any:
    """The maximum over mesh axes of values that vary over them. Takes a pytree.

    As for `jnp.max`, the gradient goes to the largest value and is split equally among ties. It costs two `psum`, which
    `pmax(axes, jax.lax.stop_gradient(x))` avoids.
    """
    return _reduce('pmax', _pmax, axes, x)


def ppermute(axis: str, x: Any, *, shift: int = 1, to: Sequence[int] | None = None) -> Any:
    """Sends a pytree `shift` devices ahead around the ring of a mesh axis, or from device i to device `to[i]`."""
    (name,) = _axis_names(axis)
    size = jax.lax.axis_size(name)
    to = [(i + shift) % size for i in range(size)] if to is None else [int(place) for place in to]
    if sorted(to) != list(range(size)):
        raise ShardingError(
            f"ppermute('{axis}', x, to={to}): each device must receive exactly one value",
            fix=f'list each of the {size} devices along {name} once',
        )
    return jax.tree.map(lambda leaf: jax.lax.ppermute(vary(leaf, (name,)), name, list(enumerate(to))), x)


def drop_axes(axes: str, x: Any) -> Any:
    """Removes mesh axes of size 1 from the types of arrays. Takes a pytree.

    Along such an axis the slice on the device is the whole array, so nothing needs to be gathered.
    """
    names = _axis_names(axes)
    if many := _with_many(names):
        raise ShardingError(
            f"drop_axes('{axes}', x): there are several devices along '{' '.join(many)}', each with a slice",
            mesh=jax.sharding.get_abstract_mesh(),
            fix='all_gather the slices, or work on each one inside independent()',
        )
    return jax.tree.map(lambda leaf: known_same(vary(leaf, names), names), x)


def axis_size(axes: str) -> int:
    """The number of devices along mesh axes: `axis_size('r d')`."""
    return math.prod(jax.lax.axis_size(axis) for axis in _axis_names(axes))


def axis_index(axes: str) -> jax.Array:
    """The index of this device along mesh axes, the first axis being the major one. i32[]."""
    return jax.lax.axis_index(_axis_names(axes))


def einsum(spec: str, *operands: Any, dot: Callable[..., Any] | None = None) -> Any:
    """The product of the arrays on this device: `einsum('B/d L M, M F/t -> B/d L F/t', x, w)`. No communication.

    A dimension has the same axes in every operand. Contracting a sharded dimension, as in `'B F/t, F/t M -> B M'`,
    leaves a partial sum on each device. Reduce it over `t`; annotating it before that raises ShardingError.

    Args:
        spec: types of the operands and of the result.
        operands: arrays on this device. Partial sums are not allowed.
        dot: function that computes the plain equation, such as 'abc,cd->abd' (default: `jnp.einsum`). Use it for other
            numerics.
    """
    what = f"einsum('{spec}')"
    befores, after = _parse(what, spec, operands=len(operands))
    known = _check_letters(what, befores, after)
    operands = tuple(_check_operand(what, operand, dims) for dims, operand in zip(befores, operands, strict=True))
    letters = {name: chr(ord('a') + i) for i, name in enumerate(known)}
    equation = ','.join(''.join(letters[dim.name] for dim in dims) for dims in befores)
    equation += '->' + ''.join(letters[dim.name] for dim in after)
    axes = frozenset().union(*map(varying_axes, operands))
    result = (dot or jnp.einsum)(equation, *(vary(operand, axes) for operand in operands))
    left_unreduced = frozenset(axis for dims in befores for dim in dims for axis in dim.axes) - _axes_of(after)
    return _checked(what, result, after, partial=left_unreduced)


def _check_letters(what: str, befores: list[Dims], after: Dims) -> list[str]:
    """The dimension names of an einsum, in order of appearance."""
    known: dict[str, tuple[Dim, Dims]] = {}
    for dims in (*befores, after):
        names = [dim.name for dim in dims]
        for dim in dims:
            if names.count(dim.name) > 1:
                raise ShardingError(f"{what}: '{dim.name}' appears twice in '{_text(dims)}'", fix='rename one of them')
            seen, place = known.setdefault(dim.name, (dim, dims))
            if seen.axes != dim.axes:
                raise ShardingError(
                    f"{what}: '{dim.name}' is '{seen}' in '{_text(place)}' and '{dim}' in '{_text(dims)}'",
                    fix=_fix_for_letter(seen, place, dim, dims, dims is after),
                )
    for dim in after:
        if not any(dim in dims for dims in befores):
            raise ShardingError(f"{what}: '{dim}' of the result is in no operand")
    letters = [dim for dim, _ in known.values()]
    for axis in sorted(_axes_of(letters)):
        first, *others = (dim for dim in letters if axis in dim.axes)
        if others:
            raise ShardingError(
                f"{what}: the mesh axis '{axis}' shards '{first}' and '{others[0]}'; each device "
                'would multiply only its own slices',
                fix='all_gather one of them first',
            )
    return list(known)


def _fix_for_letter(one: Dim, one_in: Dims, other: Dim, other_in: Dims, other_is_result: bool) -> str:
    """The fix for a dimension that has different axes in two places."""
    (more, there), (less, _) = sorted([(one, one_in), (other, other_in)], key=lambda place: -len(place[0].axes))
    if more.axes[: len(less.axes)] != less.axes or (other_is_result and more is other):
        return (
            'an einsum keeps the axes of a dimension: write the same axes everywhere, and communicate before or after'
        )
    gathered = tuple(less if dim is more else dim for dim in there)
    return f"all_gather('{_text(there)} -> {_text(gathered)}', x) first"


def take(spec: str, table: Any, indices: Any) -> Any:
    """Looks up rows of a table whose first dimension may be sharded: `take('V/t M, B/d L -> B/d L M', table, ids)`.

    Each device contributes the rows it holds and zeros elsewhere, so the result is a partial sum over the table's axes:
    apply `psum` or `psum_scatter`. An index outside the table gives zeros.
    """
    what = f"take('{spec}')"
    (rows, places), after = _parse(what, spec, operands=2)
    if after != (*places, *rows[1:]):
        raise ShardingError(f"{what}: the result must be '{_text((*places, *rows[1:]))}'")
    for axis in rows[0].axes:
        if axis in _axes_of(places):
            raise ShardingError(
                f"{what}: the mesh axis '{axis}' shards the table's '{rows[0]}' and the indices; each device "
                'would look up its indices only in its own rows',
                fix='all_gather the table or the indices first',
            )
    table, indices = _check_operand(what, table, rows), _check_operand(what, indices, places)
    axes = varying_axes(table) | varying_axes(indices)
    table, indices = vary(table, axes), vary(indices, axes)
    held = table.shape[0]
    if rows[0].axes:
        indices = indices - axis_index(' '.join(rows[0].axes)) * held
    mine = (indices >= 0) & (indices < held)
    found = jnp.take(table, jnp.where(mine, indices, 0), axis=0, mode='clip')
    found = jnp.where(mine.reshape(*mine.shape, *(1,) * (table.ndim - 1)), found, jnp.zeros((), table.dtype))
    return _checked(what, found, after, partial=frozenset(rows[0].axes))


def defer_reduction(axes: str, x: Any) -> Any:
    """Keeps the gradient of a replicated value a partial sum along mesh axes, so that it can be reduced once, later.

    Gradients of the result, taken inside the same `typed_shard_map`, are partial sums. Accumulate them, then `psum` the
    total. Takes a pytree.
    """
    names = _axis_names(axes)
    for leaf in jax.tree.leaves(x):
        if already := varying_axes(leaf) & set(names):
            raise ShardingError(
                f"defer_reduction('{axes}', x): along '{' '.join(sorted(already))}' each device already has its own "
                'value and gradient',
                found=f'{jax.typeof(leaf)}',
                fix='leave the axis out',
            )
    return jax.tree.map(lambda leaf: vary(leaf, names), x)


def reduce_gradient_here(x: Any, *, wires: Mapping[str, Any] | None = None) -> Any:
    """Returns its argument, and reduces its gradient here in the backward pass, over the axes that replicate it.

    Without it, JAX reduces at each use: of a gathered weight the whole gradient, instead of the slice of this device.
    Does nothing along the axes of a `defer_reduction`. Takes a pytree.

    Args:
        x: values whose gradient is wanted.
        wires: for some axes, the dtype in which gradients are sent over them, as in `psum`.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes

    def here(leaf: Any) -> Any:
        same = tuple(axis for axis in axes if axis not in varying_axes(leaf))
        narrow = {axis: wires[axis] for axis in _with_many(same) if wires and axis in wires}
        return _vary_through(narrow, same, leaf) if narrow else vary(leaf, same)

    return jax.tree.map(here, x)


def zero_gradient(x: Any) -> Any:
    """Zeros with the type of the gradient of x, unreduced if x is gathered or deferred. Takes a pytree.

    Use it as the initial value to accumulate gradients in a `scan`.
    """
    return jax.tree.map(lambda leaf: vary(jnp.zeros(leaf.shape, leaf.dtype), varying_axes(leaf)), x)


def vary_together(*arrays: Any) -> tuple[Any, ...]:
    """Casts arrays so that all of them vary, for JAX, over the axes over which any of them varies.

    Use it for the operands of a `custom_vjp` function, whose gradients then have the operands' types.
    """
    axes = frozenset().union(*map(varying_axes, arrays))
    return tuple(vary(x, axes) for x in arrays)


def vary(x: Any, axes: Iterable[str]) -> Any:
    """Casts x to vary over `axes`: its gradient is then per device, and the transpose is the sum over `axes`."""
    same = tuple(sorted(set(axes) - varying_axes(x)))
    return jax.lax.pcast(x, same, to='varying') if same else x


def _gather(moves: Moves, x: Any) -> Any:
    for position, names in moves:
        x = vary(x, names)
        if many := _with_many(names):
            x = jax.lax.all_gather(x, many, axis=position, tiled=True)
        x = known_same(x, set(names) - set(many))
    return x


def _scatter(moves: Moves, x: Any) -> Any:
    """Reduces values that vary over axes and keeps this device's slice."""
    for position, names in moves:
        if many := _with_many(names):
            x = jax.lax.psum_scatter(x, many, scatter_dimension=position, tiled=True)
    return x


def _merged(x: Any, position: int, axes: tuple[str, ...], lost: Moves) -> Any:
    """The exchange after which one dimension is sharded over the axes that others have lost."""
    x = _exchange(_split(x, position, axes), position, axes)
    # `axes` are dimensions in front of the one that they shard now: move each to the dimension whose slices it counts
    order = [i for i in range(x.ndim) if not position <= i < position + len(axes)]
    for place, names in sorted(lost, reverse=True):
        order[place:place] = [position + axes.index(name) for name in names]
    shape = list(x.shape[:position] + x.shape[position + len(axes) :])
    for place, names in lost:
        shape[place] *= axis_size(' '.join(names))
    return x.transpose(order).reshape(shape)


def _spread(x: Any, position: int, axes: tuple[str, ...], gained: Moves) -> Any:
    """The inverse of `_merged`."""
    places, others = dict[str, int](), list[int]()
    for place in range(len(shape := x.shape)):
        for names in (names for where, names in gained if where == place):
            x = _split(x, place + len(places), names)
            places |= {name: place + len(places) + i for i, name in enumerate(names)}
        others.append(place + len(places))
    order = [*others[:position], *(places[name] for name in axes), *others[position:]]
    x = _exchange(x.transpose(order), position, axes)
    sizes = [
        size // math.prod(axis_size(name) for where, names in gained if where == i for name in names)
        for i, size in enumerate(shape)
    ]
    sizes[position] *= axis_size(' '.join(axes))
    return x.reshape(sizes)


def _split(x: Any, position: int, axes: tuple[str, ...]) -> Any:
    """x with a dimension for each axis in front of the one at `position`, which the axes then no longer count."""
    sizes = [jax.lax.axis_size(axis) for axis in axes]
    rest = x.shape[position] // math.prod(sizes)
    return x.reshape(*x.shape[:position], *sizes, rest, *x.shape[position + 1 :])


def _exchange(x: Any, position: int, axes: tuple[str, ...]) -> Any:
    """Sends entry i along the dimensions of `axes` to device i, which finds that of device j at j."""
    x, many = vary(x, axes), _with_many(axes)
    size, rest = axis_size(' '.join(axes)), x.shape[position + len(axes) :]
    flat = x.reshape(*x.shape[:position], size, *rest)
    return jax.lax.all_to_all(flat, many, position, position, tiled=False).reshape(x.shape) if many else x


def _moves_between(before: Dims, after: Dims) -> tuple[Moves, Moves]:
    """The axes that each dimension has at its end only before, and only after; none if other things differ."""
    lost, gained = Moves(), Moves()
    if [dim.name for dim in before] != [dim.name for dim in after]:
        return lost, gained
    for position, (a, b) in enumerate(zip(before, after, strict=True)):
        n = min(len(a.axes), len(b.axes))
        if a.axes[:n] != b.axes[:n]:
            return Moves(), Moves()
        lost += [(position, a.axes[n:])] * (len(a.axes) > n)
        gained += [(position, b.axes[n:])] * (len(b.axes) > n)
    return lost, gained


def _with_many(names: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of size greater than 1. The others need no communication."""
    return tuple(axis for axis in names if jax.lax.axis_size(axis) > 1)


def _gather_through(moves: Moves, wire: Any, sums: Any, x: Any) -> Any:
    """Gathers x rounded to `wire`. The transpose reduces in the dtype `sums`, not in `wire`."""
    x = vary(x, [axis for _, names in moves for axis in names])

    @jax.custom_vjp
    def gather(x: Any) -> Any:
        return _gather(moves, x.astype(wire)).astype(x.dtype)

    def scatter(_: None, gradient: Any) -> tuple[Any]:
        return (_scatter(moves[::-1], _rounded(gradient, sums)).astype(gradient.dtype),)

    gather.defvjp(lambda x: (gather(x), None), scatter)
    return gather(x)


def _psum_through(wires: Mapping[str, Any], x: Any, names: tuple[str, ...]) -> Any:
    """The sum over axes, those with a wire last and rounded to it."""
    exact = tuple(axis for axis in names if axis not in wires)
    total = jax.lax.psum(x, exact) if exact else x
    for axis in names:
        if axis in wires:
            total = jax.lax.psum(_rounded(total, wires[axis]), axis).astype(x.dtype)
    return total


def _rounded(x: Any, dtype: Any) -> Any:
    """x in a dtype, rounded here."""
    if x.dtype == dtype:
        return x
    # Without this, XLA for TPUs may move the cast ahead of what x is a sum of, and sum there in the narrow dtype too.
    # It ignores an optimization_barrier.
    narrow = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, narrow.nexp, narrow.nmant).astype(dtype)


def _vary_through(wires: Mapping[str, Any], axes: tuple[str, ...], x: Any) -> Any:
    """`vary`, whose transpose is a sum that is rounded to wires."""

    @jax.custom_vjp
    def cast(x: Any) -> Any:
        return vary(x, axes)

    cast.defvjp(lambda x: (cast(x), None), lambda _, gradient: (_psum_through(wires, gradient, axes),))
    return cast(x)


def _pmax(x: Any, names: tuple[str, ...]) -> Any:
    return (_float_pmax if jnp.issubdtype(x.dtype, jnp.inexact) else jax.lax.pmax)(x, names)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _float_pmax(x: Any, names: tuple[str, ...]) -> Any:
    return jax.lax.pmax(x, names)


@_float_pmax.defjvp
def _float_pmax_jvp(names: tuple[str, ...], primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    largest = jax.lax.pmax(x, names)
    is_largest = (x == largest).astype(x.dtype)
    return largest, jax.lax.psum(dx * is_largest, names) / jax.lax.psum(is_largest, names)


def _reduce(name: str, reduction: Any, axes: str, x: Any) -> Any:
    names = _axis_names(axes)
    if not names:
        raise ShardingError(f"{name}('{axes}', x) names no mesh axis")
    many = _with_many(names)

    def reduce(leaf: Any) -> Any:
        leaf = _need_partial(f"{name}('{axes}', x)", leaf, frozenset(names), adds=name == 'psum')
        leaf = settle(leaf, set(names) - set(many))
        return reduction(leaf, many) if many else leaf

    return jax.tree.map(reduce, x)


def _need_partial(what: str, x: Any, axes: frozenset[str], adds: bool = True) -> Any:
    def error() -> ShardingError:
        mesh = jax.sharding.get_abstract_mesh()
        same = axes - varying_axes(x) or axes
        along = ' '.join(axis for axis in mesh.axis_names if axis in same)
        return ShardingError(
            f"{what}: the value is replicated along '{along}'; "
            + ('a psum would multiply it' if adds else 'there is nothing to reduce'),
            found=f'{jax.typeof(x)}',
            mesh=mesh,
            fix='leave the axis out' + (', or multiply by axis_size if that is intended' if adds else ''),
        )

    return claim_differs(x, axes, error)


def _axis_names(axes: str) -> tuple[str, ...]:
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        raise ShardingError(f"'{axes}': this code does not run per device", fix='call it inside typed_shard_map')
    names = tuple(axes.replace('/', ' ').split())
    for name in names:
        if name not in mesh.manual_axes:
            raise ShardingError(
                f"'{name}' is not a mesh axis", mesh=mesh, fix=f'the axes are {", ".join(mesh.manual_axes)}'
            )
        if names.count(name) > 1:
            raise ShardingError(f"'{axes}' names '{name}' twice")
    return names


def _parse(what: str, spec: str, operands: int) -> tuple[list[Dims], Dims]:
    left, arrow, right = spec.partition('->')
    befores = left.split(',')
    if not arrow or '->' in right or len(befores) != operands:
        raise ShardingError(f"{what} is not of the form '{', '.join(['A B'] * operands)} -> A B'")
    return [parse_dims(before) for before in befores], parse_dims(right)


def _removed_axes(what: str, longer: Dims, shorter: Dims) -> Moves:
    """The axes that each dimension of `shorter` lacks, by position. They are the minor axes, so slices are in order."""
    moves = []
    if [dim.name for dim in longer] != [dim.name for dim in shorter]:
        raise ShardingError(f'{what} has different dimensions on its two sides', fix='only the axes may change')
    for position, (a, b) in enumerate(zip(longer, shorter, strict=True)):
        if a.axes[: len(b.axes)] != b.axes:
            raise ShardingError(
                f"{what}: '{a}' and '{b}' do not differ in their last axes",
                fix=f"axes are added and removed at the end: '{a}' and '{Dim(a.name, a.axes[:-1])}'",
            )
        if len(a.axes) > len(b.axes):
            moves.append((position, a.axes[len(b.axes) :]))
    if not moves:
        raise ShardingError(f'{what} changes nothing', fix='remove the line')
    return moves


def _check_split(what: str, dim: Dim, size: int, axes: tuple[str, ...]) -> None:
    parts = math.prod(jax.lax.axis_size(axis) for axis in axes)
    if size % parts:
        raise ShardingError(
            f"{what}: the local size {size} of '{dim}' is not divisible by the {parts} devices along {' '.join(axes)}",
            mesh=jax.sharding.get_abstract_mesh(),
            fix=f'make the local size of {dim.name} a multiple of {parts}',
        )


def _check_operand(what: str, x: Any, dims: Dims, partial: frozenset[str] = frozenset()) -> Any:
    if not jax.sharding.get_abstract_mesh().manual_axes:
        raise ShardingError(f'{what}: this code does not run per device', fix='call it inside typed_shard_map')
    with current_scope():
        return check_array(x, ArrayType('num', dims), what, partial)


def _checked(what: str, x: Any, dims: Dims, partial: frozenset[str] = frozenset()) -> Any:
    with current_scope():
        return check_array(x, ArrayType('num', dims), f'result of {what}', partial)


def _axes_of(dims: Iterable[Dim]) -> frozenset[str]:
    return frozenset(axis for dim in dims for axis in dim.axes)


def _text(dims: Dims) -> str:
    return ' '.join(map(str, dims))
