"""Every schedule against its formula, written out in numpy for all steps of a run."""

import json

import numpy as np
import optax
import pydantic
import pytest

from pretrax.config import from_values
from pretrax.config.registry import options_model
from pretrax.errors import UserError
from pretrax.train import schedule

STEPS, WARMUP = 100, 10
s = np.arange(STEPS)
ramp = (s + 1) / WARMUP
since = (s - WARMUP) / (STEPS - 1 - WARMUP)  # 0 at the first step after the warm-up, 1 at the last step

FORMULAS = {
    'constant': (schedule.constant(STEPS, warmup=WARMUP), np.ones(STEPS)),
    'cosine': (schedule.cosine(STEPS, warmup=WARMUP, final=0.1), 0.55 + 0.45 * np.cos(np.pi * since)),
    'linear': (schedule.linear(STEPS, warmup=WARMUP, final=0.2), 1 - 0.8 * since),
    'wsd': (schedule.wsd(STEPS, warmup=WARMUP, decay=0.2, final=0.1), np.where(s < 80, 1, 1 - 0.9 * (s - 80) / 19)),
    'inverse_sqrt': (schedule.inverse_sqrt(STEPS, warmup=WARMUP), np.sqrt(WARMUP / (s + 1))),
    'step': (schedule.step(STEPS, warmup=WARMUP, every=25, factor=0.5), 0.5 ** ((s - WARMUP) // 25)),
    'exponential': (schedule.exponential(STEPS, warmup=WARMUP, final=0.01), 0.01**since),
    'polynomial': (
        schedule.polynomial(STEPS, warmup=WARMUP, power=3.0, final=0.2), 0.2 + 0.8 * (1 - since).clip(0) ** 3
    ),
    'piecewise': (
        schedule.piecewise(STEPS, warmup=WARMUP, points=((0, 1.0), (40, 0.3), (80, 0.1))),
        np.select([s < 40, s < 80], [1.0, 0.3], 0.1),
    ),
}  # fmt: skip
REQUIRED = {'step': {'every': 25}, 'piecewise': {'points': ((0, 1.0), (40, 0.3))}}


def of_name(name, steps, **options):
    return getattr(schedule, name)(steps, **REQUIRED.get(name, {}), **options)


@pytest.mark.parametrize('name', FORMULAS)
def test_formula(name):
    multiplier, after = FORMULAS[name]
    np.testing.assert_allclose(
        [multiplier(step) for step in s], np.where(s < WARMUP, ramp, after), rtol=1e-5, atol=1e-6
    )


# The last argument of Optax's schedules is the number of steps from the first value to the last one.
OPTAX = {
    'step': (
        schedule.step(STEPS, every=30, factor=0.2),
        optax.exponential_decay(1.0, 30, 0.2, staircase=True),
    ),
    'exponential': (schedule.exponential(STEPS, final=0.05), optax.exponential_decay(1.0, STEPS - 1, 0.05)),
    'polynomial': (schedule.polynomial(STEPS, final=0.1), optax.polynomial_schedule(1.0, 0.1, 2.0, STEPS - 1)),
    'piecewise': (
        schedule.piecewise(STEPS, points=((0, 2.0), (30, 1.0), (60, 0.25))),
        optax.piecewise_constant_schedule(2.0, {30: 0.5, 60: 0.25}),
    ),
    'piecewise linear': (
        schedule.piecewise(STEPS, points=((0, 2.0), (30, 1.0), (60, 0.25)), between='linear'),
        optax.piecewise_interpolate_schedule('linear', 2.0, {30: 0.5, 60: 0.25}),
    ),
}


@pytest.mark.parametrize('name', OPTAX)
def test_the_same_as_optax(name):
    ours, theirs = OPTAX[name]
    after_the_end = range(STEPS, STEPS + 10) if name != 'exponential' else ()  # Optax's goes on to fall
    for step in [*s, *after_the_end]:
        np.testing.assert_allclose(ours(step), theirs(step), rtol=2e-5, err_msg=str(step))


def test_points_are_given_by_ascending_step():
    model = options_model('schedule', 'piecewise')
    model.model_validate_json('{"points": [[0, 1], [10, 0.5]]}', strict=True)
    for points in ([], [[10, 1.0], [5, 0.1]], [[5, 1.0], [5, 0.1]], [[0, -1.0]], [[-1, 1.0]], [[0.5, 1.0]], [[0]]):
        with pytest.raises(pydantic.ValidationError):
            model.model_validate_json(json.dumps({'points': points}), strict=True)


def test_points_that_descend_are_refused_with_an_example(values):
    wrong = values | {'schedule': {'name': 'piecewise', 'points': [[10, 1.0], [5, 0.1]]}}
    with pytest.raises(UserError, match=r'schedule\.points: must have ascending steps, such as \[\[0, 1\.0\]'):
        from_values(wrong)


FINAL = ('cosine', 'linear', 'wsd', 'exponential', 'polynomial')


@pytest.mark.parametrize(('name', 'final'), [(name, 0.3) for name in FINAL])
def test_begins_at_the_peak_and_ends_at_final(name, final):
    multiplier = getattr(schedule, name)(STEPS, final=final)
    assert float(multiplier(0)) == pytest.approx(1)
    assert float(multiplier(STEPS - 1)) == pytest.approx(final)
    assert float(multiplier(10 * STEPS)) == pytest.approx(final)  # a run that goes on past its end


def test_a_decay_that_would_begin_in_the_warmup_begins_at_the_peak():
    multiplier = schedule.wsd(STEPS, warmup=90, decay=0.5)
    expected = np.where(s < 90, (s + 1) / 90, 1 - (s - 90) / 9)
    np.testing.assert_allclose([multiplier(step) for step in s], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', FORMULAS)
def test_a_run_that_is_all_warmup(name):
    multiplier = of_name(name, 4, warmup=4)
    np.testing.assert_allclose([multiplier(step) for step in range(4)], [0.25, 0.5, 0.75, 1], rtol=1e-6)


@pytest.mark.parametrize('name', FORMULAS)
def test_a_run_of_one_step_has_a_rate(name):
    assert float(of_name(name, 1)(0)) == pytest.approx(1)
