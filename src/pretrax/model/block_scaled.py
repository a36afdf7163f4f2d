"""Values in block-scaled formats, which NVIDIA GPUs multiply from Blackwell on: MXFP8 and NVFP4.

mxfp8: 32 numbers along the sum share a scale, a power of two (E8M0). Values are e4m3, gradients too. The scale is
    rounded up, so no value is clipped (OCP Microscaling Formats 1.0, section 5; Mishra et al. 2025, arXiv:2506.08027).
nvfp4: 16 numbers share an e4m3 scale, and all numbers of an operand a power of two. Values are e2m1. Gradients are
    rounded stochastically (NVIDIA 2025, arXiv:2509.25149; without its Hadamard transforms and blocks of 16 x 16).
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pretrax.shardlib import f32, num, varies_with

Blocks = tuple[jax.Array, jax.Array]  # values, and the scales of blocks

BLOCK = {'mxfp8': 32, 'nvfp4': 16}
LARGEST = 6.0 * 448.0  # of nvfp4: a value times the scale of its block


def round_in_blocks(kind: str, x: num['G N K'], draws: f32['G N K'] | None) -> Blocks:
    """The values [G, N, P] and the scales [G, N, S] of S blocks. Zeros fill the last block.

    A number that is not finite makes its block NaN.

    `draws`: numbers in [0, 1) for stochastic rounding in nvfp4, or None.
    """
    fill = (0, 0), (0, 0), (0, -x.shape[-1] % BLOCK[kind])

    def split(x: jax.Array) -> jax.Array:
        return jnp.pad(x, fill).reshape(*x.shape[:-1], -1, BLOCK[kind])

    blocks = split(x.astype(jnp.float32))
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    if kind == 'mxfp8':
        scale = power_of_two(jnp.maximum(largest, 1e-30) / 448)
        rounded, dtypes = blocks / scale, (jnp.float8_e4m3fn, jnp.float8_e8m0fnu)
    else:
        scale = (largest / 6).astype(jnp.float8_e4m3fn).astype(jnp.float32)
        rounded = jnp.clip(jnp.where(scale > 0, blocks / scale, 0), -6, 6)
        if draws is not None:
            size = jnp.abs(rounded)
            step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1, 2))  # between neighbours
            rounded = jnp.floor(rounded / step + split(draws)) * step
        dtypes = jnp.float4_e2m1fn, jnp.float8_e4m3fn
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    return rounded.astype(dtypes[0]).reshape(*x.shape[:-1], -1), jnp.squeeze(scale, -1).astype(dtypes[1])


def dot_in_blocks(a: Blocks, b: Blocks, dtype: DTypeLike) -> num['G N M']:
    """[G, N, K] x [G, M, K] -> [G, N, M], both summed over their last dimension."""
    return varies_with(jax.nn.scaled_matmul(a[0], b[0], a[1], b[1], preferred_element_type=dtype), a[0], b[0])


def power_of_two(x: jax.Array) -> jax.Array:
    """The smallest power of two >= x, an f32 > 0; from its bits, because exp2 and log2 are not exact."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type((bits + jnp.uint32(0x7FFFFF)) >> 23 << 23, jnp.float32)
