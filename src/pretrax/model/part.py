"""What the file of a part of a layer, such as attention, declares about the weights of the part."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, dataclass_transform

import jax
from jax.tree_util import GetAttrKey

from pretrax.model.architecture import Architecture, LayerKind
from pretrax.shardlib.types import ArrayType, Maybe, field_types, map_type, plain

Axes = int | tuple[int, ...]


class Part:
    """The base class of the weights of a part. A field is a weight, or a part inside this one.

    In files, patterns and reports a weight has the name of its field, whatever part it is in: `layers.q`. So no two
    parts of a layer have a weight of the same name. A field that a layer does not have is None.
    """

    flat: ClassVar = True  # see `shardlib.types.map_type`

    initial: ClassVar[Mapping[str, Callable[[jax.Array, tuple[int, ...]], jax.Array]]] = {}
    """key, shape -> initial values, for the weights that do not begin as `weights.init_weights` says."""

    @classmethod
    def optional(cls, arch: Architecture, kind: LayerKind) -> Mapping[str, bool]:
        """Whether a layer of this kind has each of the fields that may be None."""
        del arch, kind
        return {}

    @classmethod
    def fields_in(cls, arch: Architecture, kind: LayerKind) -> set[str]:
        """The names of all weights and parts in a layer of this kind."""
        has, found = cls.optional(arch, kind), set[str]()
        for name, part in _fields(cls):
            if has.get(name, True):
                found |= {name} if part is None else {name} | part.fields_in(arch, kind)
        return found

    @classmethod
    def from_named(cls, weights: Mapping[str, Any]) -> Self:
        """These weights by name. A part inside this one that gets no weight is None."""
        values = {}
        for name, part in _fields(cls):
            if part is None:
                values[name] = weights.get(name)
            else:
                has_any = any(weights.get(one) is not None for one in weight_types(part))
                values[name] = part.from_named(weights) if has_any else None
        return cls(**values)

    def named(self) -> dict[str, Any]:
        """The weights by name, without those that are None."""
        return {
            name: w
            for name, w in zip(weight_types(type(self)), _values(self, type(self)), strict=True)
            if w is not None
        }


@dataclass_transform()
def flat_dataclass(cls: Any) -> Any:
    """A `pytree_dataclass` of parts whose leaves JAX sees by the names of the weights, without the parts."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = tuple(weight_types(cls))
    keys = tuple(map(GetAttrKey, names))
    jax.tree_util.register_pytree_with_keys(
        cls,
        lambda whole: (tuple(zip(keys, _values(whole, cls), strict=True)), None),
        lambda _, children: cls.from_named(dict(zip(names, children, strict=True))),
        lambda whole: (_values(whole, cls), None),
    )
    return cls


@functools.cache
def _fields(part: type[Part]) -> tuple[tuple[str, type[Part] | None], ...]:
    """The name of each field, and its type if it is a part."""

    def part_in(annotation: Any) -> type[Part] | None:
        annotation = plain(annotation)
        inner = annotation.inner if isinstance(annotation, Maybe) else annotation
        return inner if isinstance(inner, type) and issubclass(inner, Part) else None

    return tuple((name, part_in(annotation)) for name, annotation in field_types(part).items())


def _values(part: Part | None, cls: type[Part]) -> list[Any]:
    """The weights in the order of the fields, None for those that are absent."""
    if part is None:
        return [None] * len(weight_types(cls))
    found = []
    for name, inner in _fields(cls):
        value = getattr(part, name)
        found += [value] if inner is None else _values(value, inner)
    return found


@functools.cache
def all_fields(part: type[Part]) -> frozenset[str]:
    """The names of all weights and parts in a part."""
    return frozenset(name for name, _ in _fields(part)).union(*(all_fields(one) for _, one in _fields(part) if one))


@functools.cache
def weight_types(part: Any) -> dict[str, ArrayType]:
    """The type of each weight by name."""
    found = {}
    map_type(lambda path, array: found.setdefault(path.rpartition('.')[2], array), part)
    return found


_HEADS = ('H', 'K', 'K_global', 'N_key', 'N_state')


@functools.cache
def matrices(part: Any) -> dict[str, tuple[Axes, Axes]]:
    """The axes of the inputs and of the outputs of each matrix, by name; axis 0 counts the layers.

    A matrix is what products may get in another dtype, `num`. Heads and their width are one dimension of it, and each
    expert has a matrix of its own. A router is not one: each of its columns belongs to an expert, so Adam updates it.
    """
    found = {}
    for name, array in weight_types(part).items():
        groups: list[list[int]] = []
        for axis, dim in enumerate(array.dims):
            if axis and array.dims[axis - 1].name in _HEADS:
                groups[-1].append(axis + 1)
            elif dim.name != 'E':
                groups.append([axis + 1])
        if array.dtype_name == 'num':
            inputs, outputs = (tuple(group) if len(group) > 1 else group[0] for group in groups)
            found[name] = inputs, outputs
    return found
