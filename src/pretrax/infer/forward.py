"""The forward pass of the decoder against its cache: one for reading prompts, for writing, and for checking proposals.

A batch is [rows, columns]: a row belongs to a sequence, and each token has its position. Writing is [slots, 1], reading
a part of a prompt is [1 a device, chunk]. The layers see the tokens of all rows as one row, so the parts of the decoder
run here as they are, and shard the tokens over t between blocks. Only attention and layers with a state know rows: they
read the cache.

A layer with a state keeps it in the place of keys and values, a row for each slot. A state has seen every token of its
sequence once and cannot go back. So tokens are read in order and once, a prompt that begins like another one is read
again, and no tokens are proposed.

Letters: B batch (1 on each device), L tokens of all rows on a device, R rows, C columns; see also model/transformer.py.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pretrax.infer.cache import Pages, Tables, write
from pretrax.infer.kernels import Kernel, attention
from pretrax.infer.weights import Outer, ServingLayer
from pretrax.model.architecture import Architecture, LayerKind
from pretrax.model.attention import AttentionWeights, gate_output, output_projection, queries_keys_values
from pretrax.model.block import block
from pretrax.model.ends import embed, finish_logits
from pretrax.model.latent_attention import absorbed_queries, latent_queries, latents, values_of_latents
from pretrax.model.layer_spec import LayerSpec, Tokens
from pretrax.model.norm import norm
from pretrax.model.plan import ExecutionPlan
from pretrax.model.recurrent import RecurrentWeights, State, mix, projections, state_output
from pretrax.model.weight_only import scaled_product
from pretrax.model.weights import Layer
from pretrax.shardlib import all_gather, einsum, f32, i32, num, scope, typechecked


def read_tokens(
    w: Outer,
    layers: tuple[ServingLayer, ...],
    cache: tuple[Pages | State, ...],
    tokens: i32['R/r/d/e C'],
    positions: i32['R/r/d/e C'],
    tables: Tables,
    arch: Architecture,
    plan: ExecutionPlan,
    dtype: DTypeLike,
    kernel: Kernel,
) -> tuple[num['B/r/d/e L/c/t M'], tuple[Pages | State, ...]]:
    """The hidden states of the tokens after all layers, and the cache with these tokens.

    Args:
        w: the weights outside the layers.
        layers: the weights of each layer.
        cache: the pages of each layer, or its states.
        tokens: token ids.
        positions: of each token in its sequence; -1: padding, whose results mean nothing.
        tables: the pages and the slot of each row.
        arch: the decoder.
        plan: how its experts are multiplied.
        dtype: compute dtype.
        kernel: for attention.
    """
    # No capacity of experts: an answer must not depend on the others that are written with it.
    arch = arch.replace({'experts.capacity': None})
    columns = jnp.maximum(positions, 0).reshape(1, -1)
    x = embed(w.embedding(), w.positions, tokens.reshape(1, -1), columns, arch, dtype)

    @functools.partial(jax.jit, static_argnames='kind', inline=True)  # layers of a kind are traced once
    def read(x: jax.Array, layer: ServingLayer, kept: Any, kind: LayerKind) -> tuple[jax.Array, Any]:
        with scope():  # tables and pages of layers with a window have sizes of their own
            spec = LayerSpec(arch, plan, kind, layer.scales.formats())
            return _layer(x, layer.weights, kept, columns, positions, tables, spec, kernel)

    after = []
    for layer, kept, kind in zip(layers, cache, arch.kinds, strict=True):
        x, kept = read(x, layer, kept, kind)
        after.append(kept)
    return x, tuple(after)


@typechecked
def _layer(
    x: num['B/r/d/e L/c/t M'],
    w: Layer,
    kept: Any,  # `Pages` or `State`; a type that is checked cannot be a union
    columns: i32['B/r/d/e L/c'],
    positions: i32['R/r/d/e C'],
    tables: Tables,
    layer: LayerSpec,
    kernel: Kernel,
) -> tuple[num['B/r/d/e L/c/t M'], Any]:
    """`block.block` with a layer's cache: attention reads cached keys and values, or latents; other mixers states.

    Returns x and the cache after these tokens.
    """
    scores = layer.scores
    table = tables.ring if layer.kind.window else tables.full

    def cached_mixer(h: jax.Array, w: Layer, tokens: Tokens, layer: LayerSpec) -> jax.Array:
        nonlocal kept
        if w.recurrent is not None:
            out, kept = read_into_states(h, w.recurrent, kept, tables.slot, positions, layer)
        else:
            assert w.projections is not None
            out, kept = cached_attention(h, w.projections, kept, tokens, layer)
        return norm(out, w.norm1_after, None, layer.arch)

    def cached_attention(
        h: jax.Array, w: AttentionWeights, kept: Any, tokens: Tokens, layer: LayerSpec
    ) -> tuple[jax.Array, Any]:
        if w.latent is not None:
            q = absorbed_queries(latent_queries(h, w.latent, tokens.positions, layer), w.latent, layer)
            kept = write(kept, latents(h, w.latent, tokens.positions, layer)[0][:, None], None, table, positions)
        else:
            q, k, v = queries_keys_values(h, w, tokens.positions, layer)
            kept = write(kept, k[0], v[0], table, positions)
        rows = q.reshape(*positions.shape, *q.shape[2:])
        y = attention(kernel, rows, kept, table, positions, scores, w.sinks).reshape(q.shape)
        y = y if w.latent is None else values_of_latents(y, w.latent, layer)
        return output_projection(gate_output(y, h, w, layer), w, layer), kept

    x, _ = block(x, w, Tokens(columns, jnp.ones_like(columns), counted=None), layer, cached_mixer)
    return x, kept


@typechecked
def final_states(x: num['B/r/d/e L/c/t M'], w: Outer, arch: Architecture) -> num['B/r/d/e L/c M']:
    """The hidden states after the last norm."""
    return all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', norm(x, w.norm, w.norm_bias, arch))


@typechecked
def logits_of(h: num['B/r/d/e L/c M'], w: Outer, arch: Architecture) -> f32['B/r/d/e L/c V/t']:
    """The logits, in f32."""
    spec, table = 'B/r/d/e L/c M, V/t M -> B/r/d/e L/c V/t', w.unembedding()
    if w.unembed_scale is None:
        logits = einsum(spec, h, table, dot=functools.partial(jnp.einsum, preferred_element_type=jnp.float32))
    else:
        logits = scaled_product(spec, h, table, w.unembed_scale, jnp.float32)
    return finish_logits(logits, w.unembed_bias, arch)


def read_into_states(
    h: num['B/r/d/e L/c/t M'],
    w: RecurrentWeights,
    states: State,
    slot: i32['R/r/d/e'],
    positions: i32['R/r/d/e C'],
    layer: LayerSpec,
) -> tuple[num['B/r/d/e L/c/t M'], State]:
    """The output of a layer with a state, to be added to the residual stream, and the states after the tokens.

    Args:
        h: the tokens of all rows, as one row.
        w: weights of the layer.
        states: of every slot.
        slot: of each row. If there are as many rows as slots, row i is slot i.
        positions: of each token in its sequence, ascending. 0 begins a sequence, with an empty state; -1: padding after
            the tokens of a row, which changes no state.
        layer: the kind of the layer.
    """
    x = projections(h, w, layer)
    with scope():  # here a row is a sequence
        rows = jax.tree.map(lambda a: a.reshape(*positions.shape, *a.shape[2:]), x)
        real = (positions >= 0)[..., None]
        steps = jnp.where(real, rows.a, -jnp.inf)  # of size 0
        beta = None if rows.beta is None else jnp.where(real, rows.beta, -jnp.inf)
        rows = dataclasses.replace(rows, a=steps, beta=beta)
        every = positions.shape[0] == states.state.shape[0]
        begins = (positions[:, 0] == 0)[:, None, None, None]
        before = jax.tree.map(lambda a: jnp.where(begins, 0, a if every else a[slot]), states)
        y, state = mix(rows, w, jnp.ones_like(positions), layer, before)
        count = jnp.sum(real, axis=1)  # [R, 1]

        def last(before: jax.Array, here: jax.Array) -> jax.Array:
            at = count + jnp.arange(before.shape[1])
            tokens = jnp.concatenate([before, here.astype(before.dtype)], axis=1)
            return jnp.take_along_axis(tokens, at[..., None, None], axis=1)

        after = State(last(before.q, rows.q), last(before.k, rows.k), last(before.v, rows.v), state)
        if not every:
            after = jax.tree.map(lambda a, one: a.at[slot].set(one), states, after)
    return state_output(y.reshape(x.v.shape), x.z, w, layer), after
