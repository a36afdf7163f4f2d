"""How the time of a device divides among the operations that ran on it.

Operations overlap: streams run at the same time, and a loop contains the operations of its body. So that times can be
summed, every instant at which a device is busy counts once:

1. of one stream, only the innermost operation runs;
2. computation comes first: while any computes, communication is hidden, and copies are too;
3. then communication, which is exposed here; then copies between memories;
4. then what only contains others: loops, calls and conditionals;
5. several operations of the same rank share the instant equally.

The invariant: the times of all operations sum to the time that the device is busy, which is the length of the union of
their intervals. Busy time and gaps sum to the time of the steps.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

COMPUTATION, COMMUNICATION, COPY, CONTAINER = range(4)


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """An operation that ran once: `key` says which it is, `stream` what ran it. Times have any unit."""

    key: int
    stream: str
    start: float
    end: float
    rank: int = COMPUTATION


@dataclasses.dataclass
class Time:
    """Time of an operation in all its runs."""

    runs: int = 0
    # From start to end, summed over the runs, without the operations that it contains on its stream.
    elapsed: float = 0.0
    counted: float = 0.0  # its part of the device's busy time. For communication: the time that nothing hides.


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """A time in which a device ran nothing, between two operations."""

    start: float
    end: float
    before: int  # key of the operation that ended last; -1: none
    after: int  # key of the operation that ended the gap; -1: none


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """The time of one device between two instants: by operation, busy time, and gaps."""

    operations: dict[int, Time]
    busy: float
    communicating: float  # union of the intervals of communication, hidden or not
    gaps: list[Gap]

    @property
    def idle(self) -> float:
        return sum(gap.end - gap.start for gap in self.gaps)


def device_time(intervals: Sequence[Interval], first: float, last: float) -> DeviceTime:
    """Divides the time of one device from `first` to `last`; intervals are cut to it.

    Args:
        intervals: what ran on the device, in any order. Those of one stream are disjoint or contain each other.
    """
    times: dict[int, Time] = defaultdict(Time)
    pieces = []
    for one in _innermost(intervals):
        start, end = max(one.start, first), min(one.end, last)
        if end > start:
            pieces.append(dataclasses.replace(one, start=start, end=end))
            times[one.key].elapsed += end - start
    for one in intervals:
        times[one.key].runs += first <= one.start < last
    busy, gaps = _sweep(pieces, times, first, last)
    communicating = union_length((one.start, one.end) for one in pieces if one.rank == COMMUNICATION)
    return DeviceTime(
        {key: time for key, time in times.items() if time.runs or time.elapsed}, busy, communicating, gaps
    )


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end)."""
    total, reached = 0.0, float('-inf')
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _innermost(intervals: Sequence[Interval]) -> list[Interval]:
    """The parts of each interval in which no other one of its stream runs inside it."""
    by_stream: dict[str, list[Interval]] = defaultdict(list)
    for one in intervals:
        by_stream[one.stream].append(one)
    pieces: list[Interval] = []
    for stream in by_stream.values():
        stack: list[tuple[Interval, float]] = []  # an interval, and from where on it is not yet accounted for

        def close(until: float, stack: list[tuple[Interval, float]] = stack) -> None:
            while stack and stack[-1][0].end <= until:
                one, since = stack.pop()
                if one.end > since:
                    pieces.append(dataclasses.replace(one, start=since))
                if stack:
                    stack[-1] = stack[-1][0], max(stack[-1][1], one.end)

        for one in sorted(stream, key=lambda one: (one.start, -one.end)):
            close(one.start)
            if stack:
                outer, since = stack[-1]
                if one.start > since:
                    pieces.append(dataclasses.replace(outer, start=since, end=one.start))
                stack[-1] = outer, max(since, one.start)
            stack.append((one, one.start))
        close(float('inf'))
    return pieces


def _sweep(pieces: Sequence[Interval], times: dict[int, Time], first: float, last: float) -> tuple[float, list[Gap]]:
    """Adds to `times` what is counted for each operation. Returns the busy time and the gaps."""
    changes = sorted(
        [(one.start, 1, number) for number, one in enumerate(pieces)]
        + [(one.end, 0, number) for number, one in enumerate(pieces)]
    )
    active: tuple[dict[int, None], ...] = ({}, {}, {}, {})
    busy, gaps, previous, ended = 0.0, [], first, -1
    for instant, group in itertools.groupby(changes, key=lambda change: change[0]):
        steps = list(group)
        if instant > previous:
            running = next((rank for rank in active if rank), None)
            if running is None:
                after = next((pieces[number].key for _, opens, number in steps if opens), -1)
                gaps.append(Gap(previous, instant, ended, after))
            else:
                busy += instant - previous
                share = (instant - previous) / len(running)
                for number in running:
                    times[pieces[number].key].counted += share
        for _, opens, number in steps:
            rank = active[pieces[number].rank]
            if opens:
                rank[number] = None
            else:
                del rank[number]
                ended = pieces[number].key
        previous = instant
    if last > previous:
        gaps.append(Gap(previous, last, ended, -1))
    return busy, gaps
