"""Norms of the residual stream, and of queries and keys. All compute in f32.

Letters: B batch, L length, M d_model, H heads (of queries or of keys), D head.
"""

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture
from pretrax.shardlib import axis_size, f32, num, psum, typechecked


@typechecked
def norm(
    x: num['B/r/d/e L/c/t M'], scale: f32['M'] | None, bias: f32['M'] | None, arch: Architecture
) -> num['B/r/d/e L/c/t M']:
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) or LayerNorm (Ba et al. 2016, arXiv:1607.06450), in f32.

    x if the family has no norm here.
    """
    if scale is None:
        return x
    y: f32['B/r/d/e L/c/t M'] = x.astype(jnp.float32)
    if arch.norm.kind == 'layernorm':
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + arch.norm.eps) * _scale(scale, arch)
    return (y if bias is None else y + bias).astype(x.dtype)


def qk_norm(
    x: num['B/r/d/e L/c H/t D'], scale: f32['D'] | None, full_scale: f32['H/t D'] | None, arch: Architecture
) -> num['B/r/d/e L/c H/t D']:
    """The norm of queries or keys: of each head, or of all heads together. LayerNorm has no bias here.

    Of each head: Dehghani et al. 2023, arXiv:2302.05442, section 2.1. Of all heads: OLMo Team 2025, arXiv:2501.00656,
    section 3. l2, of each head: RMSNorm without a scale, as in the released code of Llama 4.

    Args:
        x: queries or keys.
        scale: shared by all heads.
        full_scale: of each head.
        arch: which norm, and whether of all heads together.
    """

    def mean(y: jax.Array) -> jax.Array:
        if arch.attention.qk_norm != 'full':
            return jnp.mean(y, axis=-1, keepdims=True)
        total = psum('t', jnp.sum(y, axis=(-2, -1), keepdims=True))
        return total / (axis_size('t') * x.shape[-2] * x.shape[-1])

    y = x.astype(jnp.float32)
    if arch.norm.kind == 'layernorm' and arch.attention.qk_norm != 'l2':
        y = y - mean(y)
    weight = scale if full_scale is None else full_scale
    y = y * jax.lax.rsqrt(mean(jnp.square(y)) + arch.norm.eps)
    return (y if weight is None else y * _scale(weight, arch)).astype(x.dtype)


@typechecked
def v_norm(v: num['B/r/d/e L/c K/t D'], arch: Architecture) -> num['B/r/d/e L/c K/t D']:
    """RMSNorm of each value head without a scale, as in the released code of Gemma 4; v if the family has none."""
    if not arch.attention.v_norm:
        return v
    y = v.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + arch.norm.eps)).astype(v.dtype)


def _scale(weight: jax.Array, arch: Architecture) -> jax.Array:
    return weight + arch.norm.offset if arch.norm.offset else weight
