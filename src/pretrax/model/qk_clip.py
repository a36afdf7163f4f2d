"""QK clip: smaller queries and keys for heads with large logits. Kimi Team 2025, arXiv:2507.20534, section 2.1.

After the update of a step, gamma = min(1, tau / S_max) scales the logits of a head, where S_max is its largest logit in
the forward pass of the step. Kernels do not return S_max, so a product of queries and keys beside them computes it. It
costs 2 L^2 D_qk more FLOPs for each head and sequence, and has no backward pass.

Letters: B batch, L length, H query heads, K key/value heads, G query heads per key/value head, D_qk query or key.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.errors import UserError
from pretrax.model.architecture import Architecture
from pretrax.model.attention import AttentionWeights, OwnHeads
from pretrax.model.axes import TOKENS
from pretrax.model.block import mixer
from pretrax.model.context import local_columns
from pretrax.model.latent_attention import LatentWeights
from pretrax.model.layer_spec import LayerSpec, Tokens
from pretrax.model.loss import MAXIMA, LossTerms
from pretrax.model.routing import Routed
from pretrax.model.scores import Scores
from pretrax.model.weights import Layer, layers_with
from pretrax.shardlib import all_gather, f32, i32, num, pmax

if TYPE_CHECKING:
    from pretrax.model.weights import Weights

QUERIES = 256  # whose products with all keys exist at once


class QkClip:
    """The parts of a decoder's step that clip its heads.

    Args:
        tau: the logit above which a head is clipped; None: no head is.
        arch: of the decoder.

    Raises:
        UserError: a clip has no effect on this decoder.
    """

    def __init__(self, tau: float | None, arch: Architecture):
        self.tau, self.arch = tau, arch
        if tau is None:
            return
        if not any(kind.mixer == 'attention' for kind in arch.kinds):
            raise UserError(f'optimizer.qk_clip = {tau:g}: no layer of the model uses attention\nleave it out')
        if arch.attention.qk_norm != 'none':
            raise UserError(
                f'optimizer.qk_clip = {tau:g}: queries and keys are normed (model.attention.qk_norm = '
                f'{arch.attention.qk_norm}), so their logits do not follow the weights\n'
                'leave out optimizer.qk_clip, or use model.attention.qk_norm=none'
            )

    def observe(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """The function `block` of a layer; its statistics have the largest logit of each head too."""
        return block if self.tau is None else functools.partial(_observed, block)

    def terms(self, routed: Routed | None) -> LossTerms:
        """The table of the largest logits over the tokens of all devices, of all layers and heads."""
        if routed is None or routed.logit_max is None:
            return {}
        largest = pmax(TOKENS, jax.lax.stop_gradient(routed.logit_max))
        return {MAXIMA: (all_gather('layers H/t -> layers H', largest), None)}

    def metrics(self, tables: dict[str, f32['layers H']]) -> dict[str, f32['']]:
        """The largest attention logit of a step, and how many heads have one above tau."""
        if self.tau is None:
            return {}
        heads = jnp.sum(tables[MAXIMA] > self.tau, dtype=jnp.float32)
        return {'qk_logit_max': jnp.max(tables[MAXIMA]), 'clipped_heads': heads}

    def clip(self, weights: 'Weights', tables: dict[str, f32['layers H']]) -> 'Weights':
        """The weights after the clip. The table has the layers with attention, then those of multi-token prediction.

        Logits are bilinear in queries and keys. So both of a head whose keys are its own get sqrt(gamma). Where heads
        share keys, with grouped queries or in the rotary part of latent attention, the queries get gamma.
        """
        if self.tau is None:
            return weights
        arch, gamma = self.arch, self.tau / jnp.maximum(tables[MAXIMA], self.tau)
        with_attention = [i for i, kind in enumerate(arch.kinds) if kind.mixer == 'attention']

        def clipped(layers: Any, rows_of: Callable[[str], np.ndarray]) -> Any:
            new = {}
            if layers.attention is not None:
                new['attention'] = _scaled(layers.attention, gamma[rows_of('attention')], arch)
            if layers.own_heads is not None:
                new['own_heads'] = _scaled_own(layers.own_heads, gamma[rows_of('own_heads')])
            return dataclasses.replace(layers, **new)

        def rows_of_layers(part: str) -> np.ndarray:
            return np.searchsorted(with_attention, layers_with(arch, part))

        layers = clipped(weights.layers, rows_of_layers)
        weights = dataclasses.replace(weights, layers=layers)
        modules: Any = weights.multi_token
        if not arch.multi_token.n_layers:
            return weights
        of_modules = clipped(modules.layer, lambda _: np.arange(len(with_attention), gamma.shape[0]))
        return dataclasses.replace(weights, multi_token=dataclasses.replace(modules, layer=of_modules))


def _observed(
    block: Callable[..., Any], x: num['B/r/d/e L/c/t M'], w: Layer, tokens: Tokens, layer: LayerSpec
) -> tuple[num['B/r/d/e L/c/t M'], Routed]:
    """A layer; its statistics have the largest logit of each head too."""
    found: list[jax.Array] = []

    def observing(h: jax.Array, w: Layer, tokens: Tokens, layer: LayerSpec) -> jax.Array:
        columns = local_columns(tokens.positions, layer.plan.context)

        def observe(q: jax.Array, k: jax.Array, segments: jax.Array, scores: Scores) -> None:
            found.append(logit_max(q, k, segments, scores, columns))

        return mixer(h, w, tokens, layer, observe)

    x, routed = block(x, w, tokens, layer, mixer=observing)
    routed = Routed(None, None, None, None, None) if routed is None else routed
    return x, routed._replace(logit_max=found[0] if found else None)


def logit_max(
    q: num['B/r/d/e L/c H/t D_qk'],
    k: num['B/r/d/e L/c K/t D_qk'],
    segments: i32['B/r/d/e L/c'],
    scores: Scores,
    columns: i32['L/c'],
) -> f32['H/t']:
    """The largest score of each head on this device, before any soft cap, or 0 if all are negative.

    A device has the queries of its part of the sequence, and gathers all keys.
    """
    q, k = jax.lax.stop_gradient((q, k))
    keys, key_columns = all_gather('B/r/d/e L/c K/t D_qk -> B/r/d/e L K/t D_qk', k), all_gather('L/c -> L', columns)
    key_segments = all_gather('B/r/d/e L/c -> B/r/d/e L', segments)
    B, L, H, D = q.shape
    size = max(n for n in range(1, QUERIES + 1) if L % n == 0)

    def chunk(first: i32['']) -> f32['H/t']:
        here = [jax.lax.dynamic_slice_in_dim(x, first, size, axis) for x, axis in ((q, 1), (segments, 1), (columns, 0))]
        queries, own, places = here
        visible = scores.sees(places[:, None] - key_columns) & (own[:, :, None] == key_segments[:, None])
        grouped = queries.reshape(B, size, keys.shape[2], -1, D)
        score = jnp.einsum('bnkgd,bskd->bkgns', grouped, keys, preferred_element_type=jnp.float32) / scores.divisor
        return jnp.max(jnp.where(visible[:, None, None], score, 0.0), axis=(0, 3, 4)).reshape(H)

    return jnp.max(jax.lax.map(chunk, jnp.arange(0, L, size)), axis=0)


def _scaled(w: AttentionWeights, gamma: f32['layers H'], arch: Architecture) -> AttentionWeights:
    if w.latent is not None:
        return dataclasses.replace(w, latent=_scaled_latent(w.latent, gamma, arch.attention.latent.d_nope))
    return _scaled_plain(w, gamma)


def _scaled_plain(w: AttentionWeights, gamma: f32['layers H']) -> AttentionWeights:
    assert w.q is not None
    assert w.k is not None
    own_keys = w.k.shape[2] == w.q.shape[2] and w.v is not None
    factor = jnp.sqrt(gamma) if own_keys else gamma
    new = {'q': w.q * factor[:, None, :, None], 'q_bias': None if w.q_bias is None else w.q_bias * factor[..., None]}
    if own_keys:
        new['k'] = w.k * factor[:, None, :, None]
        new['k_bias'] = None if w.k_bias is None else w.k_bias * factor[..., None]
    return dataclasses.replace(w, **new)


def _scaled_own(w: OwnHeads, gamma: f32['layers H']) -> OwnHeads:
    renamed = _scaled_plain(w.projections(), gamma)
    return dataclasses.replace(w, q_global=renamed.q, k_global=renamed.k)


def _scaled_latent(w: LatentWeights, gamma: f32['layers H'], d_nope: int) -> LatentWeights:
    """q^C and k^C by sqrt(gamma), q^R by gamma; k^R, which all heads share, stays."""

    def scaled(x: jax.Array | None, rest: jax.Array) -> jax.Array | None:
        if x is None:
            return None
        is_first = jnp.arange(x.shape[-1]) < d_nope
        return x * jnp.where(is_first, jnp.sqrt(gamma)[..., None], rest[..., None])[:, None]

    q = {name: scaled(getattr(w, name), gamma) for name in ('q_direct', 'q_b')}
    return dataclasses.replace(w, kv_b=scaled(w.kv_b, jnp.ones_like(gamma)), **q)
