"""Your own loss: the focal loss, which weighs down tokens that are already likely. Lin et al. 2017, arXiv:1708.02002.

A loss returns a number for each token, f32['B/r/d/e L/c']; pretrax averages the targets that count. `cross_entropy`
sums over the vocabulary, which is sharded over `t`.
"""

import jax.numpy as jnp

from pretrax import register
from pretrax.model.loss import Batch, cross_entropy
from pretrax.shardlib import f32, num


@register('loss', 'focal')
def focal(logits: num['B/r/d/e L/c V/t'], batch: Batch, vocab_size: int) -> f32['B/r/d/e L/c']:
    nll, _ = cross_entropy(logits, batch.targets, vocab_size)
    return (1 - jnp.exp(-nll)) ** 2 * nll
