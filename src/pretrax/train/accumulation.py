"""Sums of the gradients of a step: over its micro-batches, and over the devices that have copies of a weight."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pretrax.model.axes import TOKENS
from pretrax.model.loss import is_maximum
from pretrax.shardlib import axis_size, defer_reduction, psum, scope, zero_gradient


def sum_micro_batches(gradient: Callable[..., Any], weights: Any, micros: Any, survey: tuple[Any, ...]) -> Any:
    """The sums over micro-batches of `gradient(weights, micro-batch, its number, *survey)`, and of its other results.

    Args:
        micros: the batch, with a first dimension that counts micro-batches.
    """

    def add(total: Any, micro: tuple[Any, Any]) -> tuple[Any, Any]:
        new, others = gradient(weights, *micro, *survey)
        return jax.tree.map(jnp.add, total, new), others

    n_micros = len(jax.tree.leaves(micros)[0])
    total, others = jax.lax.scan(add, zero_gradient(weights), (micros, jnp.arange(n_micros)))
    return total, reduce_tables(others, lambda x: jnp.sum(x, axis=0), lambda x: jnp.max(x, axis=0))


def reduce_tables(statistics: Any, total: Callable[..., Any], largest: Callable[..., Any]) -> Any:
    """Applies `largest` to the arrays that are maxima, and `total` to the others."""

    def reduce(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        return (largest if is_maximum(path) else total)(x)

    return jax.tree_util.tree_map_with_path(reduce, statistics)


def survey_step(survey: Callable[..., Any] | None, weights: Any, micros: Any) -> tuple[Any, ...]:
    """(The sums of `Model.survey` over all micro-batches of a step,), or () for None."""
    if survey is None:
        return ()

    def add(_: None, micro: Any) -> tuple[None, Any]:
        with scope():
            return None, survey(weights, micro)

    sums = jax.lax.scan(add, None, micros)[1]
    return (jax.tree.map(lambda x: psum(TOKENS, jnp.sum(x, axis=0)), sums),)


def defer_replicas(weights: Any, by_layer: bool) -> Any:
    """Defers the sum of a gradient over the axes that replicate its weight to once per step, not per layer and pass.

    With `by_layer`, the matrices of `weights.layers` are left out: the loop over layers reduces their gradients as it
    makes them (`reduce_gradient_here`).
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes

    def defer(path: tuple[Any, ...], w: jax.Array) -> jax.Array:
        varying = jax.typeof(w).manual_axis_type.varying
        in_loop = by_layer and path[0].name == 'layers' and 'd' in varying
        return defer_reduction(' '.join(a for a in axes if a not in varying and not (in_loop and axis_size(a) > 1)), w)

    return jax.tree_util.tree_map_with_path(defer, weights)


@jax.named_scope('gradient_reduction')
def reduce_replicas(gradient: jax.Array, w: jax.Array, wires: Mapping[str, DTypeLike]) -> jax.Array:
    """Sums the gradient of a weight over the axes that replicate it, in the dtype that `wires` has for an axis."""
    left = sorted(jax.typeof(gradient).manual_axis_type.varying - jax.typeof(w).manual_axis_type.varying)
    return psum(' '.join(left), gradient, wires=wires) if left else gradient
