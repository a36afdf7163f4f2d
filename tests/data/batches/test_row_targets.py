"""The share of rows without a target is printed before training; if no row has one, there is nothing to train."""

import re

import numpy as np
import pytest

from pretrax.data.batches import row_targets
from pretrax.data.batches.row_targets import report_rows_without_targets
from pretrax.data.batches.source import HostBatch
from pretrax.errors import UserError

LENGTH = 8


def rows_with(has_target):
    """`read` of rows whose last token alone is a target, or none."""

    def read(numbers):
        mask = np.zeros((len(numbers), LENGTH), np.float32)
        mask[:, -1] = has_target[numbers]
        return HostBatch(mask, mask, mask, mask, mask)

    return read


def said(has_target, batch_rows=None):
    lines = []
    report_rows_without_targets('tokens', rows_with(has_target), len(has_target), LENGTH, lines.append, batch_rows)
    return lines


def test_all_rows_of_a_small_split_are_counted():
    has_target = np.random.default_rng(0).random(1000) < 0.7
    [line] = said(has_target, batch_rows=2)
    empty = 1000 - has_target.sum()
    assert f'{empty / 1000:.1%} ({empty:,} of 1,000 rows)' in line
    assert f'{(empty / 1000) ** 2:.2g} of the steps will have nothing to learn' in line
    assert said(np.ones(10, bool)) == ['targets: each of 10 rows has some']


def test_a_large_split_is_sampled_evenly(monkeypatch):
    monkeypatch.setattr(row_targets, 'MOST_ROWS', 400)
    has_target = np.arange(100_000) % 4 > 0
    [line] = said(has_target)
    assert '25.0% (100 of a sample of 400 rows)' in line


@pytest.mark.parametrize('most', [10_000, 80])
def test_no_target_at_all_is_an_error_and_one_in_a_row_that_is_not_sampled_is_none(monkeypatch, most):
    monkeypatch.setattr(row_targets, 'MOST_ROWS', most)
    nothing = np.zeros(1000, bool)
    with pytest.raises(UserError, match=r'none of the 1,000 rows has a target(.|\n)*data.prompt_field') as error:
        said(nothing)
    assert len(str(error.value).splitlines()) <= 10
    nothing[997 if most > 80 else 500] = True
    [line] = said(nothing)
    assert re.search(r'99\.9% \(999 of 1,000 rows\)' if most > 80 else r'100\.0% \(80 of a sample of 80 rows\)', line)
