import contextlib
import itertools
import threading

import pytest

from pretrax.data.batches.prefetch import prefetch


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith('prefetch')]


def test_yields_in_order_and_ends():
    assert list(prefetch(lambda index: index * index, range(20), depth=3)) == [index * index for index in range(20)]
    assert not running()


def test_fetches_in_the_background_at_most_depth_ahead():
    fetched = []
    third = threading.Event()

    def fetch(index: int) -> int:
        fetched.append(index)
        if index == 2:
            third.set()
        return index

    with contextlib.closing(prefetch(fetch, itertools.count(), depth=2)) as batches:
        assert next(batches) == 0
        assert third.wait(timeout=60), 'later batches are fetched before they are requested'
    assert fetched == [0, 1, 2]


def test_an_exception_is_raised_when_its_value_is_due():
    def fetch(index: int) -> int:
        if index == 3:
            raise OSError('the disk is gone')
        return index

    batches = prefetch(fetch, range(10), depth=4)
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match='the disk is gone'):
        next(batches)
    assert not running()


def test_stop_iteration_in_fetch_is_an_error():
    def fetch(index: int) -> int:
        raise StopIteration(index)

    with pytest.raises(RuntimeError):
        list(prefetch(fetch, range(3)))


def test_closing_ends_the_thread():
    with contextlib.closing(prefetch(lambda index: index, itertools.count(), depth=2)) as batches:
        assert next(batches) == 0
        assert running()
    assert not running()


def test_a_wait_longer_than_the_patience_is_reported():
    told: list[tuple[int, float]] = []
    release = threading.Event()

    def fetch(index: int) -> int:
        if index == 2:
            assert release.wait(timeout=60)
        return index

    def stalled(index: int, seconds: float) -> None:
        told.append((index, seconds))
        release.set()  # only after the consumer ran out of patience

    assert list(prefetch(fetch, range(4), depth=1, patience=0.01, stalled=stalled)) == [0, 1, 2, 3]
    assert [index for index, _ in told] == [2, 2]
    assert 0.01 <= told[0][1] <= told[1][1]
