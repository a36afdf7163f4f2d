"""The processes of an elastic run: fewer after a loss that repeats itself, and all of them again later. It starts none."""

import time
from collections.abc import Callable, Collection

FIRST_PAUSE, LONGEST_PAUSE = 60.0, 3600.0  # seconds with fewer processes before it tries all again
_LOOK = 1.0  # seconds between two looks for a checkpoint


class Slots:
    """The shares of this machine's devices that have a process.

    All of them are tried again once the smaller group has made a checkpoint and has run for a pause. If the larger group
    ends without a checkpoint of its own, the smaller one continues, and the next pause is twice as long.

    Args:
        count: number of slots.
        fits: whether a run can have this number of processes.
        clock: returns seconds.
    """

    def __init__(self, count: int, fits: Callable[[int], bool], clock: Callable[[], float] = time.monotonic):
        self.used = list(range(count))
        self._all, self._fits, self._clock = list(self.used), fits, clock
        self._smaller: list[int] | None = None  # what to return to, while all are tried
        self._pause, self._since, self._step = FIRST_PAUSE, 0.0, 0
        self._looked = -_LOOK

    def started(self, step: int) -> None:
        """A group starts from the checkpoint of `step`."""
        self._since, self._step = self._clock(), step

    def is_time_to_grow(self, newest: Callable[[], int]) -> bool:
        """Whether to try all slots now. `newest` returns the step of the newest checkpoint, which takes a moment."""
        now = self._clock()
        is_due = len(self.used) < len(self._all) and now - self._since >= self._pause
        if not is_due or now - self._looked < _LOOK:
            return False
        self._looked = now
        return newest() > self._step

    def grow(self) -> None:
        """Uses all slots, on trial."""
        self._smaller, self.used = self.used, list(self._all)

    def ended(self, step: int) -> bool:
        """A group has ended, with the newest checkpoint at `step`. Returns whether it was a trial that failed."""
        smaller, self._smaller = self._smaller, None
        if smaller is None:
            return False
        if step > self._step:
            self._pause = FIRST_PAUSE
            return False
        self.used, self._pause = smaller, min(LONGEST_PAUSE, 2 * self._pause)
        return True

    def drop(self, numbers: Collection[int]) -> bool:
        """Leaves out these processes. Returns whether a smaller group fits."""
        left = [slot for number, slot in enumerate(self.used) if number not in numbers]
        count = next((count for count in range(len(left), 0, -1) if self._fits(count)), 0)
        self.used = left[:count] if count else self.used
        return bool(count)
