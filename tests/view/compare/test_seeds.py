"""Means over seeds, and their intervals."""

import numpy as np
import pytest

from pretrax.view.compare.arms import mean_of


def test_the_interval_is_that_of_students_t():
    from scipy import stats

    values = [3.1, 3.4, 3.3, 3.2, 3.6]
    expected = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    interval = mean_of(values)
    assert (interval.low, interval.high) == pytest.approx(expected, rel=1e-9)
    assert mean_of([3.1]) is None
