"""Finds steps that take several times the usual time."""

import contextlib
import statistics
from collections import deque
from typing import Protocol

SETTLING = 3  # first steps, which do not count: they allocate memory and fill the prefetch queue
_WINDOW, _FEWEST = 51, 8  # steps whose median is the usual time, at most and at least
_UNEVEN = 3  # calls after an interruption at which the steps that have ended may have waited for other work


class Clock(Protocol):
    """A clock that stops during evaluations and checkpoints."""

    interruptions: int  # how often something was done between steps
    done: int  # the number of steps that the device is known to have computed

    def seconds_of_done(self) -> float: ...  # the time at which it had computed them
    def paused(self, work: str, step: int) -> contextlib.AbstractContextManager[None]: ...  # its time is not a step's


class SlowSteps:
    """Compares the time of the steps that ended since the last call with the median of the latest ones.

    Args:
        factor: a step is slow if it takes this many times the median.

    Attributes:
        usual: the median, in seconds; 0 before it is known.
        latest: seconds of the newest step.
    """

    def __init__(self, factor: float, clock: Clock):
        self.usual = self.latest = 0.0
        self._factor, self._clock = factor, clock
        self._interruptions, self._uneven = clock.interruptions, 0  # so far, and calls that still do not count
        self._newest: tuple[int, float] | None = None  # the steps that were done at the last call, and their seconds
        self._calls, self._times = 0, deque[float](maxlen=_WINDOW)

    def begin(self) -> bool:
        """Call it when a step begins. Returns whether a step was slow that has ended since the last call."""
        newest, (done, now) = self._newest, (self._clock.done, self._clock.seconds_of_done())
        self._newest, self._calls = (done, now), self._calls + 1
        if self._clock.interruptions != self._interruptions:
            self._interruptions, self._uneven = self._clock.interruptions, _UNEVEN
        if self._uneven:  # the device had other work
            self._uneven -= 1
            return False
        if newest is None or self._calls <= SETTLING + 1:
            return False
        steps, seconds = done - newest[0], now - newest[1]
        if steps <= 0 or seconds <= 0:  # no step has ended, or a rollback has set the clock back
            return False
        self.latest = seconds / steps
        self.usual = statistics.median(self._times) if len(self._times) >= _FEWEST else 0.0
        self._times.append(self.latest)
        return 0 < self.usual * self._factor <= self.latest
