"""Sends metrics to a tracker from a thread of its own, so that training never waits for it."""

import itertools
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from pretrax.errors import Report, first_line
from pretrax.observe.trackers.base import Line, Shown, Tracker

WAITING = 10_000  # lines and calls that wait for a tracker; one more, and it is dropped
BATCH = 500  # lines that are sent together
FLUSH_SECONDS = 2.0  # a checkpoint waits for the trackers at most this long
CLOSE_SECONDS = 60.0  # the end of a run waits for each tracker at most this long

type _Call = Callable[[], None]


class TrackerThread:
    """Gives a tracker every line of `metrics.jsonl` exactly once.

    The thread first sends the lines that the tracker does not have yet: those of a process that was killed before it
    had sent them, and those from before the tracker was configured. Steps that are trained again replace the earlier
    ones in a tracker that can remove points; another tracker keeps the earlier ones, and gets no second value for them.

    Args:
        past: the lines of earlier processes, oldest first.
        resumed_step: the step that training continues from.
        report: receives a warning if the tracker fails, which ends its use.
        close_seconds: how long `close` waits.
    """

    def __init__(
        self,
        tracker: Tracker,
        past: Iterable[Line],
        resumed_step: int,
        report: Report,
        close_seconds: float | None = None,
    ):
        self._tracker, self._report = tracker, report
        self._close_seconds = CLOSE_SECONDS if close_seconds is None else close_seconds
        self._newest: dict[str, int] = {}  # step by metric
        self._queue: queue.Queue[Line | _Call | None] = queue.Queue(WAITING)
        self._dropped = self._late = False
        self._flushed = threading.Event()
        self._flushed.set()
        self._doing = 'stopped working'
        self._thread = threading.Thread(
            target=self._run, args=(past, resumed_step), name=f'tracker {tracker.name}', daemon=True
        )
        self._thread.start()

    def log(self, line: Line) -> None:
        """Sends a line."""
        self._put(line)

    def show(self, step: int, key: str, content: Shown) -> None:
        """Sends a text, a table or a picture, unless the tracker has this one already."""

        def show() -> None:
            if step > self._newest.get(key, -1):
                self._newest[key] = step
                self._tracker.show(step, key, content)

        self._put(show)

    def file(self, path: pathlib.Path) -> None:
        """Sends a file."""
        self._put(lambda: self._tracker.file(path))

    def rewind(self, step: int) -> None:
        """Forgets later steps, which are trained again."""
        self._put(lambda: self._rewind(step))

    def begin_flush(self) -> None:
        """Asks the tracker to keep the lines so far."""
        self._late = not self._flushed.is_set()
        self._flushed = flushed = threading.Event()

        def flush() -> None:
            self._tracker.flush()
            flushed.set()

        self._put(flush)

    def end_flush(self, deadline: float) -> None:
        """Waits for the flush until a time of `time.monotonic`, unless the flush before it has not ended either."""
        if not self._late and not self._dropped:
            self._flushed.wait(max(0.0, deadline - time.monotonic()))

    def close(self, succeeded: bool) -> None:
        """Sends what waits, and closes the tracker."""
        deadline = time.monotonic() + self._close_seconds

        def close() -> None:
            self._doing = 'could not be finished'
            self._tracker.close(succeeded)

        try:
            if not self._dropped:
                for item in (close, None):
                    self._queue.put(item, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        self._thread.join(max(0.0, deadline - time.monotonic()) if not self._dropped else 0.0)
        if self._thread.is_alive() and not self._dropped:
            self._drop(f'it took longer than {self._close_seconds:g} s', 'could not be finished')

    def _put(self, item: Line | _Call) -> None:
        if self._dropped:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._drop(f'{WAITING:,} lines wait for it', 'is too slow')

    def _run(self, past: Iterable[Line], resumed_step: int) -> None:
        # A tracker is foreign code that uses a network. It may raise anything, and must not end a training. It is
        # dropped after its first failure. A later process of this run sends what is missing then.
        try:
            self._newest = dict(self._tracker.resume(resumed_step))
            batch: list[Line] = []
            for line in past:
                batch.append(line)
                if len(batch) == BATCH:
                    self._send(batch)
                    batch = []
            self._send(batch)
            self._follow()
        except Exception as error:
            self._drop(f'{type(error).__name__}: {first_line(error)}', self._doing)

    def _follow(self) -> None:
        """Does what is in the queue, until the end of the run."""
        while not self._dropped:
            items = [self._queue.get()]
            while len(items) < BATCH and not self._queue.empty():
                items.append(self._queue.get())
            for are_lines, group in itertools.groupby(items, lambda item: isinstance(item, Line)):
                if are_lines:
                    self._send([line for line in group if isinstance(line, Line)])
                    continue
                for call in group:
                    if not callable(call):
                        return
                    call()

    def _send(self, lines: Sequence[Line]) -> None:
        """Sends the numbers that the tracker does not have."""
        unsent = []
        for step, numbers, when in lines:
            fresh = {key: value for key, value in numbers.items() if step > self._newest.get(key, -1)}
            self._newest |= dict.fromkeys(fresh, step)
            if fresh:
                unsent.append(Line(step, fresh, when))
        if unsent:
            self._tracker.log(unsent)

    def _rewind(self, step: int) -> None:
        if self._tracker.rewind(step):
            self._newest = {key: min(newest, step) for key, newest in self._newest.items()}

    def _drop(self, reason: str, what: str) -> None:
        if self._dropped:
            return
        self._dropped = True
        self._report(
            f'WARNING: {self._tracker.name} {what} ({reason}). '
            f'It receives no more numbers of this run; metrics.jsonl has all of them.'
        )
