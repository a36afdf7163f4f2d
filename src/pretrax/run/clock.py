"""Time: how fast steps are, and how much of the time since the run began made progress that was kept (goodput)."""

import contextlib
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from pretrax.observe.attempts import note, read_attempts


class Clock:
    """Seconds spent training: compilation, evaluation, samples and saving do not count.

    Args:
        directory: of the run.
        writes: whether this process writes to its `attempts.jsonl`.
        step: that training goes on from.
        before: the description of the checkpoint it goes on from, {} at the beginning.
    """

    def __init__(self, directory: pathlib.Path, writes: bool, step: int, before: dict[str, Any]):
        events = read_attempts(directory)
        self._run_began = events[0]['time'] if events else time.time()
        self._lost = events[-1].get('lost') if events else None
        self._directory = directory if writes else None
        self._note('began', step)
        self._saved = time.perf_counter()
        self.rewind(before)

    def stepped(self, step: int, say: Callable[[str], None]) -> None:
        """A step is done. The first one tells how long it took since the attempt before was lost."""
        try:
            self._note('stepped', step)
        except OSError as error:
            say(f'WARNING: cannot write to {self._directory}: {error.strerror}. Training goes on')
        if self._directory is not None and self._lost is not None:
            say(f'training again, {time.time() - self._lost:.1f} s after the loss')
        self._directory = None

    def _note(self, event: str, step: int) -> None:
        if self._directory is not None:
            note(self._directory, event, step=step)

    def start(self, number: int) -> None:
        """The next lap begins after step `number`."""
        self._number, self._since = number, time.perf_counter()

    def lap(self, number: int) -> float:
        """Steps a second since the last lap."""
        now = time.perf_counter()
        seconds = now - self._since
        speed = (number - self._number) / seconds
        self._number, self._since = number, now
        self._productive += seconds
        return speed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def is_time(self, minutes: float | None) -> bool:
        """Whether so many minutes have gone by since the last checkpoint."""
        return minutes is not None and time.perf_counter() - self._saved >= 60 * minutes

    def goodput(self) -> float:
        """Seconds of steps that were kept, over all seconds since the run first began."""
        return self._productive / max(time.time() - self._run_began, 1e-9)

    def description(self) -> dict[str, Any]:
        """What a checkpoint has to remember of the time."""
        self._saved = time.perf_counter()
        return {'productive_seconds': self._productive + self._saved - self._since}

    def rewind(self, description: dict[str, Any]) -> None:
        """Work since a checkpoint is lost."""
        self._productive = description.get('productive_seconds', 0.0)
