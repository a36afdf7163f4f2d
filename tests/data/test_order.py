import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrax.data.order import permute


@given(n=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_is_a_permutation(n, seed, epoch):
    assert sorted(permute(np.arange(n), n, seed, np.array(epoch)).tolist()) == list(range(n))


@given(n=st.integers(2**40, 2**61), data=st.data())
def test_stays_in_range_and_apart_where_no_table_would_fit(n, data):
    index = data.draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1, max_size=50))
    permuted = permute(np.array(index), n, 3, np.array(0))
    assert permuted.min() >= 0
    assert permuted.max() < n
    assert len(set(permuted.tolist())) == len(index)


def test_each_place_goes_everywhere_equally_often():
    n, draws = 7, 7000
    epochs = np.arange(draws)
    for index in range(n):
        counts = np.bincount(permute(np.full(draws, index), n, 5, epochs), minlength=n)
        # 7 cells of 1000 expected: chi-squared with 6 degrees of freedom exceeds 33 once in 100,000.
        assert ((counts - draws / n) ** 2 / (draws / n)).sum() < 33


def test_neighbours_part():
    n = 10_000
    permuted = permute(np.arange(n), n, 0, np.array(0))
    assert (np.abs(np.diff(permuted)) < 10).mean() < 0.01
    assert abs(np.corrcoef(np.arange(n), permuted)[0, 1]) < 0.05


def test_seed_and_epoch_change_the_order():
    index = np.arange(1000)
    orders = {tuple(permute(index, 1000, seed, np.array(epoch)).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_a_batch_may_span_epochs():
    index, epoch = np.array([998, 999, 0, 1]), np.array([4, 4, 5, 5])
    one_by_one = [int(permute(np.array([i]), 1000, 9, np.array([e]))[0]) for i, e in zip(index, epoch, strict=True)]
    assert permute(index, 1000, 9, epoch).tolist() == one_by_one


def test_the_order_is_the_same_in_every_version():
    # A run that is continued with another version of this file must go on in the same order.
    assert permute(np.arange(10), 10, 0, np.array(0)).tolist() == [7, 9, 3, 4, 0, 2, 1, 8, 5, 6]


def test_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r'range\(10\)'):
        permute(np.array([10]), 10, 0, np.array(0))
