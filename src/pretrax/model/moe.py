"""The feed-forward of a mixture of experts: a router sends each token to a few of many feed-forwards.

Letters: B batch, L length, M d_model, E experts, X experts per token, F feed-forward of an expert, F_shared of the shared
expert, N slots (rows in which the tokens of an expert are adjacent), C slots of one expert in one sequence.
Mesh axes: axes.py. A device has its slice over t of its experts (all experts if e is 1), and its own tokens.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture
from pretrax.model.dispatch import (
    block_length,
    combine,
    dispatch,
    sort_by_expert,
    sort_into_blocks,
    sort_with_capacity,
)
from pretrax.model.exchange import exchange
from pretrax.model.layers import LayerSpec, Tokens
from pretrax.model.matmul import exact_product, gather, grouped_product, product
from pretrax.model.mlp import gated
from pretrax.model.norm import norm
from pretrax.model.numerics import COMPUTE, Formats
from pretrax.model.routing import Routed, observe
from pretrax.model.weights import Layer
from pretrax.shardlib import (
    all_gather,
    all_to_all,
    axis_size,
    bool_,
    f32,
    i32,
    num,
    psum_scatter,
    save,
    scope,
    typechecked,
)


@typechecked
def mixture(
    h: num['B/r/d/e L/c/t M'],
    w: Layer,
    tokens: Tokens,
    layer: LayerSpec,
) -> tuple[num['B/r/d/e L/c/t M'], Routed | None]:
    """The weighted sum of a token's experts, plus the shared expert. Shazeer et al. 2017, arXiv:1701.06538.

    Args:
        h: normed hidden states.
        w: weights of the layer.
        tokens: `counted` are the tokens in the router's statistics; None: no statistics.
        layer: the number of experts, how they are chosen, and how products are computed.

    Returns:
        The output, for the residual stream; and sums for the router's losses and metrics.
    """
    arch, method, formats = layer.arch, layer.plan.grouped, layer.formats
    logits = exact_product('B/r/d/e L/c/t M, M E -> B/r/d/e L/c/t E', h, all_gather('M/d E -> M E', w.router))
    weight, chosen = choose_experts(logits, arch)
    x = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', h)
    weights = all_gather('B/r/d/e L/c/t X -> B/r/d/e L/c X', weight)
    choices = all_gather('B/r/d/e L/c/t X -> B/r/d/e L/c X', chosen)
    out, dropped = experts(x, weights, choices, w, arch, method, formats)
    if w.shared_up is not None:
        out = out + shared_expert(x, w, arch, formats)
    out = save(psum_scatter('B/r/d/e L/c M -> B/r/d/e L/c/t M', out), 'mlp_out')
    out = norm(out, w.norm2_after, None, arch)
    return out, None if tokens.counted is None else observe(logits, chosen, dropped, tokens.counted, arch)


def choose_experts(
    logits: f32['B/r/d/e L/c/t E'], arch: Architecture
) -> tuple[f32['B/r/d/e L/c/t X'], i32['B/r/d/e L/c/t X']]:
    """The weights and numbers of each token's likeliest experts. The softmax is over all experts.

    If normalized, the weights equal a softmax over the chosen experts, as Mixtral's paper writes it
    (Jiang et al. 2024, arXiv:2401.04088, section 2.1).
    """
    weight, chosen = jax.lax.top_k(jax.nn.softmax(logits), arch.experts_per_token)
    if arch.normalize_router:
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    return weight, chosen


@typechecked
def experts(
    x: num['B/r/d/e L/c M'],
    weight: f32['B/r/d/e L/c X'],
    chosen: i32['B/r/d/e L/c X'],
    w: Layer,
    arch: Architecture,
    method: str,
    formats: Formats,
) -> tuple[jax.Array, bool_['B/r/d/e L/c X'] | None]:
    """Each token's weighted sum over its experts, a partial sum over t, and which choices were dropped (None: none).

    The weight multiplies the activation, not the output: the result is the same, and the backward pass needs no outputs.
    """
    flat = x.reshape(-1, x.shape[-1])
    weights = (
        gather('E/e M/d F/t -> E/e M F/t', w.expert_up, x),
        gather('E/e M/d F/t -> E/e M F/t', w.expert_gate, x),
        gather('E/e F/t M/d -> E/e F/t M', w.expert_down, x),
    )
    if arch.capacity is not None:
        return _with_capacity(x, weight, chosen, weights, arch, formats)
    forward = functools.partial(_feed_forwards, arch.activation, method)
    k, n, choices = arch.experts_per_token, arch.n_experts, chosen.reshape(-1)
    if axis_size('e') > 1:
        remote = functools.partial(forward, COMPUTE, _unsaved)  # in the compute dtype: see `choose_numerics`
        return exchange(remote, k, n, method, flat, weight, choices, weights).reshape(x.shape), None
    if method == 'ragged':
        slots, groups = sort_by_expert(choices, n)
    else:
        slots, groups = sort_into_blocks(choices, n, block_length(choices.shape[0], n))
    rows, row_weights = dispatch(k, flat, slots), dispatch(1, weight.reshape(-1, 1), slots)
    results = forward(formats, save, rows, row_weights, groups, weights)
    return combine(k, results, slots).reshape(x.shape), None


def _unsaved(x: jax.Array, name: str) -> jax.Array:
    """x without a name: the backward pass keeps nothing of an exchange."""
    del name
    return x


def _feed_forwards(
    activation: str,
    method: str,
    formats: Formats,
    named: Callable[[jax.Array, str], jax.Array],
    rows: num['N M'],
    weight: f32['N 1'],
    groups: jax.Array,
    weights: Sequence[jax.Array],
) -> num['N M']:
    """The feed-forward of each row's expert. Letters: G devices along e, S experts on each of them."""
    w_up, w_gate, w_down = (w[None] for w in weights)
    multiply = functools.partial(grouped_product, groups=groups, method=method)
    into = functools.partial(multiply, 'G/e N/r/d/c M, G/e S M F/t -> G/e N/r/d/c F/t')
    up = named(into(rows[None], w_up, formats['expert_up']), 'up')
    gate = named(into(rows[None], w_gate, formats['expert_gate']), 'gate')
    act = weighted(gate, up, weight[None], activation)
    return multiply('G/e N/r/d/c F/t, G/e S F/t M -> G/e N/r/d/c M', act, w_down, formats['expert_down'])[0]


