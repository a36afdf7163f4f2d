"""Time: how fast steps are, and how much of the time since the run began made progress that was kept (goodput)."""

import contextlib
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any


class Clock:
    """Seconds spent training: compilation, evaluation, samples and saving do not count.

    Args:
        directory: of the run; `attempts.jsonl` there has a line for every process that trained it.
        writes: whether this process writes that line.
        step: that training goes on from.
        before: the description of the checkpoint it goes on from, {} at the beginning.
    """

    def __init__(self, directory: pathlib.Path, writes: bool, step: int, before: dict[str, Any]):
        attempts = directory / 'attempts.jsonl'
        first = attempts.read_text().partition('\n')[0] if attempts.exists() else ''
        now = time.time()
        self._run_began = json.loads(first)['time'] if first else now
        if writes:
            with attempts.open('a') as lines:
                lines.write(json.dumps({'time': now, 'step': step}) + '\n')
        self._saved = time.perf_counter()
        self.rewind(before)

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
