"""How the next token is chosen from logits."""

import dataclasses

import jax
import jax.numpy as jnp

from pretrax.shardlib import f32, i32, key


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the likeliest token. Nucleus sampling: Holtzman et al. 2020, arXiv:1904.09751."""

    temperature: float = 0.8
    top_k: int | None = None  # choose among the k likeliest
    top_p: float | None = None  # choose among the likeliest that together have probability p


def choose_token(how: Sampling, key: key[''], logits: f32['V']) -> i32['']:
    """One token id."""
    if how.temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    logits = (logits - jnp.max(logits)) / how.temperature  # a tiny temperature must not divide to infinity
    if how.top_k is not None and how.top_k < logits.shape[0]:
        logits = jnp.where(logits < jax.lax.top_k(logits, how.top_k)[0][-1], -jnp.inf, logits)
    if how.top_p is not None:
        ordered = jnp.sort(logits, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered)) - jax.nn.softmax(ordered)  # probability of the likelier ones
        least = jnp.min(jnp.where(before < how.top_p, ordered, jnp.inf))
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def choose_tokens(
    how: Sampling, vocab_size: int | None, key: key[''], rows: i32['B'], count: i32[''], logits: jax.Array
) -> jax.Array:
    """The next token of each row, from [B, V] logits. The randomness depends on the row's number and `count` alone."""
    in_vocabulary = jnp.arange(logits.shape[-1]) < (vocab_size or logits.shape[-1])
    logits = jnp.where(in_vocabulary, logits.astype(jnp.float32), -jnp.inf)
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), count))(rows)
    return jax.vmap(lambda key, logits: choose_token(how, key, logits))(keys, logits)
