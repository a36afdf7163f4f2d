"""Array types that carry their sharding: `f32['batch/d d_model']` is a dtype, named dimensions and mesh axes.

A dimension is a name followed by the mesh axes that shard it, major axis first: `batch/r/d`. A `pytree_dataclass` of
such types describes several arrays, and `Array['layers', Layer]` is `Layer` with one more leading dimension on every
array. A dimension `_` may have a different size in each array, as in `Array['_', Layer]`. This one declaration provides
partition specs, shardings, abstract values and the checks of `check.py`.
"""

import dataclasses
import functools
import types
import typing
from typing import TYPE_CHECKING, Any, dataclass_transform

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pretrax.shardlib.errors import ShardingError


@dataclasses.dataclass(frozen=True)
class Dim:
    """One dimension of an array: its name (or its size, in digits) and the mesh axes that shard it, major first."""

    name: str
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return '/'.join((self.name, *self.axes))


def parse_dims(spec: str) -> tuple[Dim, ...]:
    """'batch/r/d d_model' -> (Dim('batch', ('r', 'd')), Dim('d_model')). Raises ShardingError if malformed."""
    if not isinstance(spec, str):
        raise ShardingError(f'{spec!r} is not a type', fix="write one string, as in 'batch/d d_model'")
    dims = []
    for word in spec.split():
        name, *axes = word.split('/')
        if not (name.isidentifier() or name.isdecimal()) or not all(axis.isidentifier() for axis in axes):
            raise ShardingError(
                f"'{word}' in the type '{spec}' is not 'name' or 'name/axis/axis'",
                fix="names and axes are identifiers; separate dimensions by spaces and axes by slashes: 'batch/r/d "
                "d_model'",
            )
        dims.append(Dim(name, tuple(axes)))
    used = [axis for dim in dims for axis in dim.axes]
    for axis in used:
        if used.count(axis) > 1:
            raise ShardingError(
                f"the mesh axis '{axis}' shards two dimensions of '{spec}'; an axis can shard only one dimension",
                fix=f"gather one of them first, as in all_gather('... X/{axis} -> ... X', x)",
            )
    return tuple(dims)


@dataclasses.dataclass(frozen=True, repr=False)
class ArrayType:
    """The type of one array: the dtype's name as written, and the dimensions."""

    dtype_name: str
    dims: tuple[Dim, ...]

    @property
    def dtype(self) -> Any:
        return _DTYPES[self.dtype_name]

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that shard the array."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    @property
    def partition_spec(self) -> PartitionSpec:
        return PartitionSpec(*(dim.axes if len(dim.axes) != 1 else dim.axes[0] for dim in self.dims))

    def __repr__(self) -> str:
        return f"{self.dtype_name}['{' '.join(map(str, self.dims))}']"

    def __or__(self, other: None) -> 'Maybe':
        return _either(self, other)


@dataclasses.dataclass(frozen=True, repr=False)
class Maybe:
    """`f32['M'] | None`: an array that some configurations omit."""

    inner: Any

    def __repr__(self) -> str:
        return f'{type_name(self.inner)} | None'


@dataclasses.dataclass(frozen=True, repr=False)
class Stacked:
    """`Array['layers', Layer]`: every array of `inner` with the leading dimension `dim`."""

    dim: Dim
    inner: Any

    def __repr__(self) -> str:
        return f"Array['{self.dim}', {type_name(self.inner)}]"

    def __or__(self, other: None) -> Maybe:
        return _either(self, other)


def _either(one: Any, other: Any) -> Maybe:
    if other is not None:
        raise ShardingError(f'{type_name(one)} | {type_name(other)}: a type may only be followed by | None')
    return Maybe(one)


def type_name(annotation: Any) -> str:
    """The annotation as written in the source."""
    return annotation.__name__ if isinstance(annotation, type) else repr(annotation)


_DTYPES: dict[str, Any] = {
    'f32': jnp.float32,
    'bf16': jnp.bfloat16,
    'f16': jnp.float16,
    'f8': jnp.float8_e4m3fn,
    'f8_e5m2': jnp.float8_e5m2,
    'i32': jnp.int32,
    'u32': jnp.uint32,
    'i8': jnp.int8,
    'u8': jnp.uint8,
    'bool_': jnp.bool_,
    'num': None,  # any dtype
    'key': jax.dtypes.prng_key,
}

if TYPE_CHECKING:

    class _Typed(jax.Array):  # type checkers treat every typed array as a jax.Array
        def __class_getitem__(cls, spec: str) -> Any: ...

    class f32(_Typed): ...  # noqa: N801

    class bf16(_Typed): ...  # noqa: N801

    class f16(_Typed): ...  # noqa: N801

    class f8(_Typed): ...  # noqa: N801

    class f8_e5m2(_Typed): ...  # noqa: N801

    class i32(_Typed): ...  # noqa: N801

    class u32(_Typed): ...  # noqa: N801

    class i8(_Typed): ...  # noqa: N801

    class u8(_Typed): ...  # noqa: N801

    class bool_(_Typed): ...  # noqa: N801

    class num(_Typed): ...  # noqa: N801

    class key(_Typed): ...  # noqa: N801

    class Array:
        def __class_getitem__(cls, item: Any) -> Any: ...
