"""What the comparison of nodes says."""

import numpy as np
import pytest

from pretrax.doctor.comparison import compare_nodes, outliers, share_of
from pretrax.doctor.findings import Finding


@pytest.mark.parametrize('n', [2, 3, 4, 8, 64])
def test_one_slow_node_is_named_among_any_number(n):
    rates = dict.fromkeys(range(n), 100.0) | {n - 1: 60.0}
    assert set(outliers(rates)) == {n - 1}


@pytest.mark.parametrize(('spread', 'most'), [(2, 0), (8, 0.15)])
def test_the_usual_spread_names_nobody(spread, most):
    """Nodes that vary by 2% raise no alarm. With 8%,
    the median alone would raise one for every second cluster of 16.
    """
    rng = np.random.default_rng(1)
    for n in (4, 16, 64):
        clusters = rng.normal(100, spread, (200, n))
        alarms = [bool(outliers(dict(enumerate(rates)))) for rates in clusters]
        assert np.mean(alarms) <= most
    below = clusters[:, :16] < 0.9 * np.median(clusters[:, :16], axis=1, keepdims=True)
    assert np.mean(below.any(axis=1)) > 0.5 or spread == 2


def test_almost_half_of_the_nodes_may_be_slow():
    """A mean and a standard deviation would name none: (100 - 50) / 26 < 3."""
    rates = {index: 50.0 if index < 3 else 100.0 + 0.1 * index for index in range(8)}
    assert set(outliers(rates)) == {0, 1, 2}
    values = np.array(list(rates.values()))
    assert np.all(np.abs(values - values.mean()) < 3 * values.std())


def test_a_node_that_is_a_little_slower_is_not_worth_a_repair():
    assert outliers({0: 100.0, 1: 100.0, 2: 100.0, 3: 100.0, 4: 92.0}) == {}


def test_the_table_names_who_differs_from_most():
    found = {index: [Finding('jax', version, fix='install', same=version)] for index, version in enumerate('aabac')}
    rows = compare_nodes(found)
    assert [(row.nodes, row.result) for row in rows] == [((2,), 'b, but a on 3 others'), ((4,), 'c, but a on 3 others')]
    assert all((row.status, row.fix) == ('failure', 'install') for row in rows)


def test_a_value_that_a_node_lacks_differs_only_if_that_counts():
    lacking = {0: [Finding('x', '1', same='1', fix='f', absent='not set')], 1: [], 2: []}
    assert [(row.nodes, row.result) for row in compare_nodes(lacking)] == [((0,), '1, but not set on 2 others')]
    assert [row.status for row in compare_nodes({0: [Finding('x', '1', same='1')], 1: []})] == ['ok']


def test_the_same_failure_of_several_nodes_is_one_row():
    found = {index: [Finding('files', 'limit 64', 'failure', 'raise it')] for index in (0, 2)} | {
        1: [Finding('files', 'limit 9')]
    }
    assert [(row.status, row.nodes) for row in compare_nodes(found)] == [('failure', (0, 2))]


def test_the_node_with_least_is_shown():
    found = {index: [Finding('disk', f'{free} GB free', amount=free)] for index, free in enumerate((5, 3, 9))}
    assert [(row.nodes, row.result) for row in compare_nodes(found)] == [((0, 1, 2), 'at least 3 GB free')]


def test_no_share_of_a_limit_is_over_100_percent():
    assert share_of(3e11, 4e11, 'the peak of H100') == '75% of the peak of H100'
    assert share_of(5e11, 4e11, 'the peak of H100') == 'more than the peak of H100'
