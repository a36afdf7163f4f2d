"""The router: how it chooses experts, its losses and its biases, for an even load and small logits, and its metrics.

Letters: B batch, L length, E experts, X experts per token. A token counts if a target at or after it in its row counts:
no counted target ever sees later tokens, such as padding. Whether its own target counts does not matter (it does not in
a prompt).
"""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture
from pretrax.model.axes import TOKENS
from pretrax.model.loss import Batch, LossTerms, nonzero
from pretrax.shardlib import axis_index, axis_size, bool_, f32, i32, pmax, psum

if TYPE_CHECKING:
    from pretrax.model.weights import Weights


class Routed(NamedTuple):
    """Sums over the tokens of one layer on this device: partial over `axes.TOKENS`, whole over t. f32.

    With QK clip a layer without experts has statistics too. Its sums are None.
    """

    tokens: f32['E'] | None  # how many chose each expert
    probability: f32['E'] | None  # the router's probability of each expert, summed
    balance: f32[''] | None  # the load-balance loss of each sequence, summed
    square_log_z: f32[''] | None
    dropped: f32[''] | None  # choices beyond the capacity
    logit_max: f32['H/t'] | None = None  # the largest attention logit of each head, over this device's tokens


def choose_experts(
    logits: f32['B/r/d/e L/c/t E'], bias: f32['E'] | None, arch: Architecture
) -> tuple[f32['B/r/d/e L/c/t X'], i32['B/r/d/e L/c/t X']]:
    """The weights and numbers of the experts with the highest scores for each token.

    A normalized softmax equals one over the chosen experts, as Mixtral's paper writes it (Jiang et al. 2024,
    arXiv:2401.04088, section 2.1). Sigmoid scores, `bias` and groups: DeepSeek-AI 2024, arXiv:2412.19437, section
    2.1.2. The bias affects only the choice (Wang et al. 2024, arXiv:2408.15664, section 3).
    """
    scores = jax.nn.softmax(logits) if arch.experts.router.scores == 'softmax' else jax.nn.sigmoid(logits)
    choice = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    if arch.experts.router.n_groups > 1:
        choice = _best_group_scores(choice, arch)
    chosen = jax.lax.top_k(choice, arch.experts.experts_per_token)[1]
    weight = jnp.take_along_axis(scores, chosen, axis=-1)
    if arch.experts.router.normalize:  # sigmoids may all be tiny
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
    return weight * arch.experts.router.scale, chosen


def _best_group_scores(choice: f32['B/r/d/e L/c/t E'], arch: Architecture) -> f32['B/r/d/e L/c/t E']:
    """The scores in the groups that a token may use, and -inf in the others. arXiv:2405.04434, section 2.2.2."""
    groups = choice.reshape(*choice.shape[:-1], arch.experts.router.n_groups, -1)
    of_group = jnp.sum(jax.lax.top_k(groups, {'max': 1, 'top2': 2}[arch.experts.router.group_scores])[0], axis=-1)
    best = jax.lax.top_k(of_group, arch.experts.router.groups_per_token)[1]
    is_best = jnp.any(best[..., None] == jnp.arange(arch.experts.router.n_groups), axis=-2)
    return jnp.where(is_best[..., None], groups, -jnp.inf).reshape(choice.shape)


def probabilities(logits: f32['B/r/d/e L/c/t E'], arch: Architecture) -> f32['B/r/d/e L/c/t E']:
    """The scores of each token's experts, which sum to one."""
    if arch.experts.router.scores == 'softmax':
        return jax.nn.softmax(logits)
    scores = jax.nn.sigmoid(logits)
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)


def counted(batch: Batch, columns: i32['L/c']) -> bool_['B/r/d/e L/c']:
    """The tokens in the statistics of the routers. `columns` are the columns of the sequences that this device has."""
    last = pmax('c', jnp.max(jnp.where(batch.mask > 0, columns, -1), axis=1, keepdims=True))
    return columns <= last


