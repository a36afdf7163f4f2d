"""The speed of steps, and goodput: the share of a run's time that was spent on steps that were kept."""

import contextlib
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from pretrax.errors import Report
from pretrax.observe.attempts import note, read_attempts


class Clock:
    """Seconds spent on training steps. Compilation, evaluation, samples and saving do not count.

    Args:
        directory: the run directory.
        writes: whether this process writes to `attempts.jsonl` there.
        step: the step that training starts from.
        description: the description of the checkpoint of that step; {}: none.
    """

    def __init__(self, directory: pathlib.Path, writes: bool, step: int, description: dict[str, Any]):
        events = read_attempts(directory)
        self._run_began = events[0]['time'] if events else time.time()
        self._lost = events[-1].get('lost') if events else None
        self._directory = directory if writes else None
        self._note('began', step)
        self._saved = time.perf_counter()
        self.rewind(description)

    def stepped(self, step: int, report: Report) -> None:
        """Call it after every step. The first call reports how long the run was interrupted, if it was."""
        try:
            self._note('stepped', step)
        except OSError as error:
            report(f'WARNING: cannot write to {self._directory}: {error.strerror}. Training continues')
        if self._directory is not None and self._lost is not None:
            report(f'training again, {time.time() - self._lost:.1f} s after the loss')
        self._directory = None

    def _note(self, event: str, step: int) -> None:
        if self._directory is not None:
            note(self._directory, event, step=step)

    def start(self, step: int) -> None:
        """Starts the first lap, after `step`."""
        self._step, self._since = step, time.perf_counter()

    def lap(self, step: int) -> float:
        """Ends a lap at `step` and starts the next one. Returns the steps per second."""
        now = time.perf_counter()
        seconds = now - self._since
        speed = (step - self._step) / seconds
        self._step, self._since = step, now
        self._productive += seconds
        return speed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside this context does not count."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def is_time(self, minutes: float | None) -> bool:
        """Whether the last checkpoint is at least `minutes` old; False for None."""
        return minutes is not None and time.perf_counter() - self._saved >= 60 * minutes

    def goodput(self) -> float:
        """Seconds of steps that were kept, over all seconds since the run first began."""
        return self._productive / max(time.time() - self._run_began, 1e-9)

    def description(self) -> dict[str, Any]:
        """The part of a checkpoint's description that `rewind` needs. Call it when a checkpoint is saved."""
        self._saved = time.perf_counter()
        return {'productive_seconds': self._productive + self._saved - self._since}

    def rewind(self, description: dict[str, Any]) -> None:
        """Returns to the time of a checkpoint: work since then is lost."""
        self._productive = description.get('productive_seconds', 0.0)
