"""Checks values against array types while a program is traced. The compiled program contains no checks.

Four properties are checked: dtype, rank, sizes (within a scope, a dimension name has one size), and replication. A type
names the axes that shard an array. If the value also differs along another axis, the program mistakes a partial sum or
a slice for the whole array; `replication.py` detects this.
"""

import contextlib
import contextvars
import dataclasses
import math
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.shardlib.errors import ShardingError
from pretrax.shardlib.replication import claim_same, settle, varying_axes
from pretrax.shardlib.types import (
    ArrayType,
    Dim,
    Maybe,
    Stacked,
    check_axes_exist,
    check_divisible,
    field_types,
    is_array_annotation,
    plain,
    type_name,
    with_leading,
)

_sizes: contextvars.ContextVar[dict[str, tuple[int, str]] | None] = contextvars.ContextVar('sizes', default=None)
_independent: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar('independent', default=frozenset())


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Opens a scope, in which each dimension name has one size. Sizes outside the scope do not apply."""
    token = _sizes.set({})
    try:
        yield
    finally:
        _sizes.reset(token)


@contextlib.contextmanager
def independent(axes: str) -> Iterator[None]:
    """Marks code in which devices along `axes` differ in work, such as pipeline stages: `with independent('p'):`.

    Inside, a type describes the arrays at one index along `axes` and names only the other axes; values may differ along
    `axes`. Results are checked against the types outside. Opens a scope, since sizes too are those of one index.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if unknown := sorted(set(axes.split()) - set(mesh.manual_axes)):
        raise ShardingError(
            f"independent('{axes}'): '{unknown[0]}' is not a mesh axis of code that runs per device", mesh=mesh
        )
    token = _independent.set(_independent.get() | set(axes.split()))
    try:
        with scope():
            yield
    finally:
        _independent.reset(token)


def bind_scope[F: Callable](function: F) -> F:
    """Binds a function to the current `independent` context: a `custom_vjp` rule is traced after it has ended."""
    axes = ' '.join(sorted(_independent.get()))

    def run(*args: Any, **kwargs: Any) -> Any:
        with independent(axes):
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def current_scope() -> contextlib.AbstractContextManager[None]:
    """The open scope if there is one, otherwise a new scope."""
    return scope() if _sizes.get() is None else contextlib.nullcontext()


def check(value: Any, annotation: Any, what: str) -> Any:
    """Checks a value, or a pytree of values, against its annotation. Returns the value; use the returned one.

    Annotations without array types are ignored. `what` names the value in error messages; '{}' in it is replaced by the
    path of an array inside the value. Raises ShardingError.
    """
    return _check(value, annotation, what if '{}' in what else what + '{}', '', ())


def _check(value: Any, annotation: Any, named: str, path: str, leading: tuple[Dim, ...]) -> Any:
    what = named.replace('{}', path)
    match annotation := plain(annotation):
        case ArrayType():
            return check_array(value, with_leading(annotation, leading), what)
        case Maybe(inner):
            return value if value is None else _check(value, inner, named, path, leading)
        case Stacked(dim, inner):
            return _check(value, inner, named, path, (*leading, dim))
    if not is_array_annotation(annotation):
        return value
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if not isinstance(value, origin or annotation):
        raise ShardingError(f'{what}: {type_name(annotation)} expected', found=type(value).__name__)
    if origin is tuple:
        if Ellipsis in inner:
            inner = inner[:1] * len(value)
        if len(value) != len(inner):
            raise ShardingError(f'{what}: {annotation!r} expected', found=f'a tuple of {len(value)}')
    if origin in (tuple, list):
        each = inner if origin is tuple else inner * len(value)
        parts = {i: (item, kind, f'[{i}]') for i, (item, kind) in enumerate(zip(value, each, strict=True))}
    elif origin is dict:
        parts = {name: (item, inner[1], f'[{name!r}]') for name, item in value.items()}
    else:
        parts = {name: (getattr(value, name), kind, f'.{name}') for name, kind in field_types(annotation).items()}
    with scope() if getattr(annotation, 'own_sizes', False) else contextlib.nullcontext():
        checked: dict[Any, Any] = {
            name: _check(item, kind, named, path + place, leading) for name, (item, kind, place) in parts.items()
        }
    if all(checked[name] is item for name, (item, _, _) in parts.items()):
        return value
    if origin is dict:
        return type(value)(checked)
    if origin is None:
        return dataclasses.replace(value, **checked)
    return value._make(checked.values()) if hasattr(value, '_make') else origin(checked.values())


