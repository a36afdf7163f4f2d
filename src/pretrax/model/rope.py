"""Rotary positions: queries and keys are turned by angles that grow with the position.

Letters: B batch, L length, D head.
"""

import math
from typing import Any

import jax.numpy as jnp

from pretrax.model.architecture import LayerKind, RopeScaling
from pretrax.shardlib import i32


def rotate(x: Any, positions: i32['B/r/d/e L/c'], kind: LayerKind) -> Any:
    """Queries or keys turned by their positions, in the layers that do so."""
    return x if kind.rope_base is None else rope(x, positions, kind.rope_base, kind.rope_scaling)


def rope(x: Any, positions: i32['B/r/d/e L/c'], base: float, scaling: RopeScaling | None = None) -> Any:
    """Turns the pair (i, i + D/2) of each head by position * base^(-2i/D). Su et al. 2021, arXiv:2104.09864, eq. 15."""
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequency = _scaled(frequency, scaling)
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _scaled(frequency: Any, scaling: RopeScaling) -> Any:
    """Frequencies for contexts longer by `factor`.

    linear: all are divided by it (Chen et al. 2023, arXiv:2306.15595, eq. 3). llama3: those that turn fewer than
    low_freq_factor times in the original length are divided, those that turn more than high_freq_factor times stay,
    and between them the two are mixed (the released code of Llama 3.1).
    """
    if scaling.kind == 'linear':
        return frequency / scaling.factor
    turns = scaling.original_length * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * frequency / scaling.factor + kept * frequency
