"""The feed-forward of a mixture of experts: a router sends each token to a few of many feed-forwards.

Letters: B batch, L length, M d_model, E experts, X experts per token, F_expert feed-forward of an expert, F_shared of
the shared expert, N slots (rows in which the tokens of an expert are adjacent), C slots of one expert in one sequence.
Mesh axes: axes.py. A device has its slice over t of its experts (all experts if e is 1), and its own tokens.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture, LayerKind
from pretrax.model.dispatch import (
    combine,
    dispatch,
    expert_of_rows,
    gather_by_expert,
    sort_by_expert,
    sort_into_blocks,
    sort_with_capacity,
)
from pretrax.model.exchange import exchange
from pretrax.model.expert_slots import block_length
from pretrax.model.layer_spec import LayerSpec, Tokens
from pretrax.model.matmul import add_bias, exact_product, gather, grouped_product, product
from pretrax.model.mlp import gated, gated_in_f32
from pretrax.model.numerics import COMPUTE, Formats
from pretrax.model.part import Part
from pretrax.model.routing import Routed, choose_experts, observe, own_part
from pretrax.shardlib import (
    all_gather,
    all_to_all,
    axis_size,
    bool_,
    f32,
    i32,
    num,
    psum_scatter,
    pytree_dataclass,
    save,
    scope,
    typechecked,
    vary_together,
)


@pytree_dataclass
class SharedWeights(Part):
    """The shared expert, which every token uses, times sigmoid(token . shared_mix) in some families."""

    shared_gate: num['M/d F_shared/t']
    shared_up: num['M/d F_shared/t']
    shared_down: num['F_shared/t M/d']
    shared_mix: f32['M'] | None

    @classmethod
    def optional(cls, arch: Architecture, kind: LayerKind) -> Mapping[str, bool]:
        """Whether the shared expert has a gate."""
        del kind
        return {'shared_mix': arch.experts.shared_gate}


@pytree_dataclass
class ExpertWeights(Part):
    """The router, the feed-forward of each expert, and in some families a shared expert."""

    router: f32['M/d E']
    router_logit_bias: f32['E'] | None
    router_bias: f32['E'] | None
    expert_gate: num['E/e M/d F_expert/t']
    expert_up: num['E/e M/d F_expert/t']
    expert_down: num['E/e F_expert/t M/d']
    expert_gate_bias: f32['E/e F_expert/t'] | None
    expert_up_bias: f32['E/e F_expert/t'] | None
    expert_down_bias: f32['E M'] | None
    shared: SharedWeights | None

    @classmethod
    def optional(cls, arch: Architecture, kind: LayerKind) -> Mapping[str, bool]:
        """Biases of products, biases that balance the load, and the shared expert, as the options say."""
        del kind
        biases = ('router_logit_bias', 'expert_gate_bias', 'expert_up_bias', 'expert_down_bias')
        return {
            **dict.fromkeys(biases, arch.feed_forward.bias),
            'router_bias': arch.experts.router.bias,
            'shared': arch.experts.d_shared > 0,
        }


@typechecked
def mixture(
    h: num['B/r/d/e L/c/t M'],
    w: ExpertWeights,
    tokens: Tokens,
    layer: LayerSpec,
) -> tuple[num['B/r/d/e L/c/t M'], Routed | None]:
    """The weighted sum of a token's experts, plus the shared expert. Shazeer et al. 2017, arXiv:1701.06538.

    Args:
        h: normed hidden states.
        w: the router and the experts.
        tokens: `counted` are the tokens in the router's statistics; None: no statistics.
        layer: the number of experts, how they are chosen, and how products are computed.

    Returns:
        The output, for the residual stream; and sums for the router's losses and metrics.
    """
    arch, method, formats = layer.arch, layer.plan.grouped, layer.formats
    logits = exact_product('B/r/d/e L/c/t M, M E -> B/r/d/e L/c/t E', h, all_gather('M/d E -> M E', w.router))
    logits = add_bias(logits, w.router_logit_bias)
    weight, chosen = choose_experts(logits, w.router_bias, arch)
    x = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', h)
    weights = all_gather('B/r/d/e L/c/t X -> B/r/d/e L/c X', weight)
    choices = all_gather('B/r/d/e L/c/t X -> B/r/d/e L/c X', chosen)
    out, dropped = experts(x, weights, choices, w, arch, method, formats)
    if w.shared is not None:
        out = out + shared_expert(x, w.shared, arch, formats)
    out = save(psum_scatter('B/r/d/e L/c M -> B/r/d/e L/c/t M', out), 'mlp_out')
    if w.expert_down_bias is not None:
        out = out + down_biases(w.expert_down_bias, weight, chosen, dropped, out)
    return out, None if tokens.counted is None else observe(logits, chosen, dropped, tokens.counted, arch)


@typechecked
def experts(
    x: num['B/r/d/e L/c M'],
    weight: f32['B/r/d/e L/c X'],
    chosen: i32['B/r/d/e L/c X'],
    w: ExpertWeights,
    arch: Architecture,
    method: str,
    formats: Formats,
) -> tuple[jax.Array, bool_['B/r/d/e L/c X'] | None]:
    """Each token's weighted sum over its experts, a partial sum over t, and which choices were dropped (None: none).

    The weight multiplies the activation, not the output: the result is the same, and the backward pass needs no
    outputs. With `weigh_inputs` it multiplies the input, as in the released code of Llama 4.
    """
    flat = x.reshape(-1, x.shape[-1])
    weights = [
        gather('E/e M/d F_expert/t -> E/e M F_expert/t', w.expert_up, x, formats.sums),
        gather('E/e M/d F_expert/t -> E/e M F_expert/t', w.expert_gate, x, formats.sums),
        gather('E/e F_expert/t M/d -> E/e F_expert/t M', w.expert_down, x, formats.sums),
    ]
    if w.expert_up_bias is not None:
        weights += [w.expert_up_bias, w.expert_gate_bias]
    if arch.experts.capacity is not None:
        return _with_capacity(x, weight, chosen, weights, arch, formats)
    forward = functools.partial(_feed_forwards, arch, method)
    k, n, choices = arch.experts.experts_per_token, arch.experts.n_experts, chosen.reshape(-1)
    if axis_size('e') > 1:
        remote = functools.partial(forward, COMPUTE, _unsaved)  # in the compute dtype: see `choose_numerics`
        return exchange(remote, k, n, method, flat, weight, choices, weights).reshape(x.shape), None
    if method == 'ragged':
        slots, groups = sort_by_expert(choices, n)
    else:
        slots, groups = sort_into_blocks(choices, n, block_length(choices.shape[0], n, method))
    rows, row_weights = dispatch(k, flat, slots), dispatch(1, weight.reshape(-1, 1), slots)
    results = forward(formats, save, rows, row_weights, groups, weights)
    return combine(k, results, slots).reshape(x.shape), None


def _unsaved(x: jax.Array, name: str) -> jax.Array:
    """x without a name: the backward pass keeps nothing of an exchange."""
    del name
    return x


def _feed_forwards(
    arch: Architecture,
    method: str,
    formats: Formats,
    named: Callable[[jax.Array, str], jax.Array],
    rows: num['N M'],
    weight: f32['N 1'],
    groups: jax.Array,
    weights: Sequence[jax.Array],
) -> num['N M']:
    """The feed-forward of each row's expert. Letters: G devices along e, S experts on each of them."""
    w_up, w_gate, w_down = (w[None] for w in weights[:3])
    up_bias, gate_bias = weights[3:] or (None, None)
    if arch.experts.router.weigh_inputs:
        rows = times(rows, weight)
    multiply = functools.partial(grouped_product, groups=groups, method=method)
    add = functools.partial(_add_of_expert, expert_of_rows(groups, method, rows.shape[0]))
    into = functools.partial(multiply, 'G/e N/r/d/c M, G/e S M F_expert/t -> G/e N/r/d/c F_expert/t')
    up = named(add(into(rows[None], w_up, formats['expert_up']), up_bias), 'up')
    gate = named(add(into(rows[None], w_gate, formats['expert_gate']), gate_bias), 'gate')
    act = weighted(gate, up, weight[None], arch)
    out = multiply('G/e N/r/d/c F_expert/t, G/e S F_expert/t M -> G/e N/r/d/c M', act, w_down, formats['expert_down'])
    return out[0]


