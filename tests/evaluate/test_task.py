"""What a task measures, and how tasks are chosen."""

import math

import numpy as np
import pytest

from pretrax.errors import UserError
from pretrax.evaluate.results import TASKS
from pretrax.evaluate.task import aggregate, choose


def test_a_ratio_and_its_standard_error():
    """Of a mean: s / sqrt(N). Of a ratio: close to the spread of the ratios of many samples (a bootstrap)."""
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    mean = aggregate([{'m': (value, 1.0)} for value in values])['m']
    assert mean.value == pytest.approx(0.6)
    assert mean.stderr == pytest.approx(np.std(values, ddof=1) / math.sqrt(5))
    rng = np.random.default_rng(0)
    below = rng.integers(50, 200, 400).astype(float)
    above = below * 2 + rng.normal(0, 20, 400)
    ratio = aggregate([{'m': pair} for pair in zip(above, below, strict=True)])['m']
    samples = rng.integers(0, 400, (2000, 400))
    assert ratio.value == pytest.approx(above.sum() / below.sum())
    assert ratio.stderr == pytest.approx(np.std(above[samples].sum(1) / below[samples].sum(1)), rel=0.1)
    assert math.isnan(aggregate([{'m': (1.0, 1.0)}])['m'].stderr)


def test_an_unknown_task():
    with pytest.raises(UserError, match=r'(?s)no task .arithmetics.*did you mean arithmetic.*tasks: documentation, '):
        choose(['cloze', 'arithmetics'], TASKS)
