"""The loop over a decoder's layers.

Letters: B batch, L length, M d_model.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture
from pretrax.model.layer_spec import LayerSpec, Tokens
from pretrax.model.numerics import Formats
from pretrax.model.plan import ExecutionPlan
from pretrax.model.stack import Stack, segments
from pretrax.model.weights import Layer, kinds_of
from pretrax.shardlib import i32, num, reduce_gradient_here, scan, scope, unroll

Run = Callable[[jax.Array, Tokens, LayerSpec], tuple[jax.Array, Any]]
Body = Callable[[jax.Array, Layer, LayerSpec], tuple[jax.Array, Any]]


def scan_layers(
    body: Body,
    x: num['B/r/d/e L/c/t M'],
    layers: Layer,
    arch: Architecture,
    plan: ExecutionPlan,
    *,
    seeds: jax.Array | None = None,
    chunk: i32[''] | None = None,
    kept: Collection[int] = (),
) -> tuple[num['B/r/d/e L/c/t M'], Any, num['kept B/r/d/e L/c/t M'] | None]:
    """x after all layers; the other results of `body`, stacked over the layers; and the outputs of the layers `kept`.

    Args: see `Transformer.layers`. `body` computes one layer: x, its weights, its spec -> x, another result.
    """
    kinds = kinds_of(layers, arch)
    first = 0 if chunk is None else chunk * len(kinds)
    numbers = first + jnp.arange(len(kinds), dtype=jnp.int32) if arch.drops else None
    weights, more = layers.named(), {'seed': seeds, 'number': numbers}
    assert len(plan.numerics.blocks) >= len(kinds), 'the plan has number formats for fewer layers'
    specs = [LayerSpec(arch, plan, *one) for one in zip(kinds, map(Formats, plan.numerics.blocks), strict=False)]
    bodies = [functools.partial(_one_layer, body, spec) for spec in specs]
    alike = [(spec.kind, spec.formats) for spec in specs]
    bodies = [bodies[alike.index(one)] for one in alike]  # equal layers have one body, which `unroll` traces once
    carry = x
    if kept:  # the states of those layers are carried along: each layer writes its own, or leaves the others
        more |= {'keeps': jnp.array([i in kept for i in range(len(kinds))]), 'slot': _slots(kept, len(kinds))}
        bodies = [functools.partial(_keeping, one) for one in bodies]
        carry = x, jnp.zeros((len(kept), *x.shape), x.dtype)
    more = {name: values for name, values in more.items() if values is not None}
    stack = Stack(weights | more, [Layer.fields_in(arch, kind) | more.keys() for kind in kinds])
    if plan.unrolled:
        own = [stack.layer(i) for i in range(len(kinds))]
        carry, results = unroll(bodies, carry, own, plan.saved_in_layers)
        return _results(carry, join_results(results, jnp.stack), kept)
    parts = []
    for segment in segments([(spec.kind, spec.formats) for spec in specs]):
        cycle = bodies[segment.start : segment.start + segment.length]
        part = functools.partial(stack.cycle_layer, segment)
        carry, results = scan(cycle, carry, stack.cycles(segment), plan.saved_in_layers, part)
        parts.append(join_results(results, _interleaved))
    return _results(carry, join_results(parts, jnp.concatenate), kept)


def _slots(kept: Collection[int], n_layers: int) -> i32['layers']:
    """For each layer, the number of kept layers before it: where its states belong if it is kept."""
    return jnp.array([sum(other < i for other in kept) for i in range(n_layers)], jnp.int32)


def _keeping(body: Any, carry: tuple[jax.Array, jax.Array], own: dict[str, jax.Array]) -> tuple[Any, Any]:
    """A layer that writes x into its slot of the kept states, if it is one of those that are kept."""
    x, states = carry
    keeps, slot = own.pop('keeps'), own.pop('slot')
    x, result = body(x, own)
    there = jax.lax.dynamic_index_in_dim(states, slot, keepdims=False)
    return (x, jax.lax.dynamic_update_index_in_dim(states, jnp.where(keeps, x, there), slot, 0)), result


def _results(carry: Any, results: Any, kept: Collection[int]) -> tuple[jax.Array, Any, jax.Array | None]:
    x, states = carry if kept else (carry, None)
    return x, results, states


def _interleaved(results: Sequence[jax.Array]) -> jax.Array:
    """[cycles, ...] of each layer of a cycle, in the order of the layers."""
    together = jnp.stack(results, axis=1)
    return together.reshape(-1, *together.shape[2:])


def join_results(results: Sequence[Any], join: Callable[[Sequence[jax.Array]], jax.Array]) -> Any:
    """Joins each array of the results. A result, or an array of it, is None for layers that do not have it."""

    def join_known(*arrays: jax.Array | None) -> jax.Array | None:
        known = [array for array in arrays if array is not None]
        return join(known) if known else None

    found = [result for result in results if result is not None]
    return jax.tree.map(join_known, *found, is_leaf=lambda x: x is None) if found else None


def in_parts(run: Run, x: jax.Array, tokens: Tokens, layer: LayerSpec) -> tuple[jax.Array, Any]:
    """`run` on parts of the sequences. The products of one part can hide what another sends over t."""
    parts, results = math.gcd(layer.plan.batch_parts, x.shape[0]), []
    if parts == 1:
        return run(x, tokens, layer)
    layer, rows = dataclasses.replace(layer, gathered={}), x.shape[0] // parts
    for first in range(0, x.shape[0], rows):
        here = slice(first, first + rows)
        with scope():
            seeds = None if tokens.seeds is None else tokens.seeds[here]
            part = Tokens(tokens.positions[here], tokens.segments[here], None, seeds)
            results.append(run(x[here], part, layer))
    outputs, maxima = zip(*results, strict=True)  # statistics that are sums need the whole batch
    return jnp.concatenate(outputs), jax.tree.map(lambda *x: functools.reduce(jnp.maximum, x), *maxima)


def _one_layer(body: Body, spec: LayerSpec, x: jax.Array, own: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
    seed, number = own.pop('seed', None), own.pop('number', None)
    weights = reduce_gradient_here(Layer.from_named(own), wires=spec.plan.wires)
    formats = dataclasses.replace(spec.formats, seed=seed, sums=spec.plan.sums)
    with scope():  # the heads of layers may have different sizes
        return body(x, weights, dataclasses.replace(spec, formats=formats, number=number))