def observe(
    logits: f32['B/r/d/e L/c/t E'],
    chosen: i32['B/r/d/e L/c/t X'],
    dropped: bool_['B/r/d/e L/c X'] | None,
    counts: bool_['B/r/d/e L/c'],
    arch: Architecture,
) -> Routed:
    """The sums of one layer."""
    own = own_part(counts)[..., None].astype(jnp.float32)
    hits = jnp.sum(chosen[..., None] == jnp.arange(arch.experts.n_experts), axis=2) * own
    tokens = psum('t', jnp.sum(hits, axis=1))
    probability = psum('t', jnp.sum(probabilities(logits, arch) * own, axis=1))
    n_tokens = jnp.maximum(psum('c', jnp.sum(counts, axis=1, dtype=jnp.float32)), 1)[:, None]
    # DeepSeek-AI 2024, arXiv:2412.19437, eq. 17 to 20: 1 where all experts have the same load
    share = psum('c', tokens) / (
        arch.experts.experts_per_token * n_tokens
    )  # of the whole sequence; the rest is this part's
    balance = arch.experts.n_experts * jnp.sum(share * probability / n_tokens)
    square_log_z = psum('t', jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * own[..., 0]))
    lost = jnp.zeros(()) if dropped is None else psum('t', jnp.sum(own_part(dropped) * own))
    return Routed(jnp.sum(tokens, axis=0), jnp.sum(probability, axis=0), balance, square_log_z, lost)


def own_part(x: jax.Array) -> jax.Array:
    """This device's slice along t of the sequence."""
    length = x.shape[1] // axis_size('t')
    return jax.lax.dynamic_slice_in_dim(x, axis_index('t') * length, length, axis=1)


def load(routed: Routed, batch: Batch, columns: i32['L/c'], arch: Architecture) -> tuple[f32['E'], f32['']]:
    """How many tokens of all layers chose each expert, and the number of tokens: this device's partial sums."""
    return jnp.sum(routed.tokens, axis=0), arch.n_routers * jnp.sum(counted(batch, columns), dtype=jnp.float32)


def routing_terms(
    routed: Routed,
    batch: Batch,
    columns: i32['L/c'],
    arch: Architecture,
    whole_load: tuple[f32['E'], f32['']] | None,
) -> LossTerms:
    """The router's terms of the loss, from the stacked sums of all layers, and a table for `routing_metrics`.

    Over 'sequence', the load is balanced in each sequence: a sum over sequences, so it is the same on any mesh and for
    any accumulation (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2). Over 'batch', it is the loss of Hugging Face's
    Mixtral: shares and probabilities of the experts over all layers and tokens (Fedus et al. 2021, arXiv:2101.03961,
    eq. 4, for more experts than one). `whole_load` is the `load` of the whole step, summed over the mesh; None: of this
    batch. z-loss: Zoph et al. 2022, arXiv:2202.08906, eq. 5.
    """
    count, terms = routing_denominators(batch, columns, arch), {}
    if arch.experts.router.balance_loss and arch.experts.router.balance_over == 'sequence':
        terms['balance_loss'] = arch.experts.router.balance_loss * jnp.sum(routed.balance)
    elif arch.experts.router.balance_loss:
        tokens, n_tokens = psum(TOKENS, load(routed, batch, columns, arch)) if whole_load is None else whole_load
        share = tokens / nonzero(n_tokens)
        even = arch.experts.n_experts * jnp.sum(share * jnp.sum(routed.probability, axis=0))
        terms['balance_loss'] = arch.experts.router.balance_loss * even
    if arch.experts.router.z_loss:
        terms['router_z_loss'] = arch.experts.router.z_loss * jnp.sum(routed.square_log_z)
    assert routed.dropped is not None
    table = jnp.concatenate([routed.tokens, routed.dropped[:, None]], axis=1)
    return {name: (term, count[name]) for name, term in terms.items()} | {'routing': (table, None)}


