"""One layer, and its two branches, which its weights choose: the token mixer, and the feed-forward.

Letters: B batch, L length, M d_model.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pretrax.model.attention import Observer, attention
from pretrax.model.layer_spec import LayerSpec, Tokens, dropout
from pretrax.model.mlp import feed_forward
from pretrax.model.moe import mixture
from pretrax.model.norm import norm
from pretrax.model.recurrent import linear_attention
from pretrax.model.routing import Routed
from pretrax.model.weights import Layer
from pretrax.shardlib import num, typechecked


def mixer(
    h: num['B/r/d/e L/c/t M'], w: Layer, tokens: Tokens, layer: LayerSpec, observe: Observer | None = None
) -> num['B/r/d/e L/c/t M']:
    """The token mixer: attention, or a recurrent state; and the norm after it."""
    projections = w.projections
    if projections is not None:
        out = attention(h, projections, tokens, layer, observe)
    else:
        assert w.recurrent is not None
        out = linear_attention(h, w.recurrent, tokens, layer)
    return norm(out, w.norm1_after, None, layer.arch)


def mlp(
    h: num['B/r/d/e L/c/t M'], w: Layer, tokens: Tokens, layer: LayerSpec
) -> tuple[num['B/r/d/e L/c/t M'], Routed | None]:
    """The feed-forward, or a mixture of experts with the statistics of its router; and the norm after it."""
    routed = None
    if w.experts is not None:
        out, routed = mixture(h, w.experts, tokens, layer)
    elif w.feed_forward is not None:
        out = feed_forward(h, w.feed_forward, layer)
    else:  # the layer has only its mixer
        out = jnp.zeros_like(h)
    return norm(out, w.norm2_after, None, layer.arch), routed


# A branch of a layer: its input, the weights, the tokens, the layer -> its part of the residual stream
type Branch[Result] = Callable[[jax.Array, Layer, Tokens, LayerSpec], Result]


@typechecked
def block(
    x: num['B/r/d/e L/c/t M'],
    w: Layer,
    tokens: Tokens,
    layer: LayerSpec,
    mixer: Branch[jax.Array] = mixer,
    mlp: Branch[tuple[jax.Array, Routed | None]] = mlp,
) -> tuple[num['B/r/d/e L/c/t M'], Routed | None]:
    """One layer, and the statistics of its router. Vaswani et al. 2017, arXiv:1706.03762, section 3.1.

    Norms come before each branch (Xiong et al. 2020, arXiv:2002.04745); some families have them after
    it too, or only there. In a parallel block (Wang and Komatsuzaki 2021, GPT-J) both have one input.
    """
    arch, scale = layer.arch, layer.arch.block.residual_multiplier
    h: num['B/r/d/e L/c/t M'] = norm(x, w.norm1, w.norm1_bias, arch)
    if arch.block.parallel:
        out, routed = mlp(h if arch.block.shared_norm else norm(x, w.norm2, w.norm2_bias, arch), w, tokens, layer)
        out = dropout(out, 'feed-forward', tokens, layer)
        return scaled(x + scale * (dropout(mixer(h, w, tokens, layer), 'attention', tokens, layer) + out), w), routed
    x = x + scale * dropout(mixer(h, w, tokens, layer), 'attention', tokens, layer)
    out, routed = mlp(norm(x, w.norm2, w.norm2_bias, arch), w, tokens, layer)
    return scaled(x + scale * dropout(out, 'feed-forward', tokens, layer), w), routed


def scaled(x: num['B/r/d/e L/c/t M'], w: Layer) -> num['B/r/d/e L/c/t M']:
    """The output of a layer, times a number of its own if the family has one. Gemma 4."""
    return x if w.layer_scale is None else x * w.layer_scale.astype(x.dtype)
