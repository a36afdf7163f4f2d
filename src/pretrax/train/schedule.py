"""Learning-rate schedules by name: step -> fraction of the peak rate. All start with a linear warm-up.

The argument is the number of steps already taken, so the first step of a warm-up of n has 1/n of the peak.
"""

from collections.abc import Callable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from pydantic import AfterValidator, Field, WithJsonSchema

Schedule = Callable[[jax.Array], jax.Array]
Steps = Annotated[int, Field(ge=0)]
Warmup = Annotated[
    Steps,
    Field(description='steps in which the learning rate rises to its peak, or below 1 their share of all steps'),
    # When a configuration is loaded, the share becomes a number of steps.
    WithJsonSchema(
        {'anyOf': [{'type': 'integer', 'minimum': 0}, {'type': 'number', 'exclusiveMinimum': 0, 'exclusiveMaximum': 1}]}
    ),
]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Final = Annotated[Share, Field(description='multiplier at the last step')]
PositiveFinal = Annotated[PositiveShare, Field(description='multiplier at the last step')]
Interval = Annotated[int, Field(ge=1, description='steps between two changes of the multiplier')]
Factor = Annotated[PositiveShare, Field(description='what each change multiplies by')]
Decay = Annotated[Share, Field(description='share of the steps, at the end, in which the multiplier falls')]
Power = Annotated[float, Field(gt=0, allow_inf_nan=False, description='1: a straight line; larger: faster at first')]
Between = Annotated[
    Literal['constant', 'linear'], Field(description='constant: the multiplier of the last point; linear: a line')
]


def _ascending(points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    steps = [step for step, _ in points]
    if steps != sorted(set(steps)):
        raise ValueError(f'must have ascending steps, such as [[0, 1.0], [1000, 0.1]]; the steps are {steps}')
    return points


Point = tuple[Steps, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
Points = Annotated[
    tuple[Point, ...], Field(min_length=1, description='[[step, multiplier], ...]'), AfterValidator(_ascending)
]


def constant(steps: int, *, warmup: Warmup = 0) -> Schedule:
    """1 after the warm-up."""
    return _warm(warmup, lambda step: jnp.ones_like(step))


def cosine(steps: int, *, warmup: Warmup = 0, final: Final = 0.1) -> Schedule:
    """Half a cosine from 1 to `final` at the last step. Loshchilov and Hutter 2016, arXiv:1608.03983, eq. 5."""
    return _warm(
        warmup, lambda step: final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * _progress(step, warmup, steps)))
    )


def linear(steps: int, *, warmup: Warmup = 0, final: Final = 0.0) -> Schedule:
    """A straight line from 1 to `final` at the last step."""
    return _warm(warmup, lambda step: 1 + (final - 1) * _progress(step, warmup, steps))


def wsd(steps: int, *, warmup: Warmup = 0, decay: Decay = 0.2, final: Final = 0.0) -> Schedule:
    """Warm-up, stable, decay: 1 until the last `decay` share of the steps, then a line to `final`. arXiv:2404.06395."""
    start = max(steps - decay * steps, warmup)
    return _warm(warmup, lambda step: 1 + (final - 1) * _progress(step, start, steps))


def inverse_sqrt(steps: int, *, warmup: Warmup = 0) -> Schedule:
    """sqrt(warmup / step) after the warm-up. Vaswani et al. 2017, arXiv:1706.03762, eq. 3."""
    return _warm(warmup, lambda step: jnp.sqrt(max(warmup, 1) / jnp.maximum(step + 1, max(warmup, 1))))


def step(steps: int, *, every: Interval, warmup: Warmup = 0, factor: Factor = 0.1) -> Schedule:
    """Multiplied by `factor` after each `every` steps since the warm-up. torch.optim.lr_scheduler.StepLR."""
    return _warm(warmup, lambda step: factor ** jnp.floor((step - warmup) / every))


def exponential(steps: int, *, warmup: Warmup = 0, final: PositiveFinal = 0.1) -> Schedule:
    """Multiplied by the same factor at each step, from 1 to `final` at the last step."""
    return _warm(warmup, lambda step: final ** _progress(step, warmup, steps))


def polynomial(steps: int, *, warmup: Warmup = 0, power: Power = 2.0, final: Final = 0.0) -> Schedule:
    """A power of the remaining share of the steps, from 1 to `final` at the last step. torch's PolynomialLR."""
    return _warm(warmup, lambda step: final + (1 - final) * (1 - _progress(step, warmup, steps)) ** power)


def piecewise(steps: int, *, points: Points, warmup: Warmup = 0, between: Between = 'constant') -> Schedule:
    """The multiplier of the last point, or a straight line to the next one. Constant before the first and after the
    last.

    The steps of the points count from the start of the run, not from the end of the warm-up.
    """
    at, values = (jnp.asarray(column, jnp.float32) for column in zip(*points, strict=True))
    if between == 'linear':
        return _warm(warmup, lambda step: jnp.interp(step, at, values))
    return _warm(warmup, lambda step: values[jnp.maximum(jnp.searchsorted(at, step, side='right') - 1, 0)])


def _progress(step: jax.Array, start: float, end: float) -> jax.Array:
    """0 at `start`, 1 at the last step before `end`, linear between, clipped outside."""
    return jnp.clip((step - start) / max(end - 1 - start, 1), 0.0, 1.0)


def _warm(warmup: int, after: Schedule) -> Schedule:
    def schedule(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        return jnp.where(step < warmup, (step + 1) / max(warmup, 1), after(step))

    return schedule