def adjust(weights: 'Weights', tables: dict[str, jax.Array], arch: Architecture) -> 'Weights':
    """Moves the bias of an expert up if its load was less than even, else down. arXiv:2408.15664, alg. 1."""
    # `tables` are those of `routing_terms`, summed over the step and the mesh: whole numbers, so the same on any mesh.
    if not arch.experts.router.bias:
        return weights
    load = tables['routing'][:, :-1].astype(jnp.int32)
    even, rest = jnp.divmod(jnp.sum(load, axis=1, keepdims=True), arch.experts.n_experts)  # the mean, exactly
    up = jnp.where(load == even, jnp.sign(rest), jnp.sign(even - load))

    def moved(layers: Any, up: f32['layers E']) -> Any:
        bias = layers.experts.router_bias + arch.experts.router.bias_rate * up
        return dataclasses.replace(layers, experts=dataclasses.replace(layers.experts, router_bias=bias))

    n, modules = arch.n_expert_layers, cast(Any, weights.multi_token)
    weights = dataclasses.replace(weights, layers=moved(weights.layers, up[:n]))
    if not arch.multi_token.n_layers or not arch.kinds[-1].experts:
        return weights
    return dataclasses.replace(weights, multi_token=dataclasses.replace(modules, layer=moved(modules.layer, up[n:])))


def routing_denominators(batch: Batch, columns: i32['L/c'], arch: Architecture) -> dict[str, f32['']]:
    """The denominators of `routing_terms`. They depend only on the batch."""
    counts = counted(batch, columns)
    n_tokens = arch.n_routers * jnp.sum(counts, dtype=jnp.float32)
    # A sequence counts if its first token does, and the first token is on one device.
    n_sequences = arch.n_routers * jnp.sum(counts & (columns == 0), dtype=jnp.float32)
    denominators = {}
    if arch.experts.router.balance_loss:
        denominators['balance_loss'] = n_sequences if arch.experts.router.balance_over == 'sequence' else n_tokens
    if arch.experts.router.z_loss:
        denominators['router_z_loss'] = n_tokens
    return denominators


def describe_routing(arch: Architecture, grouped: str) -> str:
    """One line for the start-up report."""
    parts = [f'{arch.experts.experts_per_token} of {arch.experts.n_experts} experts of width {arch.feed_forward.d_ff}']
    if dense := arch.n_layers - arch.n_expert_layers:
        parts.append(f'{dense} of {arch.n_layers} layers without experts, of width {arch.experts.d_ff_dense}')
    if arch.experts.d_shared:
        parts.append(f'a shared expert of width {arch.experts.d_shared}' + ', gated' * arch.experts.shared_gate)
    if arch.experts.router.n_groups > 1:
        parts.append(
            f'from {arch.experts.router.groups_per_token} of {arch.experts.router.n_groups} groups '
            f'({arch.experts.router.group_scores})'
        )
    weights = 'normalized' if arch.experts.router.normalize else 'not normalized'
    times = f', times {arch.experts.router.scale:g}' if arch.experts.router.scale != 1 else ''
    parts.append(f'{arch.experts.router.scores} scores, weights {weights}{times}')
    if arch.experts.capacity is None:
        parts.append(f'dropless; products in {grouped}')
    else:
        parts.append(
            f'capacity {arch.experts.capacity:g}: tokens beyond the capacity of an expert in a sequence are dropped'
        )
    if arch.experts.router.bias:
        parts.append(f'balanced by biases, {arch.experts.router.bias_rate:g} a step')
    if arch.experts.router.balance_loss:
        parts.append(f'balanced over each '
        f'{arch.experts.router.balance_over}' if arch.experts.router.balance_over == 'sequence' else
                     'balanced over the batch (several micro-batches cost one more forward pass)')  # fmt: skip
    return '; '.join(parts)


def routing_metrics(table: f32['layers columns'], arch: Architecture) -> dict[str, f32['']]:
    """How evenly the experts were used, from the table of `routing_terms`, summed over a step.

    A load is relative to an even share: 1 is even, 0 is an expert that no token chose. The entropy of the shares is
    relative to that of even shares, and averaged over layers.
    """
    tokens, dropped = table[:, :-1], table[:, -1]
    share = tokens / jnp.sum(tokens, axis=1, keepdims=True)
    entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=1) / jnp.log(arch.experts.n_experts)
    metrics = {
        'expert_load_max': arch.experts.n_experts * jnp.max(share),
        'expert_load_min': arch.experts.n_experts * jnp.min(share),
        'expert_load_entropy': jnp.mean(entropy),
    }
    return metrics | (
        {'dropped_fraction': jnp.sum(dropped) / jnp.sum(tokens)} if arch.experts.capacity is not None else {}
    )
