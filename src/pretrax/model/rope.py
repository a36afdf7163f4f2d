"""Rotary positions: queries and keys are turned by angles that grow with the position.

Letters: B batch, L length, H heads (of queries or of keys), D head.
"""

import math

import jax.numpy as jnp

from pretrax.model.architecture import LayerKind, RopeScaling
from pretrax.shardlib import f32, i32, num


def rotate(x: num['B/r/d/e L/c H/t D'], positions: i32['B/r/d/e L/c'], kind: LayerKind) -> num['B/r/d/e L/c H/t D']:
    """`rope` of queries or keys, in layers that have positions."""
    return x if kind.rope_base is None else rope(x, positions, kind.rope_base, kind.rope_scaling)


def rope(
    x: num['B/r/d/e L/c H/t D'], positions: i32['B/r/d/e L/c'], base: float, scaling: RopeScaling | None = None
) -> num['B/r/d/e L/c H/t D']:
    """Turns the pair (i, i + D/2) of each head by position * base^(-2i/D). Su et al. 2021, arXiv:2104.09864, eq. 15."""
    half = x.shape[-1] // 2
    frequency: f32[half] = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequency = _scaled(frequency, scaling)
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _scaled(frequency: f32['half'], scaling: RopeScaling) -> f32['half']:
    """Frequencies for contexts that are longer by `factor`.

    linear: all frequencies are divided by it (Chen et al. 2023, arXiv:2306.15595, eq. 3). llama3: frequencies that turn
    fewer than low_freq_factor times in the original length are divided by it, those that turn more than high_freq_factor
    times are unchanged, and between them the two are interpolated (the released code of Llama 3.1).
    """
    if scaling.kind == 'linear':
        return frequency / scaling.factor
    turns = scaling.original_length * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * frequency / scaling.factor + kept * frequency
