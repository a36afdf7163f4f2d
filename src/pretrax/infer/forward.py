"""The forward pass of the decoder against its cache: one for reading prompts, for writing, and for checking proposals.

A batch is [rows, columns]: a row belongs to a sequence, and each token has its position. Writing is [slots, 1], reading a part
of a prompt is [1 a device, chunk]. The layers see the tokens of all rows as one row, so the parts of the decoder run here as
they are, and shard the tokens over t between blocks. Only attention knows rows: it reads the cache.

Letters: B batch (1 on each device), L tokens of all rows on a device, R rows, C columns; see also model/transformer.py.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax.typing import DTypeLike

from pretrax.infer.cache import Pages, Tables, write
from pretrax.infer.kernels import Kernel, attention
from pretrax.infer.weights import Outer, ServingLayer
from pretrax.model.architecture import Architecture
from pretrax.model.attention import output_projection, queries_keys_values
from pretrax.model.layers import LayerSpec, Tokens
from pretrax.model.norm import norm
from pretrax.model.plan import ExecutionPlan
from pretrax.model.softcap import softcap
from pretrax.model.transformer import embed, mlp
from pretrax.model.weight_only import scaled_product
from pretrax.model.weights import Layer
from pretrax.shardlib import all_gather, einsum, f32, i32, num, scope, typechecked


def read_tokens(
    w: Outer,
    layers: tuple[ServingLayer, ...],
    cache: tuple[Pages, ...],
    tokens: i32['R/r/d/e C'],
    positions: i32['R/r/d/e C'],
    tables: Tables,
    arch: Architecture,
    plan: ExecutionPlan,
    dtype: DTypeLike,
    kernel: Kernel,
) -> tuple[num['B/r/d/e L/c/t M'], tuple[Pages, ...]]:
    """The hidden states of the tokens after all layers, and the cache with their keys and values.

    Args:
        w: the weights outside the layers.
        layers: the weights of each layer.
        cache: the pages of each layer.
        tokens: token ids.
        positions: of each token in its sequence; -1: padding, whose results mean nothing.
        tables: the pages of each row.
        arch: the decoder.
        plan: how its experts are multiplied.
        dtype: compute dtype.
        kernel: for attention.
    """
    # No capacity of experts: an answer must not depend on the others that are written with it.
    arch = dataclasses.replace(arch, capacity=None)
    columns = jnp.maximum(positions, 0).reshape(1, -1)
    x = embed(w.embedding(), w.positions, tokens.reshape(1, -1), columns, arch, dtype)
    after = []
    for i, (layer, pages) in enumerate(zip(layers, cache, strict=True)):
        kind = arch.kinds[i % len(arch.kinds)]
        table = tables.ring if kind.window else tables.full
        with scope():  # tables and pages of layers with a window have sizes of their own
            spec = LayerSpec(arch, plan, kind, layer.scales.formats())
            x, pages = _layer(x, layer.weights, pages, columns, positions, table, spec, kernel)
        after.append(pages)
    return x, tuple(after)


@typechecked
def _layer(
    x: num['B/r/d/e L/c/t M'],
    w: Layer,
    pages: Pages,
    columns: i32['B/r/d/e L/c'],
    positions: i32['R/r/d/e C'],
    table: i32['R/r/d/e blocks'],
    layer: LayerSpec,
    kernel: Kernel,
) -> tuple[num['B/r/d/e L/c/t M'], Pages]:
    """`transformer.block`, whose queries see the cached keys and values."""
    q, k, v = queries_keys_values(norm(x, w.norm1, w.norm1_bias, layer.arch), w, columns, layer)
    pages = write(pages, k[0], v[0], table, positions)
    rows = q.reshape(*positions.shape, *q.shape[2:])
    y = attention(kernel, rows, pages, table, positions, layer.arch.scores(layer.kind)).reshape(q.shape)
    h: num['B/r/d/e L/c/t M'] = x + output_projection(y, w, layer)
    known = Tokens(columns, jnp.ones_like(columns), counted=None)
    out, _ = mlp(norm(h, w.norm2, w.norm2_bias, layer.arch), w, known, layer)
    return h + out, pages


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
    return softcap(logits, arch.final_softcap)