def _with_capacity(
    x: num['B/r/d/e L/c M'],
    weight: f32['B/r/d/e L/c X'],
    chosen: i32['B/r/d/e L/c X'],
    weights: Sequence[jax.Array],
    arch: Architecture,
    formats: Formats,
) -> tuple[jax.Array, bool_['B/r/d/e L/c X']]:
    """Every expert has as many slots in each sequence. Lepikhin et al. 2020, arXiv:2006.16668, section 2.2."""
    rows, length, _ = x.shape
    k, n = arch.experts.experts_per_token, arch.experts.n_experts
    assert arch.experts.capacity is not None
    capacity = min(length, math.ceil(arch.experts.capacity * length * k / n))
    slots = sort_with_capacity(chosen.reshape(rows, -1), n, capacity)
    w_up, w_gate, w_down, *biases = weights
    up_bias, gate_bias = biases or (None, None)

    def to_experts(x: num['N W']) -> num['B/r/d E/e C/c W']:
        with scope():  # W is the width of a token, then that of its weight
            return all_to_all('B/r/d/e E C/c W -> B/r/d E/e C/c W', x.reshape(rows, n, capacity, -1))

    tokens = to_experts(dispatch(k, x.reshape(rows * length, -1), slots))
    row_weights = to_experts(dispatch(1, weight.reshape(-1, 1), slots))
    if arch.experts.router.weigh_inputs:
        tokens = times(tokens, row_weights)
    into = functools.partial(product, 'B/r/d E/e C/c M, E/e M F_expert/t -> B/r/d E/e C/c F_expert/t')
    up = save(_add_in_slots(into(tokens, w_up, formats['expert_up']), up_bias), 'up')
    gate = save(_add_in_slots(into(tokens, w_gate, formats['expert_gate']), gate_bias), 'gate')
    act = weighted(gate, up, row_weights, arch)
    y = product('B/r/d E/e C/c F_expert/t, E/e F_expert/t M -> B/r/d E/e C/c M', act, w_down, formats['expert_down'])
    y = all_to_all('B/r/d E/e C/c M -> B/r/d/e E C/c M', y, partial='t').reshape(len(slots.choice), -1)
    dropped = (slots.of_choice == len(slots.choice)).reshape(chosen.shape)
    return combine(k, y, slots).reshape(x.shape), dropped


