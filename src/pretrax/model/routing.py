"""The router's losses, for an even load and small logits, and its metrics.

Letters: B batch, L length, E experts, X experts per token. A token counts if a target at or after it in its row counts: no
counted target ever sees later tokens, such as padding. Whether its own target counts does not matter (it does not in a prompt).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture
from pretrax.model.axes import TOKENS
from pretrax.model.loss import Batch, LossTerms
from pretrax.shardlib import axis_index, axis_size, bool_, f32, i32, pmax, psum


class Routed(NamedTuple):
    """Sums over the tokens of one layer on this device: partial over `axes.TOKENS`, whole over t. f32."""

    tokens: f32['E']  # how many chose each expert
    probability: f32['E']  # the router's probability of each expert, summed
    balance: f32['']  # the load-balance loss of each sequence, summed
    square_log_z: f32['']
    dropped: f32['']  # choices beyond the capacity


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
    hits = jnp.sum(chosen[..., None] == jnp.arange(arch.n_experts), axis=2) * own
    tokens = psum('t', jnp.sum(hits, axis=1))
    probability = psum('t', jnp.sum(jax.nn.softmax(logits) * own, axis=1))
    n_tokens = jnp.maximum(psum('c', jnp.sum(counts, axis=1, dtype=jnp.float32)), 1)[:, None]
    # DeepSeek-AI 2024, arXiv:2412.19437, eq. 17 to 20: 1 where all experts have the same load
    share = psum('c', tokens) / (arch.experts_per_token * n_tokens)  # of the whole sequence; the rest is this part's
    balance = arch.n_experts * jnp.sum(share * probability / n_tokens)
    square_log_z = psum('t', jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * own[..., 0]))
    lost = jnp.zeros(()) if dropped is None else psum('t', jnp.sum(own_part(dropped) * own))
    return Routed(jnp.sum(tokens, axis=0), jnp.sum(probability, axis=0), balance, square_log_z, lost)


def own_part(x: jax.Array) -> jax.Array:
    """This device's slice along t of the sequence."""
    length = x.shape[1] // axis_size('t')
    return jax.lax.dynamic_slice_in_dim(x, axis_index('t') * length, length, axis=1)


def load(routed: Routed, batch: Batch, columns: i32['L/c'], arch: Architecture) -> tuple[f32['E'], f32['']]:
    """How many tokens of all layers chose each expert, and the number of tokens: this device's partial sums."""
    return jnp.sum(routed.tokens, axis=0), arch.n_layers * jnp.sum(counted(batch, columns), dtype=jnp.float32)


def routing_terms(
    routed: Routed,
    batch: Batch,
    columns: i32['L/c'],
    arch: Architecture,
    whole_load: tuple[f32['E'], f32['']] | None,
) -> LossTerms:
    """The router's terms of the loss, from the stacked sums of all layers, and a table for `routing_metrics`.

    Over 'sequence', the load is balanced in each sequence: a sum over sequences, so it is the same on any mesh and for any
    accumulation (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2). Over 'batch', it is the loss of Hugging Face's Mixtral:
    shares and probabilities of the experts over all layers and tokens (Fedus et al. 2021, arXiv:2101.03961, eq. 4, for more
    experts than one). `whole_load` is the `load` of the whole step, summed over the mesh; None: of this batch. z-loss: Zoph et al. 2022, arXiv:2202.08906, eq. 5.
    """
    count, terms = routing_denominators(batch, columns, arch), {}
    if arch.balance_loss and arch.balance_over == 'sequence':
        terms['balance_loss'] = arch.balance_loss * jnp.sum(routed.balance)
    elif arch.balance_loss:
        tokens, n_tokens = psum(TOKENS, load(routed, batch, columns, arch)) if whole_load is None else whole_load
        share = tokens / n_tokens
        even = arch.n_experts * jnp.sum(share * jnp.sum(routed.probability, axis=0))
        terms['balance_loss'] = arch.balance_loss * even
    if arch.router_z_loss:
        terms['router_z_loss'] = arch.router_z_loss * jnp.sum(routed.square_log_z)
    table = jnp.concatenate([routed.tokens, routed.dropped[:, None]], axis=1)
    return {name: (term, count[name]) for name, term in terms.items()} | {'routing': (table, None)}


def routing_denominators(batch: Batch, columns: i32['L/c'], arch: Architecture) -> dict[str, f32['']]:
    """The denominators of `routing_terms`, from the batch alone."""
    counts = counted(batch, columns)
    n_tokens = arch.n_layers * jnp.sum(counts, dtype=jnp.float32)
    # A sequence counts if its first token does, and the first token is on one device.
    n_sequences = arch.n_layers * jnp.sum(counts & (columns == 0), dtype=jnp.float32)
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
        parts.append(f'a shared expert of width {arch.d_shared}' + ', gated' * arch.shared_gate)
    parts.append('weights ' + ('normalized' if arch.normalize_router else 'not normalized'))
    if arch.capacity is None:
        parts.append(f'dropless; products in {grouped}')
    else:
        parts.append(f'capacity {arch.capacity:g}: tokens beyond the capacity of an expert in a sequence are dropped')
    if arch.balance_loss:
        parts.append(f'balanced over each {arch.balance_over}' if arch.balance_over == 'sequence' else
                     'balanced over the batch (several micro-batches cost one more forward pass)')  # fmt: skip
    return '; '.join(parts)


def routing_metrics(table: f32['layers columns'], arch: Architecture) -> dict[str, f32['']]:
    """How evenly the experts were used, from the table of `routing_terms`, summed over a step.

    A load is relative to an even share: 1 is even, 0 is an expert that no token chose. The entropy of the shares is relative to
    that of even shares, and averaged over layers.
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
