"""Fetches the next batches in a background thread while the device works on the current one."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

type Waiting = Callable[[Future[Any]], contextlib.AbstractContextManager[Any]]


def prefetch[T](
    fetch: Callable[[int], T],
    indices: Iterable[int],
    depth: int = 2,
    patience: float = math.inf,
    stalled: Callable[[int, float], None] = lambda index, seconds: None,
    waiting: Waiting = contextlib.nullcontext,
) -> Generator[T]:
    """Yields fetch(index) for each index, in order; one thread fetches up to `depth` values ahead of the consumer.

    If the consumer waits longer than `patience` seconds, `stalled(index, seconds)` is called twice: during the wait
    with the seconds so far, and after it with the total. A value that is not there yet is waited for in the context
    `waiting(its future)`.

    An exception in `fetch` is raised when its value is due. `close()` (or leaving `contextlib.closing(...)`) cancels
    what is pending and returns when the thread has ended.
    """
    pending: deque[tuple[int, Future[T]]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix='prefetch')

    def wait() -> T:
        index, future = pending.popleft()
        began = time.monotonic()
        if not future.done():
            with waiting(future):
                if not futures.wait([future], None if patience == math.inf else patience).done:
                    stalled(index, time.monotonic() - began)
                    futures.wait([future])
                    stalled(index, time.monotonic() - began)
        return future.result()

    try:
        for index in indices:
            pending.append((index, pool.submit(fetch, index)))
            if len(pending) > depth:
                yield wait()
        while pending:
            yield wait()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