else:

    class _DType:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, spec: str) -> ArrayType:
            return ArrayType(self.name, parse_dims(spec))

        def __repr__(self) -> str:
            return f'shardlib.{self.name}'

    f32, bf16, f16, f8, f8_e5m2, i32, u32, i8, u8, bool_, num, key = map(_DType, _DTYPES)

    class Array:
        """`Array['layers', Layer]`: the arrays of `Layer`, stacked along a new leading dimension `layers`."""

        def __class_getitem__(cls, item: tuple[str, Any]) -> Stacked:
            if not isinstance(item, tuple) or len(item) != 2:
                raise ShardingError(f'Array[{item!r}] is not a type', fix="write Array['layers', Layer]")
            spec, inner = item
            for dim in reversed(parse_dims(spec)):
                inner = Stacked(dim, inner)
            return inner


@dataclass_transform()
def pytree_dataclass(cls: type) -> Any:
    """A frozen dataclass that JAX treats as a pytree. Every field has an array type or is itself a pytree_dataclass.

    With the class variable `own_sizes = True`, its dimension names have sizes of their own, as in a `scope()`.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    jax.tree_util.register_dataclass(cls, [field.name for field in dataclasses.fields(cls)], [])
    return cls


def plain(annotation: Any) -> Any:
    """The annotation, with Python's own unions such as `Layer | None` and `Optional[f32['M']]` converted to `Maybe`."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        alternatives = [inner for inner in typing.get_args(annotation) if inner is not types.NoneType]
        if any(map(is_array_annotation, alternatives)):
            if len(alternatives) > 1 or len(typing.get_args(annotation)) == 1:
                raise ShardingError(f'{annotation!r}: a type may only be followed by | None')
            return Maybe(alternatives[0])
    return annotation


def is_array_annotation(annotation: Any) -> bool:
    """Whether an annotation contains an array type."""
    annotation = plain(annotation)
    if isinstance(annotation, ArrayType | Maybe | Stacked):
        return True
    if typing.get_origin(annotation) in (tuple, list, dict):
        return any(is_array_annotation(argument) for argument in typing.get_args(annotation))
    return (
        isinstance(annotation, type)
        and dataclasses.is_dataclass(annotation)
        and any(is_array_annotation(hint) for hint in field_types(annotation).values())
    )


