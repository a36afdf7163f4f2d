"""Your own model: a low-rank bigram table, logits = embed[token] @ unembed^T, on any mesh.

Letters: B batch, L length, M width, V vocabulary. A model has `Weights`, whose types say how each array is sharded;
`init`; and `loss`, which runs per device with its own collectives and returns each term as (numerator, denominator).
"""

from jax import random, tree

from pretrax import register, shardlib
from pretrax.model.base import Model
from pretrax.model.loss import Batch, LossTerms, loss_terms


@register('model', 'bigram')
class Bigram(Model):
    @shardlib.pytree_dataclass
    class Weights:
        embed: shardlib.f32['V/t M/d']
        unembed: shardlib.f32['V/t M/d']

    def __init__(self, request, *, width: int = 64):
        self.sizes = {'V': request.vocab_size, 'M': width}

    def init(self, key) -> Weights:
        return tree.map(lambda w: 0.1 * random.normal(key, w.shape), shardlib.make_abstract(self.Weights, self.sizes))

    def logits(self, weights: Weights, tokens):
        w = tree.map(lambda w: shardlib.all_gather('V/t M/d -> V/t M', w), weights)
        x = shardlib.psum('t', shardlib.take('V/t M, B/r/d/e L/c -> B/r/d/e L/c M', w.embed, tokens))
        return shardlib.einsum('B/r/d/e L/c M, V/t M -> B/r/d/e L/c V/t', x, w.unembed)

    def loss(self, weights: Weights, batch: Batch) -> LossTerms:
        return loss_terms(self.logits(weights, batch.tokens), batch, self.sizes['V'], z_loss=0.0)