def _with_capacity(
    x: num['B/r/d/e L/c M'],
    weight: f32['B/r/d/e L/c X'],
    chosen: i32['B/r/d/e L/c X'],
    weights: Sequence[jax.Array],
    arch: Architecture,
    formats: Formats,
) -> tuple[jax.Array, bool_['B/r/d/e L/c X']]:
    """Every expert has the same number of slots in each sequence. Lepikhin et al. 2020, arXiv:2006.16668, section 2.2."""
    rows, length, _ = x.shape
    k, n = arch.experts_per_token, arch.n_experts
    assert arch.capacity is not None
    capacity = min(length, math.ceil(arch.capacity * length * k / n))
    slots = sort_with_capacity(chosen.reshape(rows, -1), n, capacity)
    w_up, w_gate, w_down = weights

    def to_experts(x: num['N W']) -> num['B/r/d E/e C/c W']:
        with scope():  # W is the width of a token, then that of its weight
            return all_to_all('B/r/d/e E C/c W -> B/r/d E/e C/c W', x.reshape(rows, n, capacity, -1))

    tokens = to_experts(dispatch(k, x.reshape(rows * length, -1), slots))
    row_weights = to_experts(dispatch(1, weight.reshape(-1, 1), slots))
    into = functools.partial(product, 'B/r/d E/e C/c M, E/e M F/t -> B/r/d E/e C/c F/t')
    up = save(into(tokens, w_up, formats['expert_up']), 'up')
    gate = save(into(tokens, w_gate, formats['expert_gate']), 'gate')
    act = weighted(gate, up, row_weights, arch.activation)
    y = product('B/r/d E/e C/c F/t, E/e F/t M -> B/r/d E/e C/c M', act, w_down, formats['expert_down'])
    y = all_to_all('B/r/d E/e C/c M -> B/r/d/e E C/c M', y, partial='t').reshape(len(slots.choice), -1)
    dropped = (slots.of_choice == len(slots.choice)).reshape(chosen.shape)
    return combine(k, y, slots).reshape(x.shape), dropped


@functools.partial(jax.checkpoint, static_argnums=3)
def weighted(gate: jax.Array, up: jax.Array, weight: jax.Array, activation: str) -> jax.Array:
    """The gated activation times the router's weight, in up's dtype."""
    return (gated(gate, up, activation).astype(jnp.float32) * weight).astype(up.dtype)


@typechecked
def shared_expert(x: num['B/r/d/e L/c M'], w: Layer, arch: Architecture, formats: Formats) -> jax.Array:
    """The feed-forward that every token uses, a partial sum over t. Qwen Team 2024, qwenlm.github.io/blog/qwen-moe."""
    into = functools.partial(product, 'B/r/d/e L/c M, M F_shared/t -> B/r/d/e L/c F_shared/t')
    up = save(into(x, gather('M/d F_shared/t -> M F_shared/t', w.shared_up, x), formats['shared_up']), 'up')
    gate = save(into(x, gather('M/d F_shared/t -> M F_shared/t', w.shared_gate, x), formats['shared_gate']), 'gate')
    down = gather('F_shared/t M/d -> F_shared/t M', w.shared_down, x)
    act = gated(gate, up, arch.activation)
    out = product('B/r/d/e L/c F_shared/t, F_shared/t M -> B/r/d/e L/c M', act, down, formats['shared_down'])
    if w.shared_mix is None:
        return out
    mix = jax.nn.sigmoid(exact_product('B/r/d/e L/c M, M -> B/r/d/e L/c', x, w.shared_mix))
    return (mix[..., None] * out.astype(jnp.float32)).astype(x.dtype)
