"""Outcomes of a step: it trains, it has nothing to learn, or it is skipped. The last two change no weight.

A step has nothing to learn if no token of its batch is a target. It is skipped if its gradient is not finite, as in
fp16 after an overflow, or if its loss is a spike (`faults.spike`).

Spikes, and skipping the batches before them: Chowdhery et al. 2022, arXiv:2204.02311, section 5.1.

In fp16 the loss is multiplied by a scale, so that small gradients do not become zero, and the gradient is divided by
it. Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from pretrax.model.loss import nonzero

FADING = 0.98  # decay of the usual loss per step: it covers about the last 50 steps
FEWEST_STEPS = 30.0  # sum of decaying weights, reached after about 46 steps, before a loss can be a spike

Sums = Mapping[str, tuple[jax.Array, jax.Array]]  # term of the loss -> total numerator and denominator


class Past(Protocol):
    """The fields of a `TrainState` that an outcome depends on."""

    @property
    def skipped_in_a_row(self) -> jax.Array: ...
    @property
    def usual_loss(self) -> jax.Array: ...
    @property
    def loss_scale(self) -> jax.Array | None: ...


class InPlace(optax.GradientTransformationExtraArgs):
    """An optimizer whose `update` receives `trains`, bool[], and returns the old state if it is False."""


class Outcome(NamedTuple):
    """Whether a step changes the weights, and the fields of the next `TrainState` that depend on it."""

    loss: jax.Array  # f32[]; NaN if there is nothing to learn
    trains: jax.Array  # bool[]: the weights change
    has_targets: jax.Array  # bool[]: False: there is nothing to learn, which is not a fault
    skipped_in_a_row: jax.Array
    usual_loss: jax.Array
    loss_scale: jax.Array | None

    def if_trains(self, new: Any, old: Any) -> Any:
        """The arrays of `new` if the weights change, otherwise those of `old`."""
        return jax.tree.map(lambda a, b: jnp.where(self.trains, a, b), new, old)

    def optimizer_state(self, optimizer: Any, new: Any, old: Any) -> Any:
        """The state of an optimizer after the step, from the one that its `update` returned and the one before."""
        return new if isinstance(optimizer, InPlace) else self.if_trains(new, old)


def outcome_of(terms: Sums, norm: jax.Array, past: Past, spike: float | None, scaling: 'LossScale | None') -> Outcome:
    """The outcome of a step with these total sums of its loss, and this norm of its gradient.

    A gradient that is not finite is a fault with and without targets: then the weights are not finite, say.
    """
    loss = jnp.asarray(sum(numerator / nonzero(count) for numerator, count in terms.values()))
    is_finite, usual, scale = jnp.isfinite(norm), past.usual_loss, past.loss_scale
    has_targets = ~is_finite | jnp.any(jnp.stack([count != 0 for _, count in terms.values()]))
    trains = is_finite & has_targets & jnp.logical_not(is_spike(loss, usual, spike))
    counts = has_targets & is_fault(is_finite, loss, scale)
    adjusted = next_scale(scale, is_finite, scaling)
    return Outcome(
        loss=jnp.where(has_targets, loss, jnp.nan),
        trains=trains,
        has_targets=has_targets,
        skipped_in_a_row=jnp.where(trains, 0, past.skipped_in_a_row + counts),
        usual_loss=jnp.where(trains, FADING * usual + jnp.stack([jnp.ones(()), loss, loss**2]), usual),
        loss_scale=None if scale is None or adjusted is None else jnp.where(has_targets, adjusted, scale),
    )


def without_empty_means(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of a step without the means over no target, which are NaN although the loss is not."""
    if not metrics['steps_without_targets'] and not math.isfinite(metrics['loss']):
        return metrics
    return {name: value for name, value in metrics.items() if not math.isnan(value) or name.endswith('_norm')}


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
