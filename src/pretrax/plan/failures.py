"""The goodput of a run on hardware that fails, by where the newest state is kept. It imports no JAX.

A state is kept every tau seconds of steps, blocks them for delta seconds, and is complete w seconds later. A failure,
every M seconds on average and at any moment as likely, loses the steps since the newest complete state, and R seconds
until the next step. The part of all time that is kept is

    tau / (M exp((R + w) / M) (exp((tau + delta) / M) - 1))

since failures may follow each other before a state is kept: Daly 2006, doi:10.1016/j.future.2004.11.016, eq. 20. To
first order, tau = sqrt(2 delta M) loses least: Young 1974, doi:10.1145/361147.361115.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

from pretrax.amounts import duration
from pretrax.tables import read_table

CONSTANTS: dict[str, Any] = read_table(Path(__file__).with_suffix('.yaml'))
READ: dict[str, float] = CONSTANTS['read']  # bytes/s, by where the state is


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a run finds its newest state after a failure. All times are in seconds."""

    name: str
    blocked: float  # in which a state blocks the steps: delta
    written: float  # from the step until its state is complete: w
    restart: float  # from a failure to the next step: R

    def interval(self, between: float) -> float:
        """The best seconds of steps between two states, with `between` seconds between failures."""
        return max(self.written, best_interval(self.blocked, between))

    def goodput(self, interval: float, between: float) -> float:
        """The part of all time that is spent on steps that are kept, between 0 and 1."""
        exponents = (self.restart + self.written) / between, (interval + self.blocked) / between
        if sum(exponents) > 700:  # it makes no progress
            return 0.0
        return interval / (between * math.exp(exponents[0]) * math.expm1(exponents[1]))

    def best_goodput(self, between: float) -> float:
        """`goodput` with the interval above."""
        return self.goodput(self.interval(between), between)


def best_interval(delta: float, between: float) -> float:
    """Seconds between states that block for `delta` seconds, with `between` seconds between failures. Young 1974."""
    return math.sqrt(2 * delta * between)


def sources(state: float, write: float = CONSTANTS['write']) -> list[Source]:
    """The places for a state, and the last with spare machines too.

    Args:
        state: bytes of a machine.
        write: bytes/s at which a machine writes checkpoints.
    """
    blocked, restart = state / CONSTANTS['copy'], {key: CONSTANTS['restart'] + state / n for key, n in READ.items()}
    replaced = CONSTANTS['machine_share'] * CONSTANTS['replacement']  # on average over failures
    return [
        Source('storage', blocked, state / write, restart['storage'] + replaced),
        Source('memory', blocked, state / CONSTANTS['write'], restart['memory'] + replaced),
        Source('memory with spares', blocked, state / CONSTANTS['write'], restart['memory']),
    ]


def lines_of(state: float, step: float, every: int, between: float, write: float) -> list[str]:
    """What `pretrax plan --mttf` prints.

    Args:
        state: bytes of the state of a machine.
        step: seconds of a step.
        every: steps between checkpoints in the configuration; 0: none.
        between: seconds between failures.
        write: see `sources`.
    """
    lines = [f'goodput with a failure every {duration(between)}, by where the newest state is:']
    for source in sources(state, write):
        best = max(1, round(source.interval(between) / step))
        key = 'checkpoint.every' if source.name == 'storage' else 'checkpoint.memory.every'
        for n in dict.fromkeys([every, best] if every and source.name == 'storage' else [best]):
            hint = ' (best)' if n == best else ''
            lines.append(f'    {f"{source.name}, {key}={n}{hint}":<56}{source.goodput(n * step, between):>7.1%}')
    return lines
