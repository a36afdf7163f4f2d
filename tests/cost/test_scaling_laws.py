"""The fits of scaling laws recover the coefficients from which points were made."""

import dataclasses
import math

import numpy as np
import pytest

from pretrax.cost.scaling_laws import Point, budgets, fit
from pretrax.errors import UserError

# Hoffmann et al. 2022, arXiv:2203.15556, eq. 10
E, A, B, ALPHA, BETA = 1.69, 406.4, 410.7, 0.34, 0.28
BUDGETS = np.geomspace(6e18, 3e21, 6)


def loss(params, tokens):
    return E + A / params**ALPHA + B / tokens**BETA


def optimum(flops):
    """The best of many sizes, without the formula for it."""
    sizes = np.geomspace(1e6, 1e13, 200_001)
    return sizes[np.argmin(loss(sizes, flops / 6 / sizes))]


def made(noise, seed=0, sizes=7):
    """Runs around the best size of each budget, with curves."""
    random = np.random.default_rng(seed)
    points = []
    for flops in BUDGETS:
        for params in optimum(flops) * np.geomspace(0.25, 2.5, sizes):
            end = flops / 6 / params
            tokens = end * np.linspace(0.02, 1, 100)
            losses = loss(params, tokens) * np.exp(noise * random.standard_normal(100))
            curve = tuple(zip(tokens.tolist(), losses.tolist(), strict=True))
            points.append(Point(float(params), end, float(losses[-1]), curve))
    return points


@pytest.mark.slow
def test_approach_3_recovers_the_coefficients_without_noise():
    found = fit(made(0), 3, bootstrap=0)
    truth = {'E': E, 'A': A, 'B': B, 'alpha': ALPHA, 'beta': BETA}
    assert {name: found.values[name] for name in truth} == pytest.approx(truth, rel=2e-3)
    assert found.values['a'] == pytest.approx(BETA / (ALPHA + BETA), rel=1e-3)
    assert found.optimum(1e22) == pytest.approx(optimum(1e22), rel=5e-3)
    assert found.loss(1e9, 1e10) == pytest.approx(loss(1e9, 1e10), rel=1e-4)


@pytest.mark.slow
def test_the_intervals_of_approach_3_have_the_truth_and_shrink_with_the_noise():
    widths = []
    for noise in (0.002, 0.0005):
        found = fit(made(noise), 3, bootstrap=25)
        for name, true in {'E': E, 'alpha': ALPHA, 'beta': BETA, 'a': BETA / (ALPHA + BETA)}.items():
            low, high = found.intervals[name]
            assert low < true < high, (noise, name)
        low, high = found.interval(1e22)
        assert low < optimum(1e22) < high
        widths.append(math.log(high / low))
    assert 0 < widths[1] < widths[0]


@pytest.mark.parametrize(('approach', 'tolerance'), [(1, 0.05), (2, 0.01)])
def test_approaches_1_and_2_find_the_exponent_and_the_best_size(approach, tolerance):
    found = fit(made(0, sizes=15), approach, bootstrap=0)
    assert found.values['a'] == pytest.approx(BETA / (ALPHA + BETA), abs=tolerance)
    assert found.optimum(3e20) == pytest.approx(optimum(3e20), rel=0.15)


def test_the_interval_of_approach_2_has_the_truth():
    found = fit(made(0.0005), 2, bootstrap=100)
    low, high = found.intervals['a']
    assert low < BETA / (ALPHA + BETA) < high < 0.6
    assert len(found.optima) == len(budgets(made(0))) == len(BUDGETS)


@pytest.mark.slow
def test_an_outlier_hardly_moves_approach_3():
    points = made(0)
    points[3] = dataclasses.replace(points[3], loss=1.3 * points[3].loss)
    found = fit(points, 3, bootstrap=0)
    assert found.values['alpha'] == pytest.approx(ALPHA, rel=0.02)
    assert found.values['beta'] == pytest.approx(BETA, rel=0.02)


@pytest.mark.parametrize(
    ('points', 'approach', 'words'),
    [
        (made(0)[:7], 2, 'two or more budgets'),
        (made(0)[:4], 3, 'six or more different runs'),
        ([dataclasses.replace(point, curve=()) for point in made(0)], 1, 'needs the curves'),
        ([Point(n, d, 3.0) for n in (1e6, 1e7, 1e8) for d in (1e8, 1e9, 1e10)], 3, 'wider range'),
    ],
)
def test_points_that_determine_no_fit_are_refused(points, approach, words):
    with pytest.raises(UserError, match=words):
        fit(points, approach)
