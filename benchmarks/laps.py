"""Times a step, for both sides of benchmarks/accelerator.py. Imports neither JAX nor PyTorch."""

import time
from collections.abc import Callable


def laps(steps: Callable[[int], None], seconds: float) -> list[float]:
    """Seconds per step, for several laps. A lap has enough steps that waiting for its end does not matter.

    Args:
        steps: runs the given number of steps and waits for the last one.
        seconds: total duration; there are at least three laps.
    """
    steps(3)
    start = time.perf_counter()
    steps(2)
    lap = max(1, round(min(1.0, seconds / 5) / ((time.perf_counter() - start) / 2)))
    found, start = [], time.perf_counter()
    while len(found) < 3 or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        steps(lap)
        found.append((time.perf_counter() - before) / lap)
    return found