def down_biases(
    bias: f32['E M'],
    weight: f32['B/r/d/e L/c/t X'],
    chosen: i32['B/r/d/e L/c/t X'],
    dropped: bool_['B/r/d/e L/c X'] | None,
    like: num['B/r/d/e L/c/t M'],
) -> num['B/r/d/e L/c/t M']:
    """The biases of the experts' last products, weighted as their outputs are. They need no exchange of tokens."""
    if dropped is not None:
        weight = jnp.where(own_part(dropped), 0, weight)
    of_experts = jnp.sum(jnp.where(chosen[..., None] == jnp.arange(bias.shape[0]), weight[..., None], 0), axis=2)
    return product(
        'B/r/d/e L/c/t E, E M -> B/r/d/e L/c/t M', of_experts.astype(like.dtype), bias, COMPUTE['expert_down']
    )


def _add_of_expert(expert: i32['N'], x: num['1 N F'], bias: f32['E F'] | None) -> num['1 N F']:
    """x with the bias of each row's expert."""
    if bias is None:
        return x
    x, bias = vary_together(x, bias)
    return (x.astype(jnp.float32) + gather_by_expert(bias, expert)).astype(x.dtype)


def _add_in_slots(x: num['B E C F'], bias: f32['E F'] | None) -> num['B E C F']:
    return x if bias is None else (x.astype(jnp.float32) + bias[:, None]).astype(x.dtype)


@functools.partial(jax.checkpoint, static_argnums=3)
def weighted(gate: jax.Array, up: jax.Array, weight: jax.Array, arch: Architecture) -> jax.Array:
    """The gated activation times the router's weight, in up's dtype; without the weight if it multiplied the input."""
    act = gated_in_f32(gate, up, arch)
    return (act if arch.experts.router.weigh_inputs else act * weight).astype(up.dtype)


@jax.checkpoint
def times(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x times the router's weight, in x's dtype."""
    return (x.astype(jnp.float32) * weight).astype(x.dtype)


@typechecked
def shared_expert(x: num['B/r/d/e L/c M'], w: SharedWeights, arch: Architecture, formats: Formats) -> jax.Array:
    """The feed-forward that every token uses, a partial sum over t. Qwen Team 2024, qwenlm.github.io/blog/qwen-moe."""
    into = functools.partial(product, 'B/r/d/e L/c M, M F_shared/t -> B/r/d/e L/c F_shared/t')
    w_up = gather('M/d F_shared/t -> M F_shared/t', w.shared_up, x, formats.sums)
    w_gate = gather('M/d F_shared/t -> M F_shared/t', w.shared_gate, x, formats.sums)
    up, gate = (save(into(x, one, formats[f'shared_{name}']), name) for name, one in (('up', w_up), ('gate', w_gate)))
    down = gather('F_shared/t M/d -> F_shared/t M', w.shared_down, x, formats.sums)
    act = gated(gate, up, arch)
    out = product('B/r/d/e L/c F_shared/t, F_shared/t M -> B/r/d/e L/c M', act, down, formats['shared_down'])
    if w.shared_mix is None:
        return out
    mix = jax.nn.sigmoid(exact_product('B/r/d/e L/c M, M -> B/r/d/e L/c', x, w.shared_mix))
    return (mix[..., None] * out.astype(jnp.float32)).astype(x.dtype)
