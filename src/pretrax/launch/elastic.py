"""Chooses the processes of an elastic run: fewer after repeated losses, and all of them again later. Starts none."""

import time
from collections.abc import Callable, Collection

FIRST_PAUSE, LONGEST_PAUSE = 60.0, 3600.0  # seconds with fewer processes before all are tried again
PAUSE_AFTER_GONE = 5.0  # seconds, if machines were gone, and it is known when they are back
_LOOK = 1.0  # seconds between two looks for a checkpoint


class Slots:
    """The places that have a process: shares of this machine's devices, or machines.

    All of them are tried again once the smaller group has made a checkpoint and has run for a pause. If the larger
    group ends without a checkpoint of its own, the smaller one continues, and the next pause is twice as long.

    Args:
        fits: whether a run can have this number of processes.
        ready: returns those of the given slots, which were left out, that can be used now. It must not block, and is
            called again and again. None: unknown until they are tried.
        spares: places that are kept for those that are lost. Those that are used are removed from this list.
    """

    def __init__(
        self,
        count: int,
        fits: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
        ready: Callable[[Collection[int]], Collection[int]] | None = None,
        spares: list[int] | None = None,
    ):
        self._spares = [] if spares is None else spares
        self.used = [slot for slot in range(count) if slot not in self._spares]
        self._all, self._fits, self._clock, self._ready = list(self.used), fits, clock, ready
        self._larger = list(self.used)  # what to try next
        self._smaller: list[int] | None = None  # what to return to, while all are tried
        self._pause, self._since, self._step = FIRST_PAUSE, 0.0, 0
        self._looked = -_LOOK

    def started(self, step: int) -> None:
        """A group starts from the checkpoint of `step`."""
        self._since, self._step = self._clock(), step

    def is_time_to_grow(self, newest: Callable[[], int]) -> bool:
        """Whether to try more slots now. `newest` returns the step of the newest checkpoint, which takes a moment."""
        now = self._clock()
        is_due = len(self.used) < len(self._all) and now - self._since >= self._pause
        if not is_due or now - self._looked < _LOOK:
            return False
        self._looked = now
        missing = [slot for slot in self._all if slot not in self.used]
        self._larger = self._fitting(sorted([*self.used, *(self._ready(missing) if self._ready else missing)]))
        return len(self._larger) > len(self.used) and newest() > self._step

    def grow(self) -> None:
        """Uses all slots that are ready, on trial."""
        self._smaller, self.used = self.used, self._larger

    def ended(self, step: int) -> bool:
        """A group has ended, with the newest checkpoint at `step`. Returns whether it was a trial that failed."""
        smaller, self._smaller = self._smaller, None
        if smaller is None:
            return False
        if step > self._step:
            self._pause = FIRST_PAUSE
            return False
        self.used, self._pause = smaller, min(LONGEST_PAUSE, max(FIRST_PAUSE, 2 * self._pause))
        return True

    def drop(self, numbers: Collection[int], gone: bool = False) -> bool:
        """Leaves out these processes; `gone`: their machines are gone. Returns whether a smaller group fits."""
        left = self._fitting([slot for number, slot in enumerate(self.used) if number not in numbers])
        self.used = left or self.used
        if gone and self._ready:
            self._pause = PAUSE_AFTER_GONE
        return bool(left)

    def replace(self, numbers: Collection[int]) -> bool:
        """Lets spares take the places of these processes, which are gone. Returns whether there were enough."""
        if len(numbers) > len(self._spares):
            return False
        self._smaller = None
        for number in numbers:
            gone, self.used[number] = self.used[number], self._spares.pop(0)
            self._all[self._all.index(gone)] = self.used[number]
        return True

    def _fitting(self, slots: list[int]) -> list[int]:
        """The largest number of these slots that fits; none if no number does."""
        return slots[: next((count for count in range(len(slots), 0, -1) if self._fits(count)), 0)]

    def forget(self, numbers: Collection[int]) -> bool:
        """Leaves out these processes for good: their slots are gone. Returns whether a smaller group fits."""
        gone = {slot for number, slot in enumerate(self.used) if number in numbers}
        is_smaller = self.drop(numbers)
        if is_smaller:
            self._all = [slot for slot in self._all if slot not in gone]
            self._smaller = None
        return is_smaller
