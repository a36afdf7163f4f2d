"""What is asked of a router beside good text: an even load, small logits; and what is told of how it did.

Letters: B batch, L length, E experts, X experts of a token. A token counts up to the last target of its row that does:
later ones, such as padding, no target ever sees. Whether its own target counts does not matter, as with a prompt's.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture
from pretrax.model.axes import TOKENS
from pretrax.model.loss import Batch, LossTerms
from pretrax.shardlib import axis_index, axis_size, bool_, f32, i32, pmax, psum


class Routed(NamedTuple):
    """Sums over the tokens of one layer on this device: partial over `axes.TOKENS`, whole over t. f32."""

    tokens: Any  # [E], how many chose each expert
    probability: Any  # [E], the router's probability of each expert, added up
    balance: Any  # the load-balance loss of each sequence, added up
    square_log_z: Any
    dropped: Any  # choices that found no place


def counted(batch: Batch, places: Any) -> Any:
    """bool[B L]: the tokens that routers are judged by. `places`: which columns of the sequences these are."""
    last = pmax('c', jnp.max(jnp.where(batch.mask > 0, places, -1), axis=1, keepdims=True))
    return places <= last


def observe(
    logits: f32['B/r/d/e L/c/t E'],
    chosen: i32['B/r/d/e L/c/t X'],
    dropped: bool_['B/r/d/e L/c X'] | None,
    counts: bool_['B/r/d/e L/c'],
    arch: Architecture,
) -> Routed:
    """The sums of one layer."""
    own = _own_part(counts)[..., None].astype(jnp.float32)
    hits = jnp.sum(chosen[..., None] == jnp.arange(arch.n_experts), axis=2) * own
    tokens = psum('t', jnp.sum(hits, axis=1))
    probability = psum('t', jnp.sum(jax.nn.softmax(logits) * own, axis=1))
    n_tokens = jnp.maximum(psum('c', jnp.sum(counts, axis=1, dtype=jnp.float32)), 1)[:, None]
    # DeepSeek-AI 2024, arXiv:2412.19437, eq. 17 to 20: 1 where all experts have the same load
    share = psum('c', tokens) / (arch.experts_per_token * n_tokens)  # of the whole sequence; the rest is this part's
    balance = arch.n_experts * jnp.sum(share * probability / n_tokens)
    square_log_z = psum('t', jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * own[..., 0]))
    lost = jnp.zeros(()) if dropped is None else psum('t', jnp.sum(_own_part(dropped) * own))
    return Routed(jnp.sum(tokens, axis=0), jnp.sum(probability, axis=0), balance, square_log_z, lost)


def _own_part(x: Any) -> Any:
    """This device's slice along t of the sequence."""
    length = x.shape[1] // axis_size('t')
    return jax.lax.dynamic_slice_in_dim(x, axis_index('t') * length, length, axis=1)


def load(routed: Routed, batch: Batch, places: Any, arch: Architecture) -> tuple[Any, Any]:
    """How many tokens of all layers chose each expert, and how many tokens that is: this device's partial sums."""
    return jnp.sum(routed.tokens, axis=0), arch.n_layers * jnp.sum(counted(batch, places), dtype=jnp.float32)


def routing_terms(routed: Routed, batch: Batch, places: Any, arch: Architecture, known: Any) -> LossTerms:
    """The router's terms of the loss, from the sums of all layers (stacked), and a table that is no loss.

    Over 'sequence' the load is to be even in each sequence: a sum over sequences, so that it is the same on any mesh and
    for any accumulation (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2). Over 'batch' it is that of Hugging Face's
    Mixtral, experts' shares and probabilities over all layers and tokens together, where k is even (Fedus et al. 2021,
    arXiv:2101.03961, eq. 4, for more experts than one). `known` is the `load` of the whole batch, added up over the mesh;
    without it this batch is the whole. z-loss: Zoph et al. 2022, arXiv:2202.08906, eq. 5.
    """
    count, terms = routing_denominators(batch, places, arch), {}
    if arch.balance_loss and arch.balance_over == 'sequence':
        terms['balance_loss'] = arch.balance_loss * jnp.sum(routed.balance)
    elif arch.balance_loss:
        tokens, n_tokens = psum(TOKENS, load(routed, batch, places, arch)) if known is None else known
        share = tokens / n_tokens
        even = arch.n_experts * jnp.sum(share * jnp.sum(routed.probability, axis=0))
        terms['balance_loss'] = arch.balance_loss * even
    if arch.router_z_loss:
        terms['router_z_loss'] = arch.router_z_loss * jnp.sum(routed.square_log_z)
    table = jnp.concatenate([routed.tokens, routed.dropped[:, None]], axis=1)
    return {name: (term, count[name]) for name, term in terms.items()} | {'routing': (table, None)}


def routing_denominators(batch: Batch, places: Any, arch: Architecture) -> dict[str, Any]:
    """The denominators of `routing_terms`, from the batch alone."""
    counts = counted(batch, places)
    n_tokens = arch.n_layers * jnp.sum(counts, dtype=jnp.float32)
    # A sequence counts where its first token does, and the first token is on one device.
    n_sequences = arch.n_layers * jnp.sum(counts & (places == 0), dtype=jnp.float32)
    denominators = {}
    if arch.balance_loss:
        denominators['balance_loss'] = n_sequences if arch.balance_over == 'sequence' else n_tokens
    if arch.router_z_loss:
        denominators['router_z_loss'] = n_tokens
    return denominators


def describe_routing(arch: Architecture, grouped: str) -> str:
    """One line for the start-up report."""
    parts = [f'{arch.experts_per_token} of {arch.n_experts} experts of width {arch.d_ff}']
    if arch.d_shared:
        parts.append(f'a shared one of width {arch.d_shared}' + ', gated' * arch.shared_gate)
    parts.append('weights ' + ('normalized' if arch.normalize_router else 'as they are'))
    if arch.capacity is None:
        parts.append(f'dropless; products in {grouped}')
    else:
        parts.append(f'capacity {arch.capacity:g}: what an expert has no place for in a sequence is dropped')
    if arch.balance_loss:
        parts.append(f'balanced over each {arch.balance_over}' if arch.balance_over == 'sequence' else
                     'balanced over the batch (with several passes, at the cost of one more forward pass)')  # fmt: skip
    return '; '.join(parts)


def routing_metrics(table: Any, arch: Architecture) -> dict[str, Any]:
    """How evenly the experts were used, from the table of `routing_terms` added up over a step.

    Loads are over an even share: 1 is even, 0 is an expert that nobody chose. The entropy is that of the shares, over
    that of even ones, as the mean over layers.
    """
    tokens, dropped = table[:, :-1], table[:, -1]
    share = tokens / jnp.sum(tokens, axis=1, keepdims=True)
    entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=1) / jnp.log(arch.n_experts)
    metrics = {
        'expert_load_max': arch.n_experts * jnp.max(share),
        'expert_load_min': arch.n_experts * jnp.min(share),
        'expert_load_entropy': jnp.mean(entropy),
    }
    return metrics | ({'dropped_fraction': jnp.sum(dropped) / jnp.sum(tokens)} if arch.capacity is not None else {})
