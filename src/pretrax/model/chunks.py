"""Sequences in chunks, and the decays inside and between them: what delta nets and state-space models share.

A state decays by exp(decay) at each token, decay <= 0, and no token sees the state of another document. Inside a chunk,
products of queries and keys replace the recurrence; a loop over the chunks carries the state (Dao and Gu 2024,
arXiv:2405.21060, section 6; Yang et al. 2024, arXiv:2406.06484, section 3.2).

Letters: B batch, L length, C tokens of a chunk, n chunks, G key heads, R heads that share a key.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pretrax.model.architecture import CHUNK
from pretrax.shardlib import f32, i32


def describe_chunks(platform: str) -> str:
    """How states are computed, for the start-up report."""
    return ('' if platform == 'cpu' else 'SLOW: ') + f'chunks of {CHUNK} tokens in plain XLA (there is no fused kernel)'


class Decays(NamedTuple):
    """Products of decays, zero between documents. f32."""

    pairs: f32['B n G R C C']  # from token j of a chunk to token i; zero if i < j
    start: f32['B n G R C']  # from the last token of the chunk before to token i
    end: f32['B n G R C']  # from token i to the last token of the chunk
    whole: f32['B n G R']  # from the last token of the chunk before to the last token of the chunk


def cut(x: jax.Array) -> jax.Array:
    """[B, L, ...] -> [B, n, C, ...]. Zeros fill the last chunk: such a token changes no state."""
    rows, length, *rest = x.shape
    size = min(CHUNK, length)
    if more := -length % size:
        x = jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * len(rest)))
    return x.reshape(rows, -1, size, *rest)


def decays(decay: f32['B L G R'], segments: i32['B L']) -> Decays:
    """The decays of chunks, from the logarithm of each token's decay and the number of its document.

    A state from before the row belongs to the row's first document.
    """
    total = jnp.moveaxis(jnp.cumsum(cut(decay), axis=2), 2, -1)  # [B, n, G, R, C]
    length = segments.shape[1]
    last = jnp.pad(segments, ((0, 0), (0, -length % min(CHUNK, length))), mode='edge')
    document = cut(last)[:, :, None, None]  # [B, n, 1, 1, C]
    ends = document[..., -1]
    before = jnp.concatenate([document[:, :1, ..., 0], ends[:, :-1]], axis=1)
    here = jnp.arange(total.shape[-1])
    visible = (here[:, None] >= here) & (document[..., :, None] == document[..., None, :])
    return Decays(
        _exp(total[..., :, None] - total[..., None, :], visible),
        _exp(total, document == before[..., None]),
        _exp(total[..., -1:] - total, document == ends[..., None]),
        _exp(total[..., -1], ends == before),
    )


def _exp(x: jax.Array, visible: jax.Array) -> jax.Array:
    return jnp.exp(jnp.where(visible, x, -jnp.inf))  # masked first, since exp(x) may overflow where nothing is visible
