"""Your own feed-forward: (relu(h W_gate)^2 * h W_up) W_down, with the weights of a gated one.

Letters: B batch, L length, M d_model, F feed-forward. The last product is a partial sum over `t`.
"""

import jax

from pretrax import register
from pretrax.model.matmul import product
from pretrax.shardlib import all_gather, num, psum_scatter


@register('feed_forward', 'relu2-gate')
def relu2_gate(h: num['B/r/d/e L/c/t M'], w, tokens, layer) -> num['B/r/d/e L/c/t M']:
    h, w = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', h), w.feed_forward

    def projected(name: str) -> num['B/r/d/e L/c F/t']:
        matrix = layer.gather(name, 'M/d F/t -> M F/t', w, h)
        return product('B/r/d/e L/c M, M F/t -> B/r/d/e L/c F/t', h, matrix, layer.formats[name])

    hidden = jax.nn.relu(projected('gate')) ** 2 * projected('up')
    down = layer.gather('down', 'F/t M/d -> F/t M', w, h)
    out = product('B/r/d/e L/c F/t, F/t M -> B/r/d/e L/c M', hidden, down, layer.formats['down'])
    return psum_scatter('B/r/d/e L/c M -> B/r/d/e L/c/t M', out)
