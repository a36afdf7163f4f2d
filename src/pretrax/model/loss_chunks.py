"""The loss in chunks of each sequence, so that the logits of one chunk exist at a time.

The backward pass computes the logits again, chunk by chunk (Chen et al. 2016, arXiv:1604.06174), and sums the gradient of the
unembedding over the chunks in f32. This adds a third to the FLOPs of the unembedding, and saves the memory of the logits,
which are the largest array of a step if the vocabulary is large.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pretrax.errors import UserError
from pretrax.model.axes import along
from pretrax.model.loss import Batch, LossTerms
from pretrax.shardlib import scope

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
    """`function` of each chunk of the sequences, stacked; arguments as in `in_chunks`, or any arrays [B/r/d/e L/c ...]."""

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
    """[B, L, ...] -> [chunks, B, L / chunks, ...]. A chunk has n tokens of each device along t, in the devices' order."""
    blocks = array.reshape(array.shape[0], -1, chunks, n, *array.shape[2:])
    return jnp.moveaxis(blocks, 2, 0).reshape(chunks, array.shape[0], -1, *array.shape[2:])


def join_tokens(parts: jax.Array, n: int) -> jax.Array:
    """[chunks, B, L / chunks, ...] -> [B, L, ...], the inverse of `split_tokens`."""
    blocks = parts.reshape(*parts.shape[:2], -1, n, *parts.shape[3:])
    return jnp.moveaxis(blocks, 0, 2).reshape(parts.shape[1], -1, *parts.shape[3:])
