"""Spikes of the loss, whose steps are skipped (`faults.spike`)."""

import jax
import jax.numpy as jnp

FADING = 0.98  # decay of the usual loss per step: it covers about the last 50 steps
FEWEST_STEPS = 30.0  # sum of decaying weights, reached after about 46 steps, before a loss can be a spike


def is_spike(loss: jax.typing.ArrayLike, usual: jax.Array, deviations: float | None) -> jax.Array | bool:
    """Whether a loss is more than `deviations` standard deviations above the usual loss; None: never.

    Spikes, and skipping the batches before them: Chowdhery et al. 2022, arXiv:2204.02311, section 5.1.
    """
    if deviations is None:
        return False
    count = jnp.maximum(usual[0], 1.0)
    mean = usual[1] / count
    deviation = jnp.sqrt(jnp.maximum(usual[2] / count - mean**2, 1e-4))
    return (usual[0] >= FEWEST_STEPS) & (loss > mean + deviations * deviation)
