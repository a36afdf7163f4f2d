"""The Kullback-Leibler divergence of a student from its teacher, over a vocabulary sharded over `t`.

Letters: B batch, L length, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp

from pretrax.model.loss import vocabulary_columns
from pretrax.shardlib import f32, num, pmax, psum, typechecked


@typechecked
def divergence(
    logits: num['B/r/d/e L/c V/t'],
    teacher: num['B/r/d/e L/c V/t'],
    vocab_size: int,
    temperature: float,
    direction: str,
) -> f32['B/r/d/e L/c']:
    """The Kullback-Leibler divergence of each token, in nats: KL(p || q) if forward, KL(q || p) if reverse.

    q is softmax(logits / temperature) of the student, p that of the teacher; columns past vocab_size do not count. The
    teacher gets no gradient.
    """
    return _divergence(vocab_size, temperature, direction, logits, teacher)


Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _divergence(
    vocab_size: int, temperature: float, direction: str, logits: jax.Array, teacher: jax.Array
) -> jax.Array:
    return _forward(vocab_size, temperature, direction, logits, teacher)[0]


def _log_softmax(logits: jax.Array, of: jax.Array, temperature: float) -> jax.Array:
    return logits.astype(jnp.float32) / temperature - of[..., None]


def log_z(vocab_size: int, temperature: float, logits: jax.Array) -> jax.Array:
    """log(sum(exp(logits / temperature))) over the vocabulary, f32 [B, L], without columns past vocab_size."""
    is_real = vocabulary_columns(logits) < vocab_size
    largest = pmax('t', jnp.max(jnp.where(is_real, logits, -jnp.inf), axis=-1).astype(jnp.float32))
    powers = jnp.exp((logits.astype(jnp.float32) - largest[..., None]) / temperature)
    return jnp.log(psum('t', jnp.sum(jnp.where(is_real, powers, 0.0), axis=-1))) + largest / temperature


def _forward(
    vocab_size: int, temperature: float, direction: str, logits: jax.Array, teacher: jax.Array
) -> tuple[jax.Array, Residuals]:
    log_zs = [log_z(vocab_size, temperature, one) for one in (logits, teacher)]
    log_q, log_p = (_log_softmax(x, z, temperature) for x, z in zip((logits, teacher), log_zs, strict=True))
    each = jnp.exp(log_p) * (log_p - log_q) if direction == 'forward' else jnp.exp(log_q) * (log_q - log_p)
    is_real = vocabulary_columns(logits) < vocab_size
    total = psum('t', jnp.sum(jnp.where(is_real, each, 0.0), axis=-1))
    return total, (logits, teacher, *log_zs, total)


def _backward(
    vocab_size: int, temperature: float, direction: str, residuals: Residuals, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logits, teacher, of_student, of_teacher, total = residuals
    log_q = _log_softmax(logits, of_student, temperature)
    log_p = _log_softmax(teacher, of_teacher, temperature)
    if direction == 'forward':
        d_logits = jnp.exp(log_q) - jnp.exp(log_p)
    else:
        d_logits = jnp.exp(log_q) * (log_q - log_p - total[..., None])
    is_real = vocabulary_columns(logits) < vocab_size
    d_logits = jnp.where(is_real, d_logits * (gradient / temperature)[..., None], 0.0)
    return d_logits.astype(logits.dtype), jnp.zeros_like(teacher)


_divergence.defvjp(_forward, _backward)
