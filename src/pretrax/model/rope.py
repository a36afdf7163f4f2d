"""Rotary positions: queries and keys are turned by angles that grow with the position.

Letters: B batch, L length, H heads (of queries or of keys), D head.
"""

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture, LayerKind
from pretrax.model.rope_scaling import RopeScaling
from pretrax.shardlib import axis_size, f32, i32, num


def rotate(x: num['B/r/d/e L/c H/t D'], positions: i32['B/r/d/e L/c'], kind: LayerKind) -> num['B/r/d/e L/c H/t D']:
    """`rope` of queries or keys, in layers that have positions.

    Some families rotate only the first dimensions of a head. Black et al. 2022, arXiv:2204.06745, section 2.1.1.
    """
    if kind.rope_base is None:
        return x
    rotated = int(x.shape[-1] * kind.rotary_fraction)
    y = rope(x[..., :rotated], positions, kind.rope_base, kind.rope_scaling)
    return y if rotated == x.shape[-1] else jnp.concatenate([y, x[..., rotated:]], axis=-1)


def tempered(
    q: num['B/r/d/e L/c H/t D'], positions: i32['B/r/d/e L/c'], kind: LayerKind, arch: Architecture
) -> num['B/r/d/e L/c H/t D']:
    """Queries of layers without positions, times a number that grows with the position.

    Nakanishi 2025, arXiv:2501.19399, section 3; with steps of `temperature_length` tokens, as in the released code of
    Llama 4.
    """
    if kind.rope_base is not None or not arch.attention.temperature:
        return q
    steps = ((positions + 1) // arch.attention.temperature_length).astype(jnp.float32)
    temperature = 1 + arch.attention.temperature * jnp.log1p(steps)
    return (q.astype(jnp.float32) * temperature[:, :, None, None]).astype(q.dtype)


def rope(
    x: num['B/r/d/e L/c H/t D'], positions: i32['B/r/d/e L/c'], base: float, scaling: RopeScaling | None = None
) -> num['B/r/d/e L/c H/t D']:
    """Turns the pair (i, i + D/2) of each head by position * base^(-2i/D). Su et al. 2021, arXiv:2104.09864, eq. 15."""
    half = x.shape[-1] // 2
    frequency: f32[half] = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    amplitude = 1.0
    if scaling is not None:
        frequency = _scaled(frequency, base, scaling, positions.shape[1])
        amplitude = scaling.amplitude
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency
    # As arrays: XLA would compute them again for each number that they multiply.
    return _turn(x, *jax.lax.optimization_barrier((amplitude * jnp.cos(angle), amplitude * jnp.sin(angle))))


@jax.custom_vjp
def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The pairs of x, turned. Its transpose turns them back; derived, it would pad and add halves."""
    a, b = (half.astype(jnp.float32) for half in jnp.split(x, 2, axis=-1))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _turn_back(angle: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, None, None]:
    cos, sin = angle
    return _turn(dy, cos, -sin), None, None


_turn.defvjp(lambda x, cos, sin: (_turn(x, cos, sin), (cos, sin)), _turn_back)


def _scaled(frequency: f32['half'], base: float, scaling: RopeScaling, columns: int) -> f32['half']:
    """Frequencies for contexts that are longer by `factor`.

    linear: all frequencies are divided by it (Chen et al. 2023, arXiv:2306.15595, eq. 3). llama3: frequencies that turn
    fewer than low_freq_factor times in the original length are divided by it, those that turn more than
    high_freq_factor times are unchanged, and between them the two are interpolated (the released code of Llama 3.1).
    yarn: the same, with a ramp over the dimensions (Peng et al. 2023, arXiv:2309.00071, section 3.2, and the released
    code). longrope: each frequency has a divisor of its own, which depends on the length of the sequence (Ding et al.
    2024, arXiv:2402.13753). proportional: the frequencies of whole heads, of which the last pairs do not turn (the
    released code of Gemma 4).
    """
    half = frequency.shape[0]
    if scaling.kind == 'linear':
        return frequency / scaling.factor
    if scaling.kind == 'proportional':
        return jnp.where(jnp.arange(half) < int((scaling.fraction or 1.0) * half), frequency / scaling.factor, 0.0)
    if scaling.kind == 'longrope':
        return frequency / jnp.asarray(scaling.divisors(columns * axis_size('c')), jnp.float32)
    if scaling.kind == 'yarn':
        low, high = scaling.ramp(2 * half, base)
        kept = 1 - jnp.clip((jnp.arange(half, dtype=jnp.float32) - low) / (high - low), 0.0, 1.0)
    else:
        turns = scaling.original_length * frequency / (2 * jnp.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = jnp.clip((turns - low) / max(high - low, 1e-6), 0.0, 1.0)  # Llama 4 Scout has equal ones
    return (1 - kept) * frequency / scaling.factor + kept * frequency
