"""A language model whose layers have a gated recurrence instead of attention: minGRU. Feng et al. 2024,
arXiv:2410.01201.

Letters: B batch, L length, M width, H hidden units, V vocabulary. Mesh axes: docs/parallelism.md; `c` is refused.
"""

import zlib

import jax
import jax.numpy as jnp

from pretrax import UserError, register
from pretrax.model.base import Model
from pretrax.model.loss import Batch, LossTerms, loss_terms
from pretrax.shardlib import (
    Array,
    all_gather,
    bool_,
    einsum,
    f32,
    i32,
    make_abstract,
    psum,
    pytree_dataclass,
    scan,
    take,
)


@pytree_dataclass
class Layer:
    norm: f32['M']
    gate: f32['M/d H/t']
    candidate: f32['M/d H/t']
    out: f32['H/t M/d']


@pytree_dataclass
class Weights:
    embed: f32['V/t M/d']
    layers: Array['layers', Layer]
    norm: f32['M']
    unembed: f32['V/t M/d']


def rms_norm(x: f32['B/r/d/e L/c M'], scale: f32['M']) -> f32['B/r/d/e L/c M']:
    """Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def min_gru(x: f32['B/r/d/e L/c M'], w: Layer, starts: bool_['B/r/d/e L/c']) -> f32['B/r/d/e L/c M']:
    """s[l] = (1 - z[l]) s[l-1] + z[l] c[l], where z is the gate and c the candidate (section 3.1).
    A document starts from 0.
    """
    w_gate = all_gather('M/d H/t -> M H/t', w.gate)
    w_candidate = all_gather('M/d H/t -> M H/t', w.candidate)
    z: f32['B/r/d/e L/c H/t'] = jax.nn.sigmoid(einsum('B/r/d/e L/c M, M H/t -> B/r/d/e L/c H/t', x, w_gate))
    c: f32['B/r/d/e L/c H/t'] = einsum('B/r/d/e L/c M, M H/t -> B/r/d/e L/c H/t', x, w_candidate)
    keep: f32['B/r/d/e L/c H/t'] = jnp.where(starts[..., None], 0.0, 1 - z)
    # Two steps after one another are one step, so the states of a sequence need log2(L) rounds (Blelloch 1990).
    _, states = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (keep, z * c), axis=1)
    w_out = all_gather('H/t M/d -> H/t M', w.out)
    return psum('t', einsum('B/r/d/e L/c H/t, H/t M -> B/r/d/e L/c M', states, w_out))


@register('model', 'min-gru')
class MinGru(Model):
    """Layers of `min_gru`, each on a residual stream."""

    Weights = Weights

    def __init__(self, request, *, n_layers: int = 4, width: int = 128, hidden: int = 384):
        if request.mesh['c'] > 1:
            raise UserError(
                f'mesh.c is {request.mesh["c"]}, but min-gru passes a state along the sequence\nuse mesh.c=1'
            )
        self.sizes = {'layers': n_layers, 'V': request.vocab_size, 'M': width, 'H': hidden}

    def init(self, key) -> Weights:
        def initial(path, w):
            name = jax.tree_util.keystr(path)
            if 'norm' in name:
                return jnp.ones(w.shape)
            return w.shape[-2] ** -0.5 * jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), w.shape)

        return jax.tree.map_with_path(initial, make_abstract(Weights, self.sizes))

    def logits_of(self, weights: Weights, tokens: i32['B/r/d/e L/c'], starts: bool_['B/r/d/e L/c']):
        embed = all_gather('V/t M/d -> V/t M', weights.embed)
        x: f32['B/r/d/e L/c M'] = psum('t', take('V/t M, B/r/d/e L/c -> B/r/d/e L/c M', embed, tokens))

        def one_layer(x, w: Layer):
            return x + min_gru(rms_norm(x, w.norm), w, starts), None

        x, _ = scan([one_layer], x, weights.layers)
        unembed = all_gather('V/t M/d -> V/t M', weights.unembed)
        return einsum('B/r/d/e L/c M, V/t M -> B/r/d/e L/c V/t', rms_norm(x, weights.norm), unembed)

    def logits(self, weights: Weights, tokens: i32['B/r/d/e L/c']):
        return self.logits_of(weights, tokens, jnp.zeros(tokens.shape, bool))

    def loss(self, weights: Weights, batch: Batch) -> LossTerms:
        logits = self.logits_of(weights, batch.tokens, starts=batch.positions == 0)
        return loss_terms(logits, batch, self.sizes['V'], z_loss=0.0)
