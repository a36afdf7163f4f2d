"""A model that a test can compute by hand and that compiles in a second: one table of logits, and a bias."""

import jax
import jax.numpy as jnp

from pretrax.model.base import Model
from pretrax.model.loss import Batch, loss_terms
from pretrax.shardlib import all_gather, f32, pytree_dataclass, take
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

    def loss(self, weights, batch: Batch):
        return loss_terms(self.logits(weights, batch.tokens), batch, self.shape[1], z_loss=0.0)

    def logits(self, weights, tokens):
        table = all_gather('N/d V/t -> N V/t', weights.table)
        return take('N V/t, B/r/d/e L/c -> B/r/d/e L/c V/t', table, tokens) + weights.bias
