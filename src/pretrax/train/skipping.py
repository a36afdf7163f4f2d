"""Steps that change no weight: spikes of the loss (`faults.spike`), and in fp16 gradients that overflow.

Spikes, and skipping the batches before them: Chowdhery et al. 2022, arXiv:2204.02311, section 5.1.

In fp16 the loss is multiplied by a scale, so that small gradients do not become zero, and the gradient is divided by it.
Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

FADING = 0.98  # decay of the usual loss per step: it covers about the last 50 steps
FEWEST_STEPS = 30.0  # sum of decaying weights, reached after about 46 steps, before a loss can be a spike


def is_spike(loss: jax.typing.ArrayLike, usual: jax.Array, deviations: float | None) -> jax.Array | bool:
    """Whether a loss is more than `deviations` standard deviations above the usual loss; None: never."""
    if deviations is None:
        return False
    count = jnp.maximum(usual[0], 1.0)
    mean = usual[1] / count
    deviation = jnp.sqrt(jnp.maximum(usual[2] / count - mean**2, 1e-4))
    return (usual[0] >= FEWEST_STEPS) & (loss > mean + deviations * deviation)


class LossScale(NamedTuple):
    """How the scale of the loss changes. The defaults are those of torch.amp.GradScaler."""

    first: float = 65536.0
    interval: int = 2000  # steps without an overflow after which it doubles; an overflow halves it


def first_scale(rule: LossScale | None) -> jax.Array | None:
    """f32[2]: the first scale, and 0 steps since it changed."""
    return None if rule is None else jnp.array([rule.first, 0.0])


def next_scale(scale: jax.Array | None, is_finite: jax.Array, rule: LossScale | None) -> jax.Array | None:
    """The scale after a step whose gradient is finite or not; None without a rule."""
    if scale is None or rule is None:
        return scale
    value, steps = scale[0], scale[1] + 1
    doubles = steps >= rule.interval
    good = jnp.stack([jnp.where(doubles, 2 * value, value), jnp.where(doubles, 0, steps)])
    return jnp.where(is_finite, good, jnp.stack([value / 2, jnp.zeros(())]))


def is_fault(is_finite: jax.Array, loss: jax.typing.ArrayLike, scale: jax.Array | None) -> jax.Array:
    """Whether a skipped step counts towards a rollback: not if a smaller scale may make its gradient finite."""
    # The loss itself is not scaled yet: if it is not finite, no scale helps.
    return jnp.bool_(True) if scale is None else is_finite | ~jnp.isfinite(loss) | (scale[0] <= 1)
