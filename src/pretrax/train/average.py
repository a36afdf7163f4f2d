"""An exponential moving average of the weights (`optimizer.ema_decay`). Polyak and Juditsky 1992, doi:10.1137/0330046."""

from typing import Any

import jax
import jax.numpy as jnp


def first_average(weights: Any, decay: float | None) -> Any:
    """The average before the first step: a copy of the weights; None without a decay."""
    return None if decay is None else jax.tree.map(jnp.copy, weights)


def next_average(average: Any, weights: Any, decay: float | None, steps: jax.Array) -> Any:
    """d * average + (1 - d) * weights, where d = min(decay, (1 + steps) / (10 + steps)); None without a decay.

    So that the first weights are soon forgotten, d rises to `decay`, as in tf.train.ExponentialMovingAverage.

    Args:
        average: f32, sharded as the weights.
        weights: after this step.
        decay: per step.
        steps: how many steps have changed the weights, this one included.
    """
    if decay is None:
        return None
    keep = jnp.minimum(decay, (1 + steps) / (10 + steps))
    return jax.tree.map(lambda a, w: a + (1 - keep) * (w - a), average, weights)
