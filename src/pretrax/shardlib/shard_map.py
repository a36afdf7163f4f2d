"""`typed_shard_map`: the types in a function's signature say how its arguments and results lie on the mesh."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from pretrax.shardlib.check import check, scope
from pretrax.shardlib.errors import ShardingError
from pretrax.shardlib.replication import settle, varying_axes, verified_later, verify
from pretrax.shardlib.typechecked import array_hints, typechecked
from pretrax.shardlib.types import current_mesh, make_partition_specs


def typed_shard_map[F: Callable](function: F) -> F:
    """Runs a function once per device, on its slice of every argument, as the signature's types say.

    Inside, code is per device and communication is explicit. Arguments whose annotation holds no array type are passed
    as they are. The mesh is the one in force (`jax.set_mesh`). Arguments, results and annotated locals are checked.
    `jax.shard_map` runs with `check_vma=True`: JAX tracks over which axes each value varies. Every call traces the
    function anew: put `jax.jit` around what is called often.

    Raises:
        ShardingError: an argument, a local or the result does not have its type; arrays in an argument without one.
    """
    inner = typechecked(function)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        name = function.__name__
        hints = array_hints(function, signature)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        typed = {argument: value for argument, value in bound.arguments.items() if argument in hints}
        _check_call(name, hints, {a: value for a, value in bound.arguments.items() if a not in typed})
        with scope():
            for argument, value in typed.items():
                check(value, hints[argument], f"argument '{argument}{{}}' of {name}")

        def per_device(*values: Any) -> Any:
            local = inspect.BoundArguments(signature, bound.arguments | dict(zip(typed, values, strict=True)))  # type: ignore[arg-type]
            with scope(), verified_later():
                result = inner(*local.args, **local.kwargs)
            return jax.tree.map(_settle_all, out_specs, result)

        in_specs = tuple(make_partition_specs(hints[argument]) for argument in typed)
        out_specs = make_partition_specs(hints['return'])
        mesh = current_mesh()
        values = tuple(typed.values())
        if jax.sharding.AxisType.Explicit in mesh.axis_types:  # with automatic axes, jit moves the arguments
            values = jax.sharding.reshard(values, in_specs)
        sharded = jax.shard_map(per_device, in_specs=in_specs, out_specs=out_specs, check_vma=True)
        program = jax.jit(sharded, inline=True)
        for equation in program.trace(*values).jaxpr.eqns:
            if equation.primitive.name == 'shard_map':
                verify(equation.params['jaxpr'])
        return program(*values)

    return mapped  # type: ignore[return-value]


def _check_call(name: str, hints: dict[str, Any], untyped: dict[str, Any]) -> None:
    for argument, value in untyped.items():
        if any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value)):
            raise ShardingError(
                f"argument '{argument}' of {name} holds arrays, but its annotation does not type them",
                mend="annotate it, as in x: f32['batch/d d_model']",
            )
    if 'return' not in hints:
        raise ShardingError(f'{name} needs the type of its result', mend="-> f32['batch/d d_model']")
    mesh = current_mesh()
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise ShardingError(
            f'{name} is called per device already', mesh=mesh, mend='use typechecked for functions called inside'
        )


def _settle_all(spec: PartitionSpec, values: Any) -> Any:
    """The results, checked before, as JAX wants them: varying over the axes that their types name, and no others."""
    named = {axis for axes in spec for axis in (axes if isinstance(axes, tuple) else (axes,))}
    return jax.tree.map(lambda x: settle(x, varying_axes(x) - named), values)
