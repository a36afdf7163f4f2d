import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pretrax.data.batches.order import Order, permute, unpermute


@given(n=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_permute_is_a_permutation(n, seed, epoch):
    assert sorted(permute(np.arange(n), n, seed, np.array(epoch)).tolist()) == list(range(n))


@given(n=st.integers(2**40, 2**61), data=st.data())
def test_huge_ranges_need_no_table(n, data):
    index = data.draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1, max_size=50))
    permuted = permute(np.array(index), n, 3, np.array(0))
    assert permuted.min() >= 0
    assert permuted.max() < n
    assert len(set(permuted.tolist())) == len(index)


def test_every_index_goes_everywhere_equally_often():
    n, draws = 7, 7000
    epochs = np.arange(draws)
    for index in range(n):
        counts = np.bincount(permute(np.full(draws, index), n, 5, epochs), minlength=n)
        # 7 cells of 1000 expected: chi-squared with 6 degrees of freedom exceeds 33 once in 100,000.
        assert ((counts - draws / n) ** 2 / (draws / n)).sum() < 33


def test_neighbors_are_separated():
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
    # A run that resumes with another version of this file must keep its order.
    assert permute(np.arange(10), 10, 0, np.array(0)).tolist() == [7, 9, 3, 4, 0, 2, 1, 8, 5, 6]


def test_an_index_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r'range\(10\)'):
        permute(np.array([10]), 10, 0, np.array(0))


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**40))
def test_unpermute_is_the_inverse(n, seed, epoch):
    index = np.arange(n)
    assert unpermute(permute(index, n, seed, np.array(epoch)), n, seed, np.array(epoch)).tolist() == index.tolist()


ORDERS = {
    'n': st.integers(1, 2000),
    'block': st.integers(1, 50),
    'window': st.integers(1, 9),
    'seed': st.integers(0, 2**40),
}


@given(epoch=st.integers(0, 2**30), **ORDERS)
def test_every_epoch_has_every_row_once(n, block, window, seed, epoch):
    assert sorted(Order(n, block, seed, window)(epoch * n + np.arange(n)).tolist()) == list(range(n))


@given(**ORDERS)
def test_a_cache_of_one_window_reads_each_block_once(n, block, window, seed):
    """Simulates an LRU cache of `window` blocks over an epoch."""
    kept: dict[int, None] = {}
    n_reads = 0
    for touched in (Order(n, block, seed, window)(np.arange(n)) // block).tolist():
        n_reads += touched not in kept
        kept.pop(touched, None)
        kept[touched] = None
        if len(kept) > window:
            del kept[next(iter(kept))]
    assert n_reads == -(-n // block)


@given(data=st.data(), **ORDERS)
def test_consecutive_rows_of_an_epoch_lie_in_few_blocks(data, n, block, window, seed):
    start = data.draw(st.integers(0, n - 1))
    stretch = np.arange(start, data.draw(st.integers(start + 1, n)))
    touched = np.unique(Order(n, block, seed, window)(stretch) // block)
    assert len(touched) <= window * (2 + len(stretch) / (window * block))


@given(number=st.lists(st.integers(0, 10**14), min_size=1, max_size=20), **ORDERS)
def test_each_row_is_independent_of_the_others_in_the_call(n, block, window, seed, number):
    order = Order(n, block, seed, window)
    assert order(np.array(number)).tolist() == [int(order(np.array([one]))[0]) for one in number]


def test_seeking_takes_constant_memory():
    order = Order(10**12, 256, 7)
    tracemalloc.start()
    far = order(np.arange(10**15, 10**15 + 64))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert len(set(far.tolist())) == 64


def test_a_batch_mixes_distant_rows():
    n, block = 64_000, 10
    rows = Order(n, block, 0)(np.arange(n)).reshape(-1, 64)  # 64 rows a step
    assert all(len(set((step // block).tolist())) > 30 for step in rows), 'a step mixes many blocks'
    assert (np.abs(np.diff(rows.ravel())) < 5).mean() < 0.02
    assert abs(np.corrcoef(np.arange(n), rows.ravel())[0, 1]) < 0.05


def test_the_order_of_rows_is_the_same_in_every_version():
    assert Order(10, 3, 0, 2)(np.arange(20)).tolist() == [
        7, 8, 9, 6, 3, 4, 1, 5, 2, 0, 3, 8, 5, 4, 6, 7, 0, 9, 1, 2
    ]  # fmt: skip


def scrambled(x: int) -> int:
    """SplitMix64 of one number, as in `java.util.SplittableRandom`."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def permuted(x: int, n: int, seed: int, *keys: int) -> int:
    """The Feistel network of eight rounds over Z_a x Z_b, walked until the value is below n, for one position."""
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    key = scrambled(seed % 2**64)
    for more in keys:
        key = scrambled(key ^ more)
    while True:
        left, right = divmod(x, b)
        for step in range(1, 9):
            round_key = (key + step * 0x9E3779B97F4A7C15) % 2**64
            if step % 2:
                left = (left + scrambled(right ^ round_key) % a) % a
            else:
                right = (right + scrambled(left ^ round_key) % b) % b
        x = left * b + right
        if x < n:
            return x


def row_at(number: int, n: int, block: int, window: int, seed: int) -> int:
    """The row at one position: the blocks in their order, and in each window of blocks its rows in theirs."""
    epoch, index = divmod(number, n)
    n_blocks = -(-n // block)
    blocks = [permuted(position, n_blocks, seed, epoch) for position in range(n_blocks)]
    windows = [blocks[start : start + window] for start in range(0, n_blocks, window)]
    for place, here in enumerate(windows):
        rows = [row for at in here for row in range(at * block, min(at * block + block, n))]
        if index < len(rows):
            return rows[permuted(index, len(rows), seed, epoch, place)]
        index -= len(rows)
    raise AssertionError(number)


@given(number=st.integers(0, 10**14), size=st.integers(1, 6), **(ORDERS | {'n': st.integers(1, 300)}))
@example(number=1022, size=4, n=300, block=7, window=3, seed=5)  # from one page of positions to the next
def test_a_batch_has_the_rows_of_the_definition(n, block, window, seed, number, size):
    rows = Order(n, block, seed, window)(np.arange(number, number + size))
    assert rows.tolist() == [row_at(number + i, n, block, window, seed) for i in range(size)]
