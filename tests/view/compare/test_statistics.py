"""Intervals against SciPy's tests, and how often they contain the truth in seeded simulations."""

import math

import numpy as np
import pytest

from pretrax.view.compare.statistics import first_below, known_noise, paired, pooled, series_mean, welch

A, B = [3.1, 3.3, 2.9, 3.2], [2.9, 2.7, 3.0]


@pytest.mark.parametrize('confidence', [0.8, 0.95, 0.99])
def test_intervals_are_those_of_scipy(confidence):
    from scipy import stats

    def expected(result):
        interval = result.confidence_interval(confidence)
        return pytest.approx((interval.low, interval.high))

    found = welch(A, B, confidence)
    assert (found.low, found.high) == expected(stats.ttest_ind(B, A, equal_var=False))
    assert found.estimate == pytest.approx(np.mean(B) - np.mean(A))
    found = pooled(A, B, confidence)
    assert (found.low, found.high) == expected(stats.ttest_ind(B, A))
    found = paired(A[:3], B, confidence)
    assert (found.low, found.high) == expected(stats.ttest_rel(B, A[:3]))
    found = known_noise(A, B, 0.2, confidence)
    assert found.half == pytest.approx(stats.norm.ppf((1 + confidence) / 2) * 0.2 * math.sqrt(1 / 4 + 1 / 3))


def test_one_number_shows_no_noise():
    assert welch([1.0], B, 0.95) is None
    assert paired([1.0], [2.0], 0.95) is None
    assert pooled([1.0], [2.0], 0.95) is None
    assert pooled([1.0], B, 0.95).degrees == 2


@pytest.mark.parametrize(('count', 'sigma'), [(2, 1.0), (3, 3.0), (8, 1.0)])
def test_intervals_contain_the_truth_as_often_as_they_say(count, sigma):
    """The true difference is 0.5. Of 3,000 intervals of 90 %, the standard error of their coverage is 0.5 %."""
    random = np.random.default_rng(count)
    shared = random.normal(size=(3000, count))  # what a batch order does to both arms of a pair
    a, b = random.normal(size=(3000, count)), 0.5 + sigma * random.normal(size=(3000, count + 1))
    found = [welch(*pair, 0.9) for pair in zip(a, b, strict=True)]
    covered = np.mean([interval.low <= 0.5 <= interval.high for interval in found])
    assert covered == pytest.approx(0.9, abs=0.03 if count > 2 else 0.06)  # Welch's degrees of freedom are approximate
    found = [paired(*pair, 0.9) for pair in zip(a + 9 * shared, b[:, :count] + 9 * shared, strict=True)]
    assert np.mean([interval.low <= 0.5 <= interval.high for interval in found]) == pytest.approx(0.9, abs=0.02)
    assert np.mean([interval.half for interval in found]) < 20 * sigma


@pytest.mark.parametrize('rho', [0.0, 0.6, 0.9])
def test_the_mean_of_a_series_has_the_error_of_its_formula(rho):
    """An AR(1) process with noise of 1: the variance of its mean is 1 / (n (1 - rho)^2) for many n."""
    from scipy import stats

    random = np.random.default_rng(0)
    count, repeats = 400, 300
    values = np.zeros((repeats, count + 100))
    for i in range(1, count + 100):
        values[:, i] = rho * values[:, i - 1] + random.normal(size=repeats)
    found = [series_mean(series, 0.9) for series in 0.3 + values[:, 100:]]
    covered = np.mean([interval.low <= 0.3 <= interval.high for interval in found])
    assert covered == pytest.approx(0.9, abs=0.06)  # the standard error is 1.7 %
    expected = stats.norm.ppf(0.95) / (1 - rho) / math.sqrt(count)
    assert np.median([interval.half for interval in found]) == pytest.approx(expected, rel=0.15)


def test_a_series_that_is_too_short_or_constant():
    assert series_mean(np.arange(7.0), 0.95) is None
    found = series_mean(np.full(20, 0.25), 0.95)
    assert (found.low, found.estimate, found.high) == (0.25, 0.25, 0.25)


def test_the_first_place_below_a_level():
    x, y = np.array([0.0, 10.0, 20.0, 30.0]), np.array([4.0, 3.0, 3.5, 1.0])
    assert first_below(x, y, 3.25) == 7.5
    assert first_below(x, y, 3.0) == 10
    assert first_below(x, y, 2.25) == 25
    assert first_below(x, y, 5.0) == 0
    assert first_below(x, y, 0.5) is None
