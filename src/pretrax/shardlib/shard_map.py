"""`typed_shard_map`: the types in a function's signature give the sharding of its arguments and results."""

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
    """Runs a function on each device's slice of the arguments. The types in its signature give the slices.

    Inside, code is per device and communication is explicit. Arguments without an array type are passed unchanged. The
    mesh is the current one (`jax.set_mesh`). Arguments, results and annotated locals are checked. `jax.shard_map` runs
    with `check_vma=True`, so JAX tracks the axes over which each value varies. Each call traces the function again:
    wrap it in `jax.jit` if it is called often.

    Raises:
        ShardingError: an argument, a local or the result does not have its annotated type, or an argument that holds
            arrays has no array type.
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

        in_specs = tuple(
            None if value is None else make_partition_specs(hints[argument]) for argument, value in typed.items()
        )
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
                f"argument '{argument}' of {name} holds arrays, but its annotation is not an array type",
                fix="annotate it, as in x: f32['batch/d d_model']",
            )
    if 'return' not in hints:
        raise ShardingError(f'{name} needs a return type', fix="-> f32['batch/d d_model']")
    mesh = current_mesh()
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise ShardingError(
            f'{name} is already called per device',
            mesh=mesh,
            fix='use typechecked for functions called inside typed_shard_map',
        )


def _settle_all(spec: PartitionSpec, values: Any) -> Any:
    """Results that vary, for JAX, over exactly the axes that their types name. They were checked before."""
    named = {axis for axes in spec for axis in (axes if isinstance(axes, tuple) else (axes,))}
    return jax.tree.map(lambda x: settle(x, varying_axes(x) - named), values)
