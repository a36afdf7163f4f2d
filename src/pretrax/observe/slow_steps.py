"""Finds steps that take several times the usual time."""

import contextlib
import statistics
from collections import deque
from typing import Protocol

SETTLING = 3  # first steps, which do not count: they allocate memory and fill the prefetch queue
_WINDOW, _FEWEST = 51, 8  # steps whose median is the usual time, at most and at least
_UNEVEN = 3  # calls after an interruption at which the time since the last call is not that of one step


class Clock(Protocol):
    """A clock that stops during evaluations and checkpoints."""

    interruptions: int  # how often something was done between steps

    def productive_seconds(self) -> float: ...
    def paused(self, work: str, step: int) -> contextlib.AbstractContextManager[None]: ...  # its time is not a step's


class SlowSteps:
    """Compares the time between calls with the median of the latest ones.

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
        self._since: float | None = None
        self._calls, self._times = 0, deque[float](maxlen=_WINDOW)

    def begin(self) -> bool:
        """Call it when a step begins. Returns whether the step before it was slow."""
        now, since = self._clock.productive_seconds(), self._since
        self._since, self._calls = now, self._calls + 1
        if self._clock.interruptions != self._interruptions:
            self._interruptions, self._uneven = self._clock.interruptions, _UNEVEN
        if self._uneven:  # the loop waited for the newest step, or the device had other work
            self._uneven -= 1
            return False
        if since is None or self._calls <= SETTLING + 1 or now <= since:  # the clock is set back by a rollback
            return False
        self.latest = now - since
        self.usual = statistics.median(self._times) if len(self._times) >= _FEWEST else 0.0
        self._times.append(self.latest)
        return 0 < self.usual * self._factor <= self.latest
