"""Averages of the weights: an exponential moving one (`optimizer.ema_decay`), and Schedule-Free's, which is an
optimizer.

The exponential one is of Polyak and Juditsky 1992, doi:10.1137/0330046.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pretrax.train.groups import Setting, move


def first_average(weights: Any, decay: float | None) -> Any:
    """The average before the first step: a copy of the weights; None without a decay."""
    return None if decay is None else jax.tree.map(jnp.copy, weights)


def next_average(average: Any, weights: Any, decay: float | None, steps: jax.Array) -> Any:
    """d * average + (1 - d) * weights, where d = min(decay, (1 + steps) / (10 + steps)); None without a decay.

    `steps` counts those that have changed the weights, this one included.
    """
    if decay is None:
        return None
    # So that the first weights are soon forgotten, d rises to `decay`, as in tf.train.ExponentialMovingAverage
    keep = jnp.minimum(decay, (1 + steps) / (10 + steps))
    return jax.tree.map(lambda a, w: a + (1 - keep) * (w - a), average, weights)


class ScheduleFreeState(NamedTuple):
    """What Schedule-Free keeps besides the weights x."""

    z: Any  # the weights that the steps move
    moments: optax.OptState
    total: jax.Array  # f32[]: sum of the squares of the learning rates


@dataclasses.dataclass(frozen=True)
class ScheduleFree:
    """An optimizer whose weights are an average. Defazio et al. 2024, arXiv:2405.15682, algorithm 1.

    The state's weights are x of the paper: evaluations, samples and exports use the average. The gradient is that at
    y = (1 - b1) z + b1 x, where decay acts too. A step moves z, and x becomes the mean of all z so far, weighted by the
    squares of their learning rates, so that a warm-up counts little.
    """

    moments: optax.GradientTransformation  # scales the gradient, without momentum: b1 takes its place
    b1: float  # how near y is to x

    def init(self, weights: Any) -> ScheduleFreeState:
        """z = x."""
        return ScheduleFreeState(jax.tree.map(jnp.copy, weights), self.moments.init(weights), jnp.zeros(()))

    def update(self, gradient: Any, state: Any, weights: Any = None) -> tuple[Any, ScheduleFreeState]:
        """The direction, and the state with the next moments; `next_weights` moves z."""
        direction, moments = self.moments.update(gradient, state.moments, weights)
        return direction, state._replace(moments=moments)


Optimizer = optax.GradientTransformation | ScheduleFree


def gradient_point(optimizer: Optimizer, weights: Any, state: Any) -> Any:
    """Where the gradient of a step is taken: at the weights, or at y of Schedule-Free."""
    if not isinstance(optimizer, ScheduleFree):
        return weights
    return jax.tree.map(lambda x, z: x if z is None else x + (1 - optimizer.b1) * (z - x), weights, state.z)


def next_weights(
    optimizer: Optimizer, weights: Any, point: Any, update: tuple[Any, Any], rate: jax.Array, settings: Any
) -> tuple[Any, Any]:
    """The weights and the optimizer's state after a step; x and z of Schedule-Free.

    `update` is what the optimizer returned at `point`: the direction, against which the step goes, and its state.
    """
    direction, state = update
    if not isinstance(optimizer, ScheduleFree):
        return jax.tree.map(lambda w, u, one: move(w, u, rate, one), weights, direction, settings), state

    def moved(z: jax.Array | None, y: jax.Array, u: jax.Array, setting: Setting) -> jax.Array | None:
        return None if z is None else move(z, u, rate, setting, decaying=y)

    z = jax.tree.map(moved, state.z, point, direction, settings, is_leaf=lambda x: x is None)
    total = state.total + jnp.square(rate)
    c = jnp.where(total > 0, jnp.square(rate) / total, 0.0)
    x = jax.tree.map(lambda x, z: x if z is None else x + c * (z - x), weights, z)
    return x, state._replace(z=z, total=total)
