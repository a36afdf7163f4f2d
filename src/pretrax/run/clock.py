"""The speed of steps, and goodput: the share of a run's time that was spent on steps that were kept.

The host dispatches steps ahead of the device and reads them late, so the time between two reads is not that of a step:
a step may have ended long before it is read. The clock therefore counts from one moment at which the number of finished
steps was known to the next one.
"""

import contextlib
import itertools
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pretrax.errors import Report
from pretrax.observe.attempts import note, read_attempts
from pretrax.system.line_files import append_record
from pretrax.system.standby import tell_stepped

PAUSES = 'pauses.jsonl'  # {"time", "step", "work", "seconds"} of each piece of work between steps


class Clock:
    """Seconds spent on training steps. Compilation, evaluation, samples and saving do not count.

    Args:
        writes: whether this process writes to `attempts.jsonl` there.
        description: the description of the checkpoint of that step; {}: none.

    Attributes:
        interruptions: how often something was done between steps: a pause, or layer statistics.
        done: the number of steps that the device is known to have computed.
    """

    def __init__(self, directory: pathlib.Path, writes: bool, step: int, description: dict[str, Any]):
        events = read_attempts(directory)
        self._began, self._earlier = time.perf_counter(), _seconds_since_the_first(events)
        self._lost = events[-1].get('lost') if events else None
        self._directory = directory if writes else None
        self.interruptions = 0
        self.start(step)
        self._speed = 0.0  # steps per second of the newest lap
        self._is_first, self._newest = True, step  # whether no step is done, and the newest one that is
        self._note('began', step)
        self._saved = time.perf_counter()
        self.rewind(description)

    def stepped(self, step: int, report: Report) -> None:
        """Call it after every step. The first call reports how long the run was interrupted, if it was."""
        self._newest = step
        if not self._is_first:
            return
        self._is_first = False
        tell_stepped()
        try:
            self._note('stepped', step)
        except OSError as error:
            report(f'WARNING: cannot write to {self._directory}: {error.strerror}. Training continues')
        if self._directory is not None and self._lost is not None:
            report(f'training again, {max(0.0, time.time() - self._lost):.1f} s after the loss')

    def _note(self, event: str, step: int) -> None:
        if self._directory is not None:
            note(self._directory, event, step=step)

    def start(self, step: int) -> None:
        """Starts the first lap, after `step`."""
        self._step = self.done = step
        self._since = self._done_at = time.perf_counter()

    def ended(self, step: int) -> None:
        """Call it when the device is known to have computed `step`, and the next step has hardly begun."""
        if step > self.done:
            self.done, self._done_at = step, time.perf_counter()

    def lap(self) -> float:
        """Ends a lap at the newest step that is done, and starts the next one.

        Returns:
            Its steps per second; if no step has ended since the last lap, those of the last lap.
        """
        if self.done > self._step:
            seconds = self._done_at - self._since
            self._speed = (self.done - self._step) / seconds
            self._productive += seconds
            self._step, self._since = self.done, self._done_at
        return self._speed

    @contextlib.contextmanager
    def paused(self, work: str, step: int) -> Iterator[None]:
        """Time inside this context does not count. `pauses.jsonl` lists it."""
        began, now = time.perf_counter(), time.time()
        self.interruptions += 1
        yield
        seconds = time.perf_counter() - began
        self._since += seconds
        self._done_at += seconds
        if self._directory is not None:
            record = {'time': now, 'step': step, 'work': work.strip('_'), 'seconds': seconds}
            with contextlib.suppress(OSError):  # a full disk is reported by what is written there
                append_record(self._directory / PAUSES, record)

    def saved(self) -> None:
        """Call it when a checkpoint is saved."""
        self._saved = time.perf_counter()

    def is_time(self, minutes: float | None) -> bool:
        """Whether the last checkpoint is at least `minutes` old; False for None."""
        return minutes is not None and time.perf_counter() - self._saved >= 60 * minutes

    def goodput(self) -> float:
        """Seconds of steps that were kept, over all seconds since the run first began; between 0 and 1."""
        return self._productive / max(self._earlier + time.perf_counter() - self._began, self._productive, 1e-9)

    def description(self) -> dict[str, Any]:
        """The part of a checkpoint's description that `rewind` needs."""
        return {'productive_seconds': self.productive_seconds()}

    def productive_seconds(self) -> float:
        """Seconds of steps so far. It goes back with a rollback."""
        return self._productive + time.perf_counter() - self._since

    def seconds_of_done(self) -> float:
        """Seconds of the steps that are done, as `productive_seconds`."""
        return self._productive + self._done_at - self._since

    def rewind(self, description: dict[str, Any]) -> None:
        """Returns to the time of a checkpoint: work since then is lost."""
        self._productive = description.get('productive_seconds', 0.0)

    def rolled_back(self, step: int, description: dict[str, Any]) -> None:
        """Returns to the time of the checkpoint of `step`, from the newest one."""
        self.rewind(description)
        if self._directory is not None:
            with contextlib.suppress(OSError):
                note(self._directory, 'rolled back', step=step, from_step=self._newest)


def is_done(metrics: Mapping[str, Any]) -> bool:
    """Whether the device has computed a step, from its metrics. Does not wait."""
    return next(iter(metrics.values())).is_ready()


def _seconds_since_the_first(events: list[dict[str, Any]]) -> float:
    """Seconds from the first event until now, without times in which the clock was set back between two events."""
    times = [event['time'] for event in events] + [time.time()]
    return sum(max(0.0, later - earlier) for earlier, later in itertools.pairwise(times))
