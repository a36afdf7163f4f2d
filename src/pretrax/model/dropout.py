"""Dropout: training sets random numbers to zero. Srivastava et al. 2014, JMLR 15; Vaswani et al. 2017, section 5.4.

Each token of a step has two random words, which depend on the seed, the step, and the token's place in the batch. A
mask is a hash of these, the layer and the index of a number. So masks do not depend on the mesh, on accumulation or on
pipeline stages. They are equal when the backward pass computes them again, and after a resume.

Letters: B batch, L length, M d_model, K key/value heads, G query heads per key/value head, S keys.
"""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.model.eight_bits import mix
from pretrax.shardlib import axis_index, axis_size, i32, num, u32

PARTS = ('attention probabilities', 'attention', 'feed-forward')  # of a layer
_STRIDE = 0x9E3779B9  # 2^32 over the golden ratio


def token_seeds(key: jax.Array, shape: tuple[int, ...], order: np.ndarray | None) -> u32['B/r/d/e L/c two']:
    """Random words of each token of a step, from the key of the step (under jit, outside the manual region).

    Args:
        key: of the step.
        shape: [B, L] of the whole batch.
        order: of the columns of the batch, see `Model.column_order`.
    """
    of_dropout = jax.random.fold_in(key, zlib.crc32(b'dropout'))
    seeds = jax.random.bits(of_dropout, (*shape, 2), jnp.uint32)
    return seeds if order is None else seeds[:, order]


def drop(x: num['B/r/d/e L/c/t M'], seeds: u32['B/r/d/e L/c two'] | None, rate: float) -> num['B/r/d/e L/c/t M']:
    """x with each number zero with probability `rate`, and the others divided by 1 - rate; without seeds, x."""
    if seeds is None or not rate:
        return x
    n = seeds.shape[1] // axis_size('t')
    own = jax.lax.dynamic_slice_in_dim(seeds, axis_index('t') * n, n, axis=1)
    return _drop(rate, x, own, jnp.uint32(0))


def drop_probabilities(p: jax.Array, seeds: jax.Array, first_key: jax.Array | int, rate: float) -> jax.Array:
    """Attention probabilities with dropout.

    Args:
        p: [..., S].
        seeds: u32[..., 2] of each query and head.
        first_key: the place of the first of the S keys in the sequence.
        rate: the share that is dropped.
    """
    return _drop(rate, p, seeds, jnp.asarray(first_key).astype(jnp.uint32))


def seeds_of_layer(seeds: u32['B/r/d/e L/c two'], number: i32[''], part: str) -> u32['B/r/d/e L/c two']:
    """The words of each token for a part of layer `number`."""
    which = (number * len(PARTS) + PARTS.index(part) + 1).astype(jnp.uint32)
    first = mix(seeds[..., 0] ^ mix(which))
    return jnp.stack([first, mix(seeds[..., 1] + first)], axis=-1)


def seeds_of_heads(seeds: u32['B L two'], kv_heads: int, heads: int, axes: str) -> u32['B L K G two']:
    """The words of each token for each query head of this device. Each device along `axes` has `heads` query heads."""
    number = (axis_index(axes) * heads + jnp.arange(heads)).astype(jnp.uint32)
    first = mix(seeds[..., :1] ^ mix(number + jnp.uint32(1)))
    both = jnp.stack([first, jnp.broadcast_to(seeds[..., 1:], first.shape)], axis=-1)
    return both.reshape(*seeds.shape[:2], kv_heads, -1, 2)


def kept(seeds: jax.Array, first: u32[''], n: int, rate: float) -> jax.Array:
    """Which of the numbers `first` to `first + n - 1` are kept, for each pair of words: u32[..., 2] -> bool[..., n]."""
    number = (first + jnp.arange(n, dtype=jnp.uint32)) * jnp.uint32(_STRIDE)
    return mix((seeds[..., :1] + number) ^ seeds[..., 1:]) >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


@functools.partial(jax.checkpoint, static_argnums=0)  # keeps the words for the backward pass, not a mask
def _drop(rate: float, x: jax.Array, seeds: jax.Array, first: jax.Array) -> jax.Array:
    scaled = (x.astype(jnp.float32) / (1 - rate)).astype(x.dtype)
    return jnp.where(kept(seeds, first, x.shape[-1], rate), scaled, jnp.zeros((), x.dtype))
