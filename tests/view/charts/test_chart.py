"""Axes, ticks, numbers and colors of a chart."""

import pytest

from pretrax.view.charts.chart import COLORS, log_ticks, number_text, ticks


@pytest.mark.parametrize(
    ('low', 'high'), [(0, 1), (2.31, 2.34), (-5, 1e6), (3.0, 3.0), (0, 0), (1e-9, 2e-9), (-2, -2), (0.999, 1000.001)]
)
def test_ticks_enclose_the_data_and_are_round(low, high):
    found = ticks(low, high)
    assert found[0] <= low + 1e-9 * abs(high - low)
    assert found[-1] >= high - 1e-9 * abs(high - low)
    assert 2 <= len(found) <= 10
    distance = found[1] - found[0]
    assert f'{distance:.1e}'[:3] in ('1.0', '2.0', '2.5', '5.0')


@pytest.mark.parametrize(('low', 'high'), [(1, 10), (2.31, 2.34), (1e-9, 1e6), (3.0, 3.0), (0.2, 70), (1, 5000)])
def test_logarithmic_ticks_enclose_the_data(low, high):
    found = log_ticks(low, high)
    assert found == sorted(found)
    assert 0 < found[0] <= low * (1 + 1e-9)
    assert found[-1] >= high * (1 - 1e-9)
    assert 2 <= len(found) <= 12


def test_numbers_are_short():
    shown = [number_text(value) for value in (0.25, 1000, 2_500_000, 1e9, 3.2e12)]
    assert shown == ['0.25', '1000', '2.5M', '1B', '3.2T']
    assert number_text(0.4321, is_fraction=True) == '43.21%'


def test_colors_are_different():
    assert len(set(COLORS)) == len(COLORS)
