"""The loss: cross-entropy over a vocabulary sharded over `t`, without a second copy of the logits in f32.

Letters: B batch, L length, V vocabulary. A loss is a set of terms, each a numerator and a denominator: sums over tokens
that are reduced over the mesh once, so that masks, accumulation and sharding all give the same gradient.

`in_chunks` computes it in chunks of each sequence, so that the logits of one chunk exist at a time. The backward pass
computes the logits again, chunk by chunk (Chen et al. 2016, arXiv:1604.06174), and sums the gradient of the unembedding
over the chunks in f32. This adds a third to the FLOPs of the unembedding, and saves the memory of the logits, which are
the largest array of a step if the vocabulary is large.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pretrax.errors import UserError
from pretrax.model.axes import along
from pretrax.shardlib import (
    axis_index,
    axis_size,
    bool_,
    f32,
    i32,
    num,
    pmax,
    psum,
    pytree_dataclass,
    scope,
    typechecked,
    u32,
)

# name -> (numerator, denominator), this device's partial sums over `axes.TOKENS`. The loss is the sum of the quotients.
# A denominator of None marks a table of sums, from which the model's `summarize` computes metrics.
LossTerms = dict[str, tuple[f32[''], f32[''] | None]]

# Arrays of this name are maxima, at least 0: of a table over all devices already. Micro-batches are not summed, but
# their maximum is taken.
MAXIMA = 'logit_max'


def is_maximum(path: tuple[Any, ...]) -> bool:
    """Whether the array at this path of a tree of statistics is a maximum."""
    return jax.tree_util.keystr(path[-1:], simple=True) == MAXIMA


def nonzero(count: jax.Array) -> jax.Array:
    """The count, or 1 if it is 0, to divide a sum over nothing by: the sum and its gradient are 0."""
    return jnp.where(count == 0, 1, count)  # not `count > 0`: a count that is not a number stays one


def means(terms: LossTerms) -> dict[str, f32['']]:
    """{name: numerator / denominator} of total sums. The mean of a term without a target is NaN."""
    return {name: numerator / count for name, (numerator, count) in terms.items() if count is not None}


@pytree_dataclass
class Batch:
    """Token sequences. `segments` number a row's documents, `positions` restart in each, `mask` weights the targets."""

    tokens: i32['B/r/d/e L/c']
    targets: i32['B/r/d/e L/c']
    segments: i32['B/r/d/e L/c']
    positions: i32['B/r/d/e L/c']
    mask: f32['B/r/d/e L/c']
    seeds: u32['B/r/d/e L/c two'] | None = None  # random words for dropout; None: nothing is dropped, as in evaluation
    top_ids: i32['B/r/d/e L/c top_k'] | None = None  # of offline distillation, as the two below (distill/top_k.py)
    top_log_probs: f32['B/r/d/e L/c top_k'] | None = None
    log_tail: f32['B/r/d/e L/c'] | None = None


@typechecked
def cross_entropy(
    logits: num['B/r/d/e L/c V/t'], targets: i32['B/r/d/e L/c'], vocab_size: int
) -> tuple[f32['B/r/d/e L/c'], f32['B/r/d/e L/c']]:
    """-log softmax(logits)[target] and log(sum(exp(logits))) of each token; columns past vocab_size do not count."""
    return _cross_entropy(vocab_size, logits, targets)


