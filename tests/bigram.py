"""A model that a test can compute by hand and that compiles in a second: one table of logits, and a bias."""

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.model.base import Model
from pretrax.model.loss import Batch, loss_terms
from pretrax.shardlib import all_gather, f32, pytree_dataclass, take
from pretrax.train import optimizer
from pretrax.train.groups import DEFAULT_NO_DECAY
from pretrax.train.step import Recipe
from small import VOCAB

WIDTH = 104  # that vocabulary, up to a multiple of 8 devices


@pytree_dataclass
class BigramWeights:
    table: f32['N/d V/t']
    bias: f32['V/t']


class Bigram(Model):
    """logits of the next token = table[token] + bias. Letters: N token, V next token."""

    Weights = BigramWeights

    def __init__(self, vocab_size=VOCAB):
        self.vocab_size = vocab_size
        self.shape = vocab_size, -(-vocab_size // 8) * 8

    def init(self, key):
        return BigramWeights(0.1 * jax.random.normal(key, self.shape), jnp.linspace(-1, 1, self.shape[1]))

    def matrix_dimensions(self, weights, tables=False):
        return BigramWeights(((0,), (1,)) if tables else None, None)

    def loss(self, weights, batch: Batch):
        return loss_terms(self.logits(weights, batch.tokens), batch, self.shape[1], z_loss=0.0)

    def logits(self, weights, tokens):
        table = all_gather('N/d V/t -> N V/t', weights.table)
        return take('N V/t, B/r/d/e L/c -> B/r/d/e L/c V/t', table, tokens) + weights.bias


def recipe(model=None, direction=None, *, rate=0.1, decay=0.0, no_decay=DEFAULT_NO_DECAY, clip=None, accumulation=1):
    rates = rate if callable(rate) else lambda step: jnp.float32(rate)
    return Recipe(model or Bigram(), direction or optimizer.sgd(), rates, decay, no_decay, clip, accumulation)


def by_hand(weights, batch):
    """Loss and gradient of the bigram model in double precision."""
    logits = np.asarray(weights.table, np.float64)[batch.tokens] + weights.bias
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    share = batch.mask / batch.mask.sum(dtype=np.float64)
    loss = -np.sum(share * np.log(np.take_along_axis(p, batch.targets[..., None], axis=-1)[..., 0]))
    d_logits = (p - np.eye(WIDTH)[batch.targets]) * share[..., None]
    table = np.zeros((VOCAB, WIDTH))
    np.add.at(table, batch.tokens, d_logits)
    return loss, BigramWeights(table, d_logits.sum((0, 1)))


def norm_of(gradient):
    return np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient)))


def assert_identical(a, b):
    same = jax.tree.map(np.array_equal, a, b)
    assert all(jax.tree.leaves(same)), same
