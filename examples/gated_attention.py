"""Your own token mixer: attention whose output is gated by its input. Elementwise, so it fits any mesh.

A mixer gets the normed hidden states h, sharded as below, the weights of its layer, and what the layer knows. It runs
per device, and returns what it adds to the residual stream.
"""

import jax

from pretrax import register
from pretrax.model.attention import attention
from pretrax.shardlib import num


@register('mixer', 'gated-attention')
def gated_attention(h: num['B/r/d/e L/c/t M'], w, tokens, layer) -> num['B/r/d/e L/c/t M']:
    return attention(h, w.projections, tokens, layer) * 2 * jax.nn.sigmoid(h)