Pair = tuple[jax.Array, jax.Array]
Triple = tuple[jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(vocab_size: int, logits: jax.Array, targets: jax.Array) -> Pair:
    return _forward(vocab_size, logits, targets)[0]


def vocabulary_columns(logits: jax.Array) -> jax.Array:
    """The vocabulary index of each local column, shaped to broadcast against the logits."""
    held = logits.shape[-1]
    return jax.lax.broadcasted_iota(jnp.int32, (1, 1, held), 2) + axis_index('t') * held


def _where_real(vocab_size: int, values: jax.Array, otherwise: float) -> jax.Array:
    """Values of each local column, and another value in the padding columns. Fused into whatever reads it."""
    if values.shape[-1] * axis_size('t') == vocab_size:  # a mask of no column is still computed
        return values
    return jnp.where(vocabulary_columns(values) < vocab_size, values, otherwise)


def _forward(vocab_size: int, logits: jax.Array, targets: jax.Array) -> tuple[Pair, Triple]:
    # Two masks, one in the dtype of the logits: so XLA for CPUs, too, makes no f32 copy of them.
    largest = pmax('t', jnp.max(_where_real(vocab_size, logits, -jnp.inf), axis=-1).astype(jnp.float32))
    powers = _where_real(vocab_size, jnp.exp(logits.astype(jnp.float32) - largest[..., None]), 0.0)
    log_z = jnp.log(psum('t', jnp.sum(powers, axis=-1))) + largest
    target_logit = psum('t', jax.lax.platform_dependent(logits, targets, cpu=_gathered, default=_compared))
    return (log_z - target_logit, log_z), (logits, targets, log_z)


def _compared(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The logit of each target among the local columns, otherwise 0; a comparison, which fuses into the sum."""
    is_target = vocabulary_columns(logits) == targets[..., None]
    return jnp.sum(jnp.where(is_target, logits.astype(jnp.float32), 0.0), axis=-1)


def _gathered(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Gathers the logits of the targets, for hardware where a gather costs less than another pass over the logits."""
    column = targets - axis_index('t') * logits.shape[-1]
    is_here = (column >= 0) & (column < logits.shape[-1])
    found = jnp.take_along_axis(logits, jnp.where(is_here, column, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(is_here, found.astype(jnp.float32), 0.0)


def _backward(vocab_size: int, residuals: Triple, gradients: Pair) -> tuple[jax.Array, None]:
    logits, targets, log_z = residuals
    d_nll, d_log_z = gradients
    real = _where_real(vocab_size, logits.astype(jnp.float32), -jnp.inf)
    probability = jnp.exp(real - log_z[..., None])
    is_target = vocabulary_columns(logits) == targets[..., None]
    d_logits = probability * (d_nll + d_log_z)[..., None] - jnp.where(is_target, d_nll[..., None], 0.0)
    return d_logits.astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)


@jax.named_scope('loss')
def loss_terms(logits: num['B/r/d/e L/c V/t'], batch: Batch, vocab_size: int, z_loss: float) -> LossTerms:
    """The terms of a language model's loss on this device: cross-entropy 'nll' and, if weighted, 'z_loss'.

    z-loss: Chowdhery et al. 2022, arXiv:2204.02311, section 5: z_loss * mean(log(Z)^2).
    """
    nll, log_z = cross_entropy(logits, batch.targets, vocab_size)
    counts = denominators(batch, z_loss)
    terms = {'nll': (jnp.sum(nll * batch.mask), counts['nll'])}
    if z_loss:
        terms['z_loss'] = (z_loss * jnp.sum(jnp.square(log_z) * batch.mask), counts['z_loss'])
    return terms


def denominators(batch: Batch, z_loss: float) -> dict[str, f32['']]:
    """The denominators of `loss_terms`. They depend only on the batch, so they are known before any gradient."""
    count = jnp.sum(batch.mask)
    return {'nll': count, 'z_loss': count} if z_loss else {'nll': count}


# Hidden states [B/r/d/e L/c/t M], or a tuple of several
Hidden = Any


def check_loss_chunks(chunks: int, mesh: dict[str, int], sequence_length: int) -> int:
    """`chunks`. Raises UserError if they do not divide the tokens of a sequence that a device has between blocks."""
    here = sequence_length // along('c t', mesh)
    if here % chunks:
        fits = [n for n in range(1, here + 1) if here % n == 0]
        near = min(fits, key=lambda n: abs(n - chunks))
        raise UserError(
            f'model.loss_chunks = {chunks} does not divide the {here} tokens of a sequence that a device has '
            f'(batch.sequence_length / mesh.c / mesh.t)\nuse model.loss_chunks={near}'
        )
    return chunks


def in_chunks(terms_of: Callable[[Any, Batch], LossTerms], x: Hidden, batch: Batch, chunks: int) -> LossTerms:
    """`terms_of(x, batch)`, summed over chunks of each sequence.

    Args:
        terms_of: the terms of hidden states [B/r/d/e L/c/t M] and their part of a batch [B/r/d/e L/c].
        x: the hidden states after the last layer; or several of them, of one sharding.
        batch: its tokens and targets.
        chunks: how many; 1: all tokens at once, and nothing is computed twice.
    """
    if chunks == 1:
        return terms_of(x, batch)
    return jax.tree.map(lambda terms: jnp.sum(terms, axis=0), over_chunks(terms_of, x, batch, chunks))


def over_chunks[Of, T](function: Callable[[Any, Of], T], x: Hidden, batch: Of, chunks: int) -> T:
    """`function` of each chunk of the sequences, stacked; arguments as in `in_chunks`, or arrays [B/r/d/e L/c ...]."""

    def one_chunk(_: None, chunk: tuple[Any, Of]) -> tuple[None, T]:
        with scope():  # L is the length of a chunk here
            return None, function(*chunk)

    n = jax.tree.leaves(x)[0].shape[1] // chunks
    parts = jax.tree.map(lambda array: split_tokens(array, chunks, n), (x, batch))
    return jax.lax.scan(jax.checkpoint(one_chunk, prevent_cse=False), None, parts)[1]


def chunks_of(length: int, wanted: int) -> int:
    """The smallest divisor of the length that is at least `wanted`; the length if there is none."""
    return next((n for n in range(min(wanted, length), length) if length % n == 0), length)


def split_tokens(array: jax.Array, chunks: int, n: int) -> jax.Array:
    """[B, L, ...] -> [chunks, B, L / chunks, ...]. A chunk has n tokens of each device of t, in their order."""
    blocks = array.reshape(array.shape[0], -1, chunks, n, *array.shape[2:])
    return jnp.moveaxis(blocks, 2, 0).reshape(chunks, array.shape[0], -1, *array.shape[2:])


def join_tokens(parts: jax.Array, n: int) -> jax.Array:
    """[chunks, B, L / chunks, ...] -> [B, L, ...], the inverse of `split_tokens`."""
    blocks = parts.reshape(*parts.shape[:2], -1, n, *parts.shape[3:])
    return jnp.moveaxis(blocks, 0, 2).reshape(parts.shape[1], -1, *parts.shape[3:])


@pytree_dataclass
class TokenScores:
    """The log probabilities of tokens in nats, and whether each is the likeliest token, of equal ones the first."""

    log_probs: f32['B/r/d/e L/c']
    are_likeliest: bool_['B/r/d/e L/c']


@typechecked
def token_scores(
    logits: num['B/r/d/e L/c V/t'], targets: i32['B/r/d/e L/c'], vocab_size: int | None = None
) -> TokenScores:
    """log softmax(logits)[target], and argmax(logits) == target. Runs per device.

    Args:
        logits: of any floating dtype; sums are in f32.
        targets: token ids below vocab_size.
        vocab_size: columns past it do not count; None: all of them do.
    """
    columns_of_all = logits.shape[-1] * axis_size('t')
    vocab_size = columns_of_all if vocab_size is None else vocab_size
    nll, _ = cross_entropy(logits, targets, vocab_size)
    columns = vocabulary_columns(logits)
    is_real = columns < vocab_size
    largest = pmax('t', jnp.max(jnp.where(is_real, logits, -jnp.inf), axis=-1))
    is_largest = is_real & (logits == largest[..., None])
    first = -pmax('t', jnp.max(jnp.where(is_largest, -columns, -columns_of_all), axis=-1))
    return TokenScores(-nll, first == targets)
