"""Every schedule against its formula, written out in numpy for all steps of a run."""

import numpy as np
import pytest

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
}


@pytest.mark.parametrize('name', FORMULAS)
def test_formula(name):
    multiplier, after = FORMULAS[name]
    np.testing.assert_allclose(
        [multiplier(step) for step in s], np.where(s < WARMUP, ramp, after), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(('name', 'final'), [('cosine', 0.3), ('linear', 0.3), ('wsd', 0.3)])
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
    multiplier = getattr(schedule, name)(4, warmup=4)
    np.testing.assert_allclose([multiplier(step) for step in range(4)], [0.25, 0.5, 0.75, 1], rtol=1e-6)


@pytest.mark.parametrize('name', FORMULAS)
def test_a_run_of_one_step_has_a_rate(name):
    assert float(getattr(schedule, name)(1)(0)) == pytest.approx(1)
