"""How the time of a device divides: against instants counted one by one, on random and on hand-made intervals."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrax.view.trace.device_time import (
    COMMUNICATION,
    COMPUTATION,
    CONTAINER,
    COPY,
    Interval,
    device_time,
    union_length,
)

LENGTH = 30


@st.composite
def intervals(draw):
    """Intervals on up to four streams, nested or disjoint within each."""
    found = []

    def fill(stream, start, end, depth):
        while start < end and draw(st.booleans()):
            first = draw(st.integers(start, end - 1))
            last = draw(st.integers(first + 1, end))
            found.append(Interval(draw(st.integers(0, 5)), stream, first, last, draw(st.integers(0, 3))))
            if depth:
                fill(stream, first, last, depth - 1)
            start = last

    for stream in 'abcd':
        fill(stream, 0, LENGTH, 2)
    return found


def instants(ran):
    """For every unit of time: who runs, as the module's rules say, found without any arithmetic of intervals."""
    counted, busy = defaultdict(float), 0
    for now in range(LENGTH):
        innermost = {}
        for number, one in enumerate(ran):  # of nested ones, the inner one comes later
            if one.start <= now < one.end:
                innermost[one.stream] = number
        running = list(innermost.values())
        if running:
            busy += 1
            best = min(ran[number].rank for number in running)
            first = [number for number in running if ran[number].rank == best]
            for number in first:
                counted[ran[number].key] += 1 / len(first)
    return counted, busy


@given(intervals())
def test_the_times_of_operations_sum_to_the_busy_time_and_with_the_gaps_to_all(ran):
    found = device_time(ran, 0, LENGTH)
    covered = {now for one in ran for now in range(one.start, one.end)}
    assert found.busy == len(covered) == union_length((one.start, one.end) for one in ran)
    assert sum(time.counted for time in found.operations.values()) == pytest.approx(found.busy)
    assert found.busy + found.idle == LENGTH
    counted, busy = instants(ran)
    assert busy == found.busy
    assert {key: time.counted for key, time in found.operations.items() if time.counted} == pytest.approx(counted)


@given(intervals(), st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_two_halves_of_the_time_sum_to_the_whole(ran, cut, other):
    first, last = sorted((cut, other))
    parts = [device_time(ran, *edges) for edges in ((0, first), (first, last), (last, LENGTH))]
    whole = device_time(ran, 0, LENGTH)
    assert sum(part.busy for part in parts) == whole.busy
    for key, time in whole.operations.items():
        for name in ('counted', 'elapsed', 'runs'):
            values = [getattr(part.operations[key], name) for part in parts if key in part.operations]
            assert sum(values) == pytest.approx(getattr(time, name))


def test_communication_is_exposed_only_while_nothing_computes():
    ran = [
        Interval(0, 'compute', 0, 10),
        Interval(1, 'network', 4, 14, COMMUNICATION),
        Interval(2, 'network', 14, 16, COPY),
        Interval(0, 'compute', 20, 30),
    ]
    found = device_time(ran, 0, 32)
    assert (found.operations[0].counted, found.operations[0].runs) == (20, 2)
    assert (found.operations[1].elapsed, found.operations[1].counted) == (10, 4)  # 6 of the 10 are hidden
    assert found.communicating == 10
    assert [(gap.start, gap.end, gap.before, gap.after) for gap in found.gaps] == [(16, 20, 2, 0), (30, 32, 0, -1)]


def test_a_loop_counts_only_while_nothing_of_its_body_runs():
    ran = [
        Interval(0, 'thread 1', 0, 20, CONTAINER),
        Interval(1, 'thread 1', 2, 6, COMPUTATION),
        Interval(1, 'thread 2', 8, 14, COMPUTATION),
        Interval(2, 'thread 3', 10, 14, COMPUTATION),
    ]
    found = device_time(ran, 0, 20)
    assert {key: time.counted for key, time in found.operations.items()} == {0: 10, 1: 8, 2: 2}
    assert found.operations[0].elapsed == 16  # without what it contains on its own thread
    assert found.busy == 20