@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    """The annotation of each field of a pytree_dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def with_leading(array: ArrayType, leading: tuple[Dim, ...]) -> ArrayType:
    """The type of arrays stacked along leading dimensions. Raises ShardingError if an axis then shards two."""
    return ArrayType(array.dtype_name, parse_dims(' '.join(map(str, leading + array.dims)))) if leading else array


def map_type(f: Any, annotation: Any, path: str = '', leading: tuple[Dim, ...] = (), omit: tuple[str, ...] = ()) -> Any:
    """Maps f(path, array type) over the arrays of `annotation`. The fields to omit become None.

    With the class variable `flat = True`, the arrays inside a dataclass have its own path, as if they were its fields.

    `dict[str, T]`, `list[T]` and `tuple[T, ...]` have no known length, so each gives one value, which is a prefix of
    the pytree. f must return the same value for every array of T.
    """
    match annotation := plain(annotation):
        case ArrayType():
            return f(path, with_leading(annotation, leading))
        case Maybe(inner):
            return map_type(f, inner, path, leading, omit)
        case Stacked(dim, inner):
            return map_type(f, inner, path, (*leading, dim), omit)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (list, dict) or (origin is tuple and Ellipsis in arguments):
        every = arguments[1] if origin is dict else arguments[0]
        first, *others = jax.tree.leaves(map_type(f, every, f'{path}[...]', leading, omit))
        if any(other != first for other in others):
            raise ShardingError(
                f'{annotation!r}{path}: all its arrays must have the same type', fix='use a pytree_dataclass'
            )
        return first
    if origin is tuple:
        return tuple(map_type(f, inner, f'{path}[{i}]', leading, omit) for i, inner in enumerate(arguments))
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        fields = {}
        for name, inner in field_types(annotation).items():
            inner = plain(inner)
            is_optional = isinstance(inner, Maybe)
            is_array = isinstance(inner.inner if is_optional else inner, ArrayType)
            at = path if getattr(annotation, 'flat', False) and not is_array else f'{path}.{name}'.lstrip('.')
            fields[name] = None if is_optional and name in omit else map_type(f, inner, at, leading, omit)
        return annotation(**fields)
    if annotation is None or annotation is types.NoneType:
        return None
    raise ShardingError(f'{type_name(annotation)}{f" at {path}" if path else ""} is not an array type')


def make_partition_specs(annotation: Any) -> Any:
    """The `PartitionSpec` of every array of a type, as a pytree of the same structure."""
    return map_type(lambda _, array: array.partition_spec, annotation)


def make_shardings(annotation: Any, mesh: Any = None) -> Any:
    """The `NamedSharding` of every array of a type on `mesh` (default: the current mesh)."""
    mesh = current_mesh() if mesh is None else mesh

    def sharding(path: str, array: ArrayType) -> NamedSharding:
        check_axes_exist(array, mesh, path)
        return NamedSharding(mesh, array.partition_spec)

    return map_type(sharding, annotation)


def type_of(sharding: NamedSharding | None, ndim: int) -> ArrayType:
    """The type of arrays with this sharding, such as num['_/d _']. None: they are replicated."""
    spec = () if sharding is None else sharding.spec
    axes = ((a,) if isinstance(a, str) else tuple(a or ()) for a in (*spec, *[None] * (ndim - len(spec))))
    return ArrayType('num', tuple(Dim('_', one) for one in axes))


def make_abstract(
    annotation: Any, sizes: dict[str, int], mesh: Any = None, omit: tuple[str, ...] = (), num: Any = None
) -> Any:
    """Shapes, dtypes and shardings of a type, for `jax.eval_shape`, checkpoints and ahead-of-time compilation.

    Args:
        annotation: an array type or a type of array types.
        sizes: the global size of every named dimension; the size of a dimension `_`, by the path of its array.
        mesh: the mesh that shards the arrays (default: the current mesh).
        omit: names of `| None` fields to omit.
        num: the dtype of arrays whose type leaves it open.

    Raises:
        ShardingError: a dimension has no size, or its mesh axes do not divide it.
    """
    mesh = current_mesh() if mesh is None else mesh

    def abstract(path: str, array: ArrayType) -> jax.ShapeDtypeStruct:
        what = f'{path}: {array}' if path else f'{array}'
        check_axes_exist(array, mesh, path)
        if array.dtype is None and num is None:
            raise ShardingError(f'{what} has no dtype', fix='name one, such as f32')
        shape = []
        for dim in array.dims:
            name = path if dim.name == '_' else dim.name
            if name not in sizes and not name.isdecimal():
                raise ShardingError(f"{what} has the dimension '{dim.name}', but no size is given for it")
            size = int(name) if name.isdecimal() else sizes[name]
            check_divisible(dim, size, mesh, what)
            shape.append(size)
        dtype = jax.eval_shape(jax.random.key, 0).dtype if array.dtype_name == 'key' else array.dtype or num
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(mesh, array.partition_spec))

    return map_type(abstract, annotation, omit=omit)


def is_fully_sharded(annotation: Any, axes: tuple[str, ...] | None = None) -> bool:
    """Whether every array of a type is sharded over every one of `axes` (default: all axes of the current mesh)."""
    axes = axes if axes is not None else tuple(current_mesh().axis_names)
    return all(jax.tree.leaves(map_type(lambda _, array: set(axes) <= set(array.axes), annotation)))


def current_mesh() -> Any:
    """The mesh set by `jax.set_mesh`, abstract while a function is traced; or the one of `use_abstract_mesh`.

    Raises:
        ShardingError: no mesh is set.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ShardingError(
            'no mesh is set', fix="call jax.set_mesh(jax.make_mesh((4, 2), ('d', 't'))) or use it as a context"
        )
    try:
        concrete = jax.sharding.get_mesh()
    except ValueError:  # inside jit JAX provides only the abstract mesh
        return mesh
    return mesh if concrete.empty else concrete


def check_axes_exist(array: ArrayType, mesh: Any, what: str) -> None:
    """Raises ShardingError if the type names an axis that the mesh does not have."""
    for axis in array.axes:
        if axis not in mesh.shape:
            raise ShardingError(
                f"{f'{what}: ' if what else ''}{array} names the mesh axis '{axis}', which the mesh does not have",
                mesh=mesh,
                fix=f"name one of {', '.join(mesh.axis_names)}, or add '{axis}' to the mesh (size 1 when unused)",
            )


def check_divisible(dim: Dim, size: int, mesh: Any, what: str) -> None:
    """Raises ShardingError if the mesh axes of a dimension do not divide its size."""
    parts = 1
    for axis in dim.axes:
        parts *= mesh.shape[axis]
    if size % parts:
        raise ShardingError(
            f"{what}: dimension '{dim}' has size {size}, which is not divisible by its {parts} shards",
            mesh=mesh,
            fix=f'make {dim.name} a multiple of {parts} (nearest: {max(1, round(size / parts)) * parts}), '
            'or make the axes smaller',
        )
