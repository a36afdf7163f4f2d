"""Generation for any model that gives logits: each new token reads the whole sequence again, and nothing is cached."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pretrax.infer.next_token import Sampling, choose_tokens
from pretrax.model.base import AutomaticModel, Model
from pretrax.shardlib import i32, num, typed_shard_map


@functools.lru_cache(maxsize=8)
def compile_recompute(model: Model, tokens: int, how: Sampling) -> Callable[..., jax.Array]:
    """weights, prompts [B, S], their lengths [B], key -> [B, tokens]. S has room for the new tokens."""
    weights_type = getattr(model, 'Weights', None)

    @typed_shard_map
    def per_device(weights: weights_type, sequences: i32['B/r/d/e L/c']) -> num['B/r/d/e L/c V/t']:
        return model.logits(weights, sequences)

    logits_of = model.logits if isinstance(model, AutomaticModel) else per_device

    @jax.jit
    def run(weights, sequences, lengths, key):
        rows = jnp.arange(sequences.shape[0], dtype=jnp.int32)

        def append(count, sequences):
            end = lengths + count
            logits = logits_of(weights, sequences)
            last = jnp.take_along_axis(logits, (end - 1)[:, None, None], axis=1)[:, 0]
            return sequences.at[rows, end].set(choose_tokens(how, model.vocab_size, key, rows, count, last))

        sequences = jax.lax.fori_loop(0, tokens, append, sequences)
        return jnp.take_along_axis(sequences, lengths[:, None] + jnp.arange(tokens), axis=1)

    return run
