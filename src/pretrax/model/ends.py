"""What comes before and after the layers: the embedding, the last norm and the unembedding.

Letters: B batch, L length, M d_model, V vocabulary, P learned positions.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pretrax.model.architecture import Architecture
from pretrax.model.dropout import drop
from pretrax.model.matmul import add_bias, product
from pretrax.model.norm import norm
from pretrax.model.numerics import Format
from pretrax.model.scores import softcap
from pretrax.model.weights import Ends, Weights
from pretrax.shardlib import all_gather, f32, i32, num, psum_scatter, take, typechecked, u32


def gather_ends(w: Weights, dtype: DTypeLike, sums: DTypeLike | None = None) -> Ends:
    """The weights before and after the layers. Gradients of tables are summed over d in dtype `sums`; None: f32."""
    embedding = unembedding = all_gather('V/t M/d -> V/t M', w.embed, wire=dtype, sums=sums)
    if w.unembed is not None:
        unembedding = all_gather('V/t M/d -> V/t M', w.unembed, wire=dtype, sums=sums)
    return Ends(embedding, w.positions, w.norm, w.norm_bias, unembedding, w.unembed_bias)


@typechecked
def embed(
    table: num['V/t M'],
    learned: num['P/t M/d'] | None,
    tokens: i32['B/r/d/e L/c'],
    positions: i32['B/r/d/e L/c'],
    arch: Architecture,
    dtype: DTypeLike,
    seeds: u32['B/r/d/e L/c two'] | None = None,  # for dropout
) -> num['B/r/d/e L/c/t M']:
    """The input of the first layer: the embedding of each token, plus that of its position if positions are learned."""
    x = take('V/t M, B/r/d/e L/c -> B/r/d/e L/c M', table, tokens).astype(dtype)  # partial over t
    if arch.embedding.scale:
        x = x * jnp.asarray(math.sqrt(arch.d_model), dtype)  # rounded to dtype, as the released models were trained
    if arch.embedding.multiplier != 1:
        x = x * jnp.asarray(arch.embedding.multiplier, dtype)
    if learned is not None:
        of_positions = all_gather('P/t M/d -> P/t M', learned, wire=dtype)
        x = x + take('P/t M, B/r/d/e L/c -> B/r/d/e L/c M', of_positions, positions).astype(dtype)
    return drop(psum_scatter('B/r/d/e L/c M -> B/r/d/e L/c/t M', x), seeds, arch.embedding.dropout)


@typechecked
def unembed(ends: Ends, x: num['B/r/d/e L/c/t M'], arch: Architecture, head: Format) -> num['B/r/d/e L/c V/t']:
    """The logits, from the hidden states after the last layer."""
    h = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', norm(x, ends.norm, ends.norm_bias, arch))
    logits = product('B/r/d/e L/c M, V/t M -> B/r/d/e L/c V/t', h, ends.unembedding, head)
    return finish_logits(logits, ends.unembed_bias, arch)


def finish_logits(logits: jax.Array, bias: f32['V/t'] | None, arch: Architecture) -> jax.Array:
    """The logits, from the products of hidden states and the unembedding."""
    return softcap(arch.head.multiplier * add_bias(logits, bias), arch.head.softcap)
