"""The speed of steps, and what the time of a run was spent on.

The host dispatches steps ahead of the device and reads them late, so the time between two reads is not that of a step:
a step may have ended long before it is read. The clock therefore counts from one moment at which the number of finished
steps was known to the next one.
"""

import contextlib
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pretrax.errors import Report
from pretrax.observe.attempts import note, read_attempts, touch
from pretrax.observe.goodput import PAUSES, divide, read_pauses
from pretrax.system.line_files import append_record
from pretrax.system.standby import tell_stepped

_OFTEN = 1.0  # seconds between two signs of life, and of short pauses that are written together
_SHORT = ('data', 'remember')  # such pauses: there may be one in each step


class Clock:
    """Seconds spent on training steps. Compilation, evaluation, samples and saving do not count.

    Args:
        writes: whether this process writes to `attempts.jsonl` there.
        description: the description of the checkpoint of that step; {}: none.
        age: seconds since the preparation of the training began.
        restore: seconds of them in which the state was restored.

    Attributes:
        interruptions: how often something was done between steps: a long pause, or layer statistics.
        done: the number of steps that the device is known to have computed.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        writes: bool,
        step: int,
        description: dict[str, Any],
        *,
        age: float = 0.0,
        restore: float = 0.0,
    ):
        events = read_attempts(directory)
        self._division = divide(events, read_pauses(directory) if writes else [])
        self._lost = events[-1].get('lost') if events else None
        self._directory = directory if writes else None
        self.interruptions = 0
        self._began = self._saved = self._touched = time.perf_counter()
        self._epoch = time.time() - self._began  # of the clock that is not set back
        self._speed = 0.0  # steps per second of the newest lap
        self._is_first, self._newest = True, step  # whether no step is done, and the newest one that is
        self._paused, self._unwritten = 0.0, dict.fromkeys(_SHORT, 0.0)  # seconds of pauses; those not written yet
        kept = description.get('productive_seconds', 0.0)
        self._note('began', step=step, age=round(age, 3), restore=round(restore, 3), kept=round(kept, 3))
        self.start(step)

    def stepped(self, step: int, report: Report) -> None:
        """Call it after every step. The first call reports how long the run was interrupted, if it was."""
        self._newest, now = step, time.perf_counter()
        if not self._is_first:
            if self._directory is not None and now - self._touched >= _OFTEN:
                touch(self._directory)
                self._touched = now
            return
        self._is_first, self._touched = False, now
        tell_stepped()
        try:
            self._note('stepped', step=step, compile=round(self._compiled - self._began, 3))
        except OSError as error:
            report(f'WARNING: cannot write to {self._directory}: {error.strerror}. Training continues')
        if self._directory is not None and self._lost is not None:
            report(f'training again, {max(0.0, time.time() - self._lost):.1f} s after the loss')

    def _note(self, event: str, **what: Any) -> None:
        record = {'event': event, **what, 'time': self._now()}
        try:
            if self._directory is not None:
                record = note(self._directory, event, **what) | {'time': self._now()}
        finally:
            self._division.event(record)

    def _now(self) -> float:
        """Seconds since 1970, by a clock that is not set back."""
        return self._epoch + time.perf_counter()

    def start(self, step: int) -> None:
        """Starts the first lap, after `step`. The step is compiled."""
        self._step = self.done = step
        self._since = self._done_at = time.perf_counter()
        if self._is_first:
            self._compiled = self._since

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
            self._speed = (self.done - self._step) / (self._done_at - self._since)
            self._step, self._since = self.done, self._done_at
        return self._speed

    @contextlib.contextmanager
    def paused(self, work: str, step: int) -> Iterator[None]:
        """Time inside this context does not count. `pauses.jsonl` lists it."""
        began = time.perf_counter()
        self.interruptions += work.strip('_') not in _SHORT  # which change the time of no step
        yield
        seconds = time.perf_counter() - began
        self._since += seconds
        self._done_at += seconds
        self._paused += seconds
        self._note_pause(work.strip('_'), step, seconds)

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Time inside this context is a wait for data: the device has nothing to do. It counts in the speed."""
        began = time.perf_counter()
        yield
        self._note_pause('data', self._newest, time.perf_counter() - began)

    def _note_pause(self, work: str, step: int, seconds: float) -> None:
        """Writes a pause that is over; short ones when they are a second together."""
        self._division.pause(work, seconds)
        if work in _SHORT:
            self._unwritten[work] += seconds
            if (seconds := self._unwritten[work]) < _OFTEN:
                return
            self._unwritten[work] = 0.0
        if self._directory is not None:
            record = {'time': time.time() - seconds, 'step': step, 'work': work, 'seconds': seconds}
            with contextlib.suppress(OSError):  # a full disk is reported by what is written there
                append_record(self._directory / PAUSES, record)

    def saved(self) -> None:
        """Call it when a checkpoint is saved."""
        self._saved = time.perf_counter()

    def is_time(self, minutes: float | None) -> bool:
        """Whether the last checkpoint is at least `minutes` old; False for None."""
        return minutes is not None and time.perf_counter() - self._saved >= 60 * minutes

    def seconds(self) -> dict[str, float]:
        """All seconds since the run first began, by cause: `observe.goodput.CAUSES`."""
        return self._division.at(self._now())

    def description(self) -> dict[str, Any]:
        """The part of a checkpoint's description that `rewind` needs."""
        return {'productive_seconds': self.productive_seconds()}

    def productive_seconds(self) -> float:
        """Seconds of steps so far. It goes back with a rollback."""
        return self.seconds()['kept']

    def seconds_of_done(self) -> float:
        """Seconds of the steps that are done, without those of pauses, since a moment that stays the same."""
        return self._done_at - self._paused

    def rolled_back(self, step: int, description: dict[str, Any]) -> None:
        """Returns to the time of the checkpoint of `step`, from the newest one: the steps since then are lost."""
        lost = self.productive_seconds() - description.get('productive_seconds', 0.0)
        with contextlib.suppress(OSError):
            self._note('rolled back', step=step, from_step=self._newest, lost=round(lost, 3))


def is_done(metrics: Mapping[str, Any]) -> bool:
    """Whether the device has computed a step, from its metrics. Does not wait."""
    return next(iter(metrics.values())).is_ready()
