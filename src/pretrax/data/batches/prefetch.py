"""Fetch the next batches in a background thread while the device works on this one."""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor


def prefetch[T](
    fetch: Callable[[int], T],
    indices: Iterable[int],
    depth: int = 2,
    patience: float = math.inf,
    stalled: Callable[[int, float], None] = lambda index, seconds: None,
) -> Generator[T]:
    """Yield fetch(index) for each index, in order, fetched up to `depth` ahead of the consumer by one thread.

    Where the consumer has to wait for more than `patience` seconds, `stalled(index, seconds)` is called: once while it
    waits, with the seconds so far, and once when it has what it waited for, with all of them.

    An exception in `fetch` is raised where its value would have been yielded. `close()` (or leaving
    `contextlib.closing(...)`) drops what is waiting and returns once the thread has ended.
    """
    pending: deque[tuple[int, Future[T]]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix='prefetch')

    def wait() -> T:
        index, future = pending.popleft()
        began = time.monotonic()
        if not futures.wait([future], None if patience == math.inf else patience).done:
            stalled(index, time.monotonic() - began)
            value = future.result()
            stalled(index, time.monotonic() - began)
            return value
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
