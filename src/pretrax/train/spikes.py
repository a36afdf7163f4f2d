"""What counts as a spike of the loss, whose step is skipped (`faults.spike`)."""

from typing import Any

import jax
import jax.numpy as jnp

FADING = 0.98  # the usual loss is that of the last 50 steps or so
FEWEST_STEPS = 30.0  # of fading weight, about 46, before there is a usual loss


def is_spike(loss: Any, usual: jax.Array, deviations: float | None) -> jax.Array | bool:
    """Whether a loss lies so many standard deviations above the usual one. Chowdhery et al. 2022, arXiv:2204.02311,
    section 5.1 tells of such spikes, and of passing over the batches before them."""
    if deviations is None:
        return False
    count = jnp.maximum(usual[0], 1.0)
    mean = usual[1] / count
    deviation = jnp.sqrt(jnp.maximum(usual[2] / count - mean**2, 1e-4))
    return (usual[0] >= FEWEST_STEPS) & (loss > mean + deviations * deviation)
