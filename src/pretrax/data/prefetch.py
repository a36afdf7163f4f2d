"""Fetch the next batches in a background thread while the device works on this one."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor


def prefetch[T](fetch: Callable[[int], T], indices: Iterable[int], depth: int = 2) -> Generator[T]:
    """Yield fetch(index) for each index, in order, fetched up to `depth` ahead of the consumer by one thread.

    An exception in `fetch` is raised where its value would have been yielded. `close()` (or leaving
    `contextlib.closing(...)`) drops what is waiting and returns once the thread has ended.
    """
    pending: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix='prefetch')
    try:
        for index in indices:
            pending.append(pool.submit(fetch, index))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
