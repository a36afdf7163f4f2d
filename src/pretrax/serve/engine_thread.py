"""The thread that runs an engine. Requests go in through a queue; updates come back to the event loop once a block."""

import asyncio
import collections
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pretrax.errors import Report, UserError
from pretrax.infer.request import EngineStatus, Request, Update

if TYPE_CHECKING:
    from pretrax.infer.engine import Engine

type Numbered = tuple[int, Update]  # an update, and the place of its request among those of its job


class EngineFailedError(Exception):
    """The engine raised an exception and runs no more."""


class Job:
    """Requests that belong together, such as the n choices of one answer. The event loop uses it, but for `later`.

    Iterating gives what each block of the engine found out, until all requests have finished. A reader that is late
    gets several blocks at once.

    Args:
        at_once: the most of them that the engine has at a time, so that the requests of others are not behind all of
            them.
    """

    def __init__(self, requests: Sequence[Request], at_once: int):
        self.requests, self.at_once = tuple(requests), at_once
        self.later = collections.deque(range(len(requests)))  # those that the engine does not have yet; its thread's
        self._unfinished = set(range(len(requests)))
        self._updates: collections.deque[Numbered] = collections.deque()
        self._failure: Exception | None = None
        self._accepted = False
        self._news = asyncio.Event()

    async def accepted(self) -> None:
        """Waits until the engine has the requests. Raises UserError if it refuses one of them."""
        while not self._accepted:
            await self._wait()

    def __aiter__(self) -> 'Job':
        return self

    async def __anext__(self) -> list[Numbered]:
        if not self._unfinished and not self._updates:
            raise StopAsyncIteration
        while not self._updates:
            await self._wait()
        taken = list(self._updates)
        self._updates.clear()
        return taken

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._news.clear()
        await self._news.wait()

    def drop(self, index: int) -> None:
        """Waits no more for a request, which is about to be cancelled."""
        self._unfinished.discard(index)

    def put(self, news: Numbered | Exception | None) -> None:
        """Adds an update, a failure, or None: the requests were accepted."""
        if isinstance(news, Exception):
            self._failure = news
        elif news is None:
            self._accepted = True
        elif news[0] in self._unfinished:
            self._updates.append(news)
            if news[1].finish:
                self._unfinished.discard(news[0])
        self._news.set()


class EngineThread:
    """Runs an engine in a thread of its own.

    Args:
        engine: only this thread calls it.
        report: receives the traceback of an engine that fails.
    """

    def __init__(self, engine: 'Engine', report: Report):
        self.max_length, self.vocab_size = engine.max_length, engine.vocab_size
        self.status: EngineStatus = engine.status()  # the engine's after the newest block
        self.failed = False  # whether the engine raised an exception; then every request fails
        self._engine, self._report = engine, report
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[int, tuple[Job, int]] = {}
        self._news: list[tuple[Job, Numbered | Exception | None]] = []
        self._working_since: float | None = None  # when the block began that runs now
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name='engine', daemon=True)

    def start(self) -> None:
        """Call it in the event loop that is to receive the updates."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after the current block."""
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join, 10)  # an engine that hangs does not keep the process

    def submit(self, requests: Sequence[Request], at_once: int) -> Job:
        """Adds requests to the engine's queue, at most `at_once` of them at a time."""
        job = Job(requests, at_once)
        self._commands.put(lambda: self._add(job))
        return job

    def cancel(self, job: Job, index: int | None = None) -> None:
        """Ends one request of a job, or all; their slots are free after the current block."""
        for dropped in range(len(job.requests)) if index is None else [index]:
            job.drop(dropped)
        self._commands.put(lambda: self._cancel(job, index))

    def between_blocks(self, function: Callable[[], None]) -> None:
        """Runs a function in the thread before the next block, to change the engine. If it fails, that is reported."""

        def run() -> None:
            try:
                function()
            except Exception:
                self._report(traceback.format_exc())

        self._commands.put(run)

    @property
    def silent_for(self) -> float:
        """Seconds for which the engine has had work without finishing a block; infinite if its thread has ended."""
        since = self._working_since
        if self.failed or not self._thread.is_alive():
            return float('inf')
        return 0.0 if since is None else time.monotonic() - since

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._advance()
            except Exception:
                self._fail(traceback.format_exc())
            self._post()

    def _advance(self) -> None:
        idle = self.failed or self._engine.idle
        if idle:
            self._working_since = None
            command = self._commands.get()
            self._working_since = time.monotonic()
            command()
        while not self._commands.empty():
            self._commands.get()()
        if self.failed:
            return
        if not self._engine.idle:
            self._working_since = time.monotonic()
            for update in self._engine.step():
                self._take(update)
        self.status = self._engine.status()

    def _take(self, update: Update) -> None:
        if update.number not in self._jobs:  # cancelled
            return
        job, index = self._jobs[update.number]
        self._news.append((job, (index, update)))
        if update.finish:
            del self._jobs[update.number]
            self._fill(job)

    def _add(self, job: Job) -> None:
        if self.failed:
            self._news.append((job, EngineFailedError()))
            return
        try:
            for request in job.requests:
                self._engine.check(request)
        except UserError as error:
            self._news.append((job, error))
            return
        except Exception:
            self._news.append((job, EngineFailedError()))
            raise
        self._news.append((job, None))
        self._fill(job)

    def _fill(self, job: Job) -> None:
        """Gives the engine as many requests of a job as it may have at once."""
        room = job.at_once - sum(other is job for other, _ in self._jobs.values())
        try:
            for index in [job.later.popleft() for _ in range(min(room, len(job.later)))]:
                self._jobs[self._engine.add(job.requests[index])] = job, index
        except Exception:
            self._news.append((job, EngineFailedError()))
            raise

    def _cancel(self, job: Job, index: int | None) -> None:
        job.later = collections.deque(at for at in job.later if index is not None and at != index)
        for number, (other, at) in list(self._jobs.items()):
            if other is job and index in (None, at):
                del self._jobs[number]
                if not self.failed:
                    self._engine.cancel(number)
        if not self.failed:
            self._fill(job)

    def _stop(self) -> None:
        self._stopped = True

    def _fail(self, problem: str) -> None:
        self.failed = True
        self._report(f'the engine failed; restart the server\n{problem}')
        self._news += [(job, EngineFailedError()) for job in {job for job, _ in self._jobs.values()}]
        self._jobs.clear()

    def _post(self) -> None:
        """Hands over what a block found out: one call of the event loop, however many requests there are."""
        if self._news and not self._loop.is_closed():
            news, self._news = self._news, []
            self._loop.call_soon_threadsafe(_deliver, news)


def _deliver(news: list[tuple[Job, Numbered | Exception | None]]) -> None:
    for job, one in news:
        job.put(one)
