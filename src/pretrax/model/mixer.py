"""What a token learns of the tokens before it: attention, or the state of a delta net or of a state-space model.

Letters: B batch, L length, M d_model.
"""

from pretrax.model.attention import attention
from pretrax.model.layers import LayerSpec, Tokens
from pretrax.model.linear_attention import linear_attention
from pretrax.model.weights import Layer
from pretrax.shardlib import num


def mixer(h: num['B/r/d/e L/c/t M'], w: Layer, tokens: Tokens, layer: LayerSpec) -> num['B/r/d/e L/c/t M']:
    """Attention, or linear attention with a state, as the kind of the layer says."""
    run = attention if layer.kind.mixer == 'attention' else linear_attention
    return run(h, w, tokens, layer)
