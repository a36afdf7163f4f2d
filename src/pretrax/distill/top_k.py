"""The Kullback-Leibler divergence of a student from its teacher: over a whole vocabulary, sharded over `t`; and from
its most likely tokens, in offline distillation.

Letters: B batch, L length, V vocabulary, k the number of tokens that are kept.

The teacher's distribution is kept as k + 1 outcomes: its k most likely tokens, and the tail, which is all other tokens
together. Nothing is renormalized, so that a student is not taught that the tail is impossible. With k = V there is no
tail, and the distribution is whole.
"""

import functools

import jax
import jax.numpy as jnp

from pretrax.model.loss import vocabulary_columns
from pretrax.shardlib import all_gather, axis_index, f32, i32, num, pmax, psum, pytree_dataclass, typechecked


@pytree_dataclass
class TopK:
    """What is kept of a teacher's distribution of the next token, at a temperature. A `Batch` has the same fields."""

    top_ids: i32['B/r/d/e L/c top_k']  # the k most likely tokens, most likely first
    top_log_probs: f32['B/r/d/e L/c top_k']  # their log probabilities
    log_tail: f32['B/r/d/e L/c']  # the log probability of all other tokens together; -inf: there are none


@typechecked
def top_k_of(logits: num['B/r/d/e L/c V/t'], k: int, vocab_size: int, temperature: float) -> TopK:
    """The k most likely tokens of softmax(logits / temperature), most likely first; k is at most vocab_size."""
    held = logits.shape[-1]
    is_real = vocabulary_columns(logits) < vocab_size
    real = jnp.where(is_real, logits.astype(jnp.float32), -jnp.inf)
    largest, columns = jax.lax.top_k(real, min(k, held))  # among the columns of this device
    columns = columns.astype(jnp.int32) + axis_index('t') * held
    candidates = all_gather('B/r/d/e L/c C/t -> B/r/d/e L/c C', largest)
    candidate_ids = all_gather('B/r/d/e L/c C/t -> B/r/d/e L/c C', columns)
    values, which = jax.lax.top_k(candidates, k)
    ids = jnp.take_along_axis(candidate_ids, which, axis=-1)
    whole = log_z(vocab_size, temperature, logits)
    log_probs = values / temperature - whole[..., None]
    is_tail = is_real & (_placed(ids, log_probs, held) == -jnp.inf)
    return TopK(ids, log_probs, _log_sum(real / temperature, is_tail) - whole)


@typechecked
def as_logits(top: TopK, logits: num['B/r/d/e L/c V/t'], vocab_size: int, temperature: float) -> f32['B/r/d/e L/c V/t']:
    """Logits of a teacher whose divergence from the student is that of the k + 1 outcomes, in value and in gradient.

    The mass of the tail is spread over its tokens in the proportions of the student, as a constant. With p_j = tail q_j
    / q_tail, the sum of p_j log(p_j / q_j) over the tail is tail log(tail / q_tail), and its gradient is that of the k
    + 1 outcomes; the same holds for the reverse KL.

    Args:
        top: what is kept of the teacher, at this temperature.
        logits: of the student.
        vocab_size: columns past it do not count.
        temperature: what the logits of both are divided by.
    """
    student = jax.lax.stop_gradient(logits).astype(jnp.float32) / temperature
    placed = _placed(top.top_ids, top.top_log_probs, logits.shape[-1])
    is_tail = (vocabulary_columns(logits) < vocab_size) & (placed == -jnp.inf)
    share = student - _log_sum(student, is_tail)[..., None]
    spread = jnp.where(is_tail, top.log_tail[..., None] + share, jnp.where(placed == -jnp.inf, 0.0, placed))
    return temperature * spread


def _placed(ids: jax.Array, values: jax.Array, held: int) -> jax.Array:
    """The values in the columns of the ids that this device holds, f32 [B, L, held]; -inf elsewhere."""
    column = ids - axis_index('t') * held
    column = jnp.where((column >= 0) & (column < held), column, held)  # that of another device is dropped
    rows, places = (jax.lax.broadcasted_iota(jnp.int32, ids.shape, axis) for axis in (0, 1))
    empty = jnp.full((*ids.shape[:2], held), -jnp.inf, jnp.float32)
    return empty.at[rows, places, column].set(values, mode='drop')


def _log_sum(x: jax.Array, among: jax.Array) -> jax.Array:
    """log(sum(exp(x))) over the columns `among`, of all devices along t, f32 [B, L]; -inf if there are none."""
    largest = pmax('t', jnp.max(jnp.where(among, x, -jnp.inf), axis=-1))
    largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
    powers = jnp.where(among, jnp.exp(x - largest[..., None]), 0.0)
    return jnp.log(psum('t', jnp.sum(powers, axis=-1))) + largest


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