def check_array(value: Any, array: ArrayType, what: str, partial: frozenset[str] = frozenset()) -> Any:
    """Checks one array. It may also vary over the axes `partial`, which are about to be reduced."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        raise ShardingError(
            f'{what}: {array} expected',
            found=f'{type(value).__name__} {value!r:.60}',
            fix='make it an array, as in jnp.float32(x)' if isinstance(value, bool | int | float) else None,
        )
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        check_axes_exist(array, mesh, what)
    shown: dict[str, Any] = {'found': _describe(value, array, mesh), 'mesh': None if mesh.empty else mesh}
    if not _same_dtype(value.dtype, array):
        is_key = array.dtype_name == 'key'
        raise ShardingError(
            f'{what}: {array} expected, not {value.dtype}',
            **shown,
            fix='pass a key made by jax.random.key' if is_key else f'x.astype(jnp.{np.dtype(array.dtype)})',
        )
    if len(value.shape) != len(array.dims):
        raise ShardingError(
            f'{what}: {array} has {len(array.dims)} dimensions, the value has {len(value.shape)}',
            **shown,
            fix='name every dimension of the value, in order',
        )
    in_shard_map = bool(mesh.manual_axes)
    known = not isinstance(value, np.ndarray | np.generic | jax.ShapeDtypeStruct)
    allowed = partial | _independent.get()
    extra = varying_axes(value) - set(array.axes) - allowed if in_shard_map and known else frozenset()
    sizes = _sizes.get()
    for dim, size in zip(array.dims, value.shape, strict=True):
        if not in_shard_map and not mesh.empty:
            check_divisible(dim, size, mesh, f'{what}: {array}')
        whole = _whole(dim, size, mesh)
        if dim.name.isdecimal():
            expected, by = int(dim.name), 'the type'
        else:
            expected, by = (sizes or {}).get(dim.name, (whole, ''))
        if expected != whole:
            raise ShardingError(
                f'{what}: {array} has {dim.name} = {whole}, but {dim.name} is {expected} by {by}',
                **shown,
                fix=_fix_for_size(array, dim, whole, expected, mesh, extra),
            )
        if sizes is not None and dim.name != '_' and not dim.name.isdecimal():
            sizes.setdefault(dim.name, (whole, what))
    if not extra:
        return value
    value = claim_same(value, extra, lambda: _not_the_same(array, what, extra, shown))
    # A scalar such as a loss must be replicated for JAX too. Otherwise its gradient counts it once per device.
    return value if array.dims or partial else settle(value, extra)


def _whole(dim: Dim, size: int, mesh: Any) -> int:
    """The global size of a dimension."""
    return size * math.prod(mesh.shape[axis] for axis in dim.axes if axis in mesh.manual_axes)


def _describe(value: Any, array: ArrayType, mesh: Any) -> str:
    """Dtype and shape of a value, per device and global."""
    local = tuple(value.shape)
    if not mesh.manual_axes or len(local) != len(array.dims):
        return f'{value.dtype} of shape {local}' + (' per device' if mesh.manual_axes else '')
    whole = tuple(_whole(dim, size, mesh) for dim, size in zip(array.dims, local, strict=True))
    return f'{value.dtype} of shape {local} per device, {whole} globally'


def _not_the_same(array: ArrayType, what: str, extra: frozenset[str], shown: dict[str, Any]) -> ShardingError:
    axes = ' '.join(axis for axis in shown['mesh'].axis_names if axis in extra)
    fix = f"a partial sum needs psum('{axes}', x)"
    if array.dims:
        fix += f" or psum_scatter; a slice needs all_gather, or '{axes}' on the dimension that it shards"
    return ShardingError(
        f"{what}: {array} is replicated along '{axes}', but the value differs along it", **shown, fix=fix
    )


def _fix_for_size(array: ArrayType, dim: Dim, whole: int, expected: int, mesh: Any, extra: frozenset[str]) -> str:
    for axis in mesh.manual_axes:
        if axis in extra and whole * mesh.shape[axis] == expected:
            slices = [Dim(d.name, (*d.axes, axis)) if d == dim else d for d in array.dims]
            before, after = ' '.join(map(str, slices)), ' '.join(map(str, array.dims))
            return f"the value is a slice along '{axis}': all_gather('{before} -> {after}', x), or write '{dim}/{axis}'"
        if dim.axes[-1:] == (axis,) and whole == expected * mesh.shape[axis]:
            return f"the value is already gathered: write '{Dim(dim.name, dim.axes[:-1])}'"
    return f'rename one of the two dimensions, or open a scope() if {dim.name} has another meaning here'


def _same_dtype(dtype: Any, array: ArrayType) -> bool:
    if array.dtype_name == 'key':
        return jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return array.dtype is None or dtype == array.dtype
