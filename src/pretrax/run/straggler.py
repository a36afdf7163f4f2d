"""Names the process that makes the others wait: its own work between steps takes longest."""

import os
import statistics
import time

import jax

from pretrax.checkpoint.agreement import gather
from pretrax.errors import Report
from pretrax.system.process_hosts import described, expected_hosts

EVERY = 20  # steps between two comparisons; each process sends one number


class Straggler:
    """Compares the time that processes spend between steps: fetching data, writing, being paused by their machine.

    A process that is fast waits inside of a step, for the others.
    """

    def __init__(self, report: Report):
        self._report = report
        self._named: int | None = None
        self._since = self._began = time.perf_counter()
        self._inside = 0.0
        self._steps = 0

    def begin_step(self) -> None:
        """Call it before a step."""
        self._began = time.perf_counter()

    def end_step(self, number: int) -> None:
        """Call it when the step with this number has ended, in all processes."""
        if jax.process_count() == 1:
            return
        now = time.perf_counter()
        self._inside, self._steps = self._inside + now - self._began, self._steps + 1
        self._began = now
        if number % EVERY:
            return
        per_step = (now - self._since) / self._steps
        own = per_step - self._inside / self._steps
        self._since, self._inside, self._steps = now, 0.0, 0
        if times := gather('time between steps', str(own)):
            self._compare([float(text) for text in times], per_step)

    def _compare(self, own: list[float], per_step: float) -> None:
        slow = slow_one(own, per_step)
        if slow is not None and slow != self._named:
            address = os.environ.get('JAX_COORDINATOR_ADDRESS', '')
            who = described([slow], dict(enumerate(expected_hosts(len(own), 0, address))))
            usual = statistics.median([seconds for index, seconds in enumerate(own) if index != slow])
            self._report(
                f'{who} is slow: between steps it takes {own[slow]:.2g} s, the others {usual:.2g} s, and they wait '
                'for it; '
                f'a step takes {per_step:.2g} s'
            )
        self._named = slow


def slow_one(own: list[float], per_step: float) -> int | None:
    """The process that takes a fifth of a step longer between steps than the others; None: they are alike.

    Args:
        own: seconds between steps, for each process.
        per_step: seconds of a step, with what is between steps.
    """
    slow = max(range(len(own)), key=own.__getitem__)
    usual = statistics.median([seconds for index, seconds in enumerate(own) if index != slow])
    return slow if own[slow] - usual > per_step / 5 else None
