"""The loop over a decoder's layers, and what each layer knows besides its input and its weights.

Letters: B batch, L length, M d_model.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture, LayerKind
from pretrax.model.matmul import gather
from pretrax.model.numerics import Formats
from pretrax.model.plan import ExecutionPlan
from pretrax.model.weights import Layer
from pretrax.shardlib import bool_, i32, num, pytree_dataclass, reduce_gradient_here, scan, scope, unroll


@pytree_dataclass
class Tokens:
    """What layers know of the tokens."""

    positions: i32['B/r/d/e L/c']  # in the token's document
    segments: i32['B/r/d/e L/c']  # the number of its document
    counted: bool_['B/r/d/e L/c'] | None  # tokens in the statistics of a router; None: no statistics


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """A layer: the decoder that it is part of, its window and positions, and the number formats of its products."""

    arch: Architecture
    plan: ExecutionPlan
    kind: LayerKind
    formats: Formats
    gathered: dict[str, jax.Array] | None = None  # whole weights by name, of a layer that runs in parts

    def gather(self, name: str, spec: str, w: Layer, x: jax.Array) -> jax.Array:
        """`matmul.gather` of a weight, once for all parts of the batch."""
        known = {} if self.gathered is None else self.gathered
        if name not in known:
            known[name] = gather(spec, getattr(w, name), x)
        return known[name]


Run = Callable[[jax.Array, Tokens, LayerSpec], tuple[jax.Array, Any]]
Body = Callable[[jax.Array, Layer, LayerSpec], tuple[jax.Array, Any]]


def over_layers(
    body: Body,
    x: num['B/r/d/e L/c/t M'],
    layers: Layer,
    seeds: jax.Array | None,
    arch: Architecture,
    plan: ExecutionPlan,
) -> tuple[num['B/r/d/e L/c/t M'], Any]:
    """x after all layers, and the other results of `body`, stacked over the layers.

    Args:
        body: x, the weights of a layer, its spec -> x, another result.
        x: hidden states.
        layers: stacked weights: of the whole decoder, or of one pipeline stage.
        seeds: u32[layers, 2] of stochastic rounding; None: nothing is rounded at random.
        arch: the decoder.
        plan: how it runs.
    """
    loop, kinds, results = unroll if plan.unrolled else scan, arch.kinds, []
    for run, formats in plan.numerics.runs(layers.q.shape[0]):  # layers with the same formats; mostly all of them
        first = run.start or 0
        bodies = [
            functools.partial(
                _one_layer, body, LayerSpec(arch, plan, kinds[(first + i) % len(kinds)], Formats(formats))
            )
            for i in range(len(kinds))
        ]
        stacked = jax.tree.map(lambda w, run=run: w if run == slice(None) else w[run], (layers, seeds))
        x, result = loop(bodies, x, stacked, plan.saved_in_layers)
        results.append(result)
    return x, jax.tree.map(lambda *runs: jnp.concatenate(runs), *results)


def in_parts(run: Run, x: jax.Array, tokens: Tokens, layer: LayerSpec) -> tuple[jax.Array, Any]:
    """`run` on parts of the sequences. The products of one part can hide what another sends over t."""
    parts, results = math.gcd(layer.plan.batch_parts, x.shape[0]), []
    if parts == 1:
        return run(x, tokens, layer)
    layer, rows = dataclasses.replace(layer, gathered={}), x.shape[0] // parts
    for first in range(0, x.shape[0], rows):
        here = slice(first, first + rows)
        with scope():
            part = Tokens(tokens.positions[here], tokens.segments[here], None)
            results.append(run(x[here], part, layer)[0])
    return jnp.concatenate(results), None


def _one_layer(
    body: Body, spec: LayerSpec, x: jax.Array, stacked: tuple[Layer, jax.Array | None]
) -> tuple[jax.Array, Any]:
    weights, seed = stacked
    weights = reduce_gradient_here(weights, wires=spec.plan.wires)
    return body(x, weights, dataclasses.replace(spec, formats=dataclasses.replace(spec.formats, seed=seed)))
