"""Learning-rate schedules by name: step -> fraction of the peak rate. All start with a linear warm-up.

The argument is the number of steps already taken, so the first step of a warm-up of n has 1/n of the peak.
"""

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from pydantic import Field

Schedule = Callable[[jax.Array], jax.Array]
Steps = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def constant(steps: int, *, warmup: Steps = 0) -> Schedule:
    """1 after the warm-up."""
    return _warm(warmup, lambda step: jnp.ones_like(step))


def cosine(steps: int, *, warmup: Steps = 0, final: Share = 0.1) -> Schedule:
    """Half a cosine from 1 to `final` at the last step. Loshchilov and Hutter 2016, arXiv:1608.03983, eq. 5."""
    return _warm(
        warmup, lambda step: final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * _progress(step, warmup, steps)))
    )


def linear(steps: int, *, warmup: Steps = 0, final: Share = 0.0) -> Schedule:
    """A straight line from 1 to `final` at the last step."""
    return _warm(warmup, lambda step: 1 + (final - 1) * _progress(step, warmup, steps))


def wsd(steps: int, *, warmup: Steps = 0, decay: Share = 0.2, final: Share = 0.0) -> Schedule:
    """Warm-up, stable, decay: 1 until the last `decay` share of the steps, then a line to `final`. arXiv:2404.06395."""
    start = max(steps - decay * steps, warmup)
    return _warm(warmup, lambda step: 1 + (final - 1) * _progress(step, start, steps))


def inverse_sqrt(steps: int, *, warmup: Steps = 0) -> Schedule:
    """sqrt(warmup / step) after the warm-up. Vaswani et al. 2017, arXiv:1706.03762, eq. 3."""
    return _warm(warmup, lambda step: jnp.sqrt(max(warmup, 1) / jnp.maximum(step + 1, max(warmup, 1))))


def _progress(step: jax.Array, start: float, end: float) -> jax.Array:
    """0 at `start`, 1 at the last step before `end`, linear between, clipped outside."""
    return jnp.clip((step - start) / max(end - 1 - start, 1), 0.0, 1.0)


def _warm(warmup: int, after: Schedule) -> Schedule:
    def schedule(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        return jnp.where(step < warmup, (step + 1) / max(warmup, 1), after(step))

    return schedule
