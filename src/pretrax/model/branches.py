"""The two branches of a layer, as its kind says: the token mixer, and the feed-forward.

Letters: B batch, L length, M d_model.
"""

from pretrax.model.attention import attention
from pretrax.model.layers import LayerSpec, Tokens
from pretrax.model.mlp import feed_forward
from pretrax.model.moe import mixture
from pretrax.model.recurrent import linear_attention
from pretrax.model.routing import Routed
from pretrax.model.weights import Layer
from pretrax.shardlib import num


def mixer(h: num['B/r/d/e L/c/t M'], w: Layer, tokens: Tokens, layer: LayerSpec) -> num['B/r/d/e L/c/t M']:
    """The token mixer: attention, or a recurrent state."""
    run = attention if layer.kind.mixer == 'attention' else linear_attention
    return run(h, w, tokens, layer)


def mlp(
    h: num['B/r/d/e L/c/t M'], w: Layer, tokens: Tokens, layer: LayerSpec
) -> tuple[num['B/r/d/e L/c/t M'], Routed | None]:
    """The feed-forward, or a mixture of experts with the statistics of its router."""
    return mixture(h, w, tokens, layer) if layer.kind.experts else (feed_forward(h, w, layer), None)
