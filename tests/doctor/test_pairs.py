"""Which node or link is slow, from the rates of pairs."""

import itertools

import pytest

from pretrax.doctor.comparison import rounds, slow_pairs

NAMES = {index: f'node{index}' for index in range(6)}


@pytest.mark.parametrize('n', range(2, 12))
def test_rounds_have_disjoint_pairs_and_no_pair_twice(n):
    every = list(rounds(n))
    for matches in every:
        players = [player for pair in matches for player in pair]
        assert len(players) == len(set(players)) == n - n % 2
    pairs = [frozenset(pair) for matches in every for pair in matches]
    assert len(pairs) == len(set(pairs))
    assert len(every) == min(3, n - 1 + n % 2)


def measured(slow):
    pairs = [tuple(sorted(pair)) for matches in rounds(6) for pair in matches]
    return {pair: 1e9 if slow(pair) else 1e10 for pair in pairs}


def test_a_slow_node_is_named():
    found = list(slow_pairs(measured(lambda pair: 4 in pair), NAMES))
    assert [finding.status for finding in found] == ['warning']
    assert found[0].result.startswith('node4 is slow: 1 GB/s')


def test_a_slow_link_is_named():
    a, b = next(pair for pair in measured(lambda _: False) if pair != (0, 5))
    found = list(slow_pairs(measured(lambda pair: pair == (a, b)), NAMES))
    assert [finding.status for finding in found] == ['warning']
    assert found[0].result.startswith(f'node{a} - node{b} is slow')


def test_equal_links_and_no_links():
    assert [finding.status for finding in slow_pairs(measured(lambda _: False), NAMES)] == ['ok']
    assert list(slow_pairs({}, NAMES)) == []
    assert all(set(pair) <= set(NAMES) for pair in itertools.chain(*rounds(6)))
