"""Traced steps, joined to their program: rows by operation, scope and source line, and phases.

Times are seconds per step and device. See `view/trace/device_time.py` for how the time of a device divides among
operations.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pretrax.hlo.program import Operation, Program
from pretrax.storage import AnyPath

By = Literal['scope', 'operation', 'source']
# Phases in the order of a step.
_COMPUTING = ('forward', 'recomputation', 'backward', 'optimizer', 'computation')
PHASES = (*_COMPUTING, 'communication', 'copies', 'loops and calls', 'other programs', 'gaps', 'between steps')


FORWARD_AND_BACKWARD = 'forward and backward'  # a sum of phases
# Phases of `cost/roofline.py` that are not communication -> phases of a trace.
_PREDICTED = {
    'products of the layers': FORWARD_AND_BACKWARD,
    'attention': FORWARD_AND_BACKWARD,
    'norms, activations, rotation': FORWARD_AND_BACKWARD,
    'head and loss': FORWARD_AND_BACKWARD,
    'optimizer': 'optimizer',
    'pipeline bubble': 'gaps',
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a device can do: FLOP/s in the compute dtype, and bytes/s of its memory; None: not known."""

    name: str
    compute: str
    peak: float | None
    bandwidth: float | None

    def best(self, flops: float, moved: float) -> float | None:
        """The shortest time for some work and traffic; None if nothing is known."""
        times = [work / limit for work, limit in ((flops, self.peak), (moved, self.bandwidth)) if limit]
        return max(times, default=None)


@dataclasses.dataclass(frozen=True)
class Row:
    """The time of an operation, or of a scope or source line in one phase, per step and device."""

    name: str  # name of the scope ('layer/attention'), operation or source line
    phase: str
    runs: float
    seconds: float  # part of the device's busy time. All rows sum to it. For communication: time that nothing hides.
    elapsed: float  # from start to end of the operations, hidden or not
    flops: float | None  # FLOPs of products; None without a program
    bytes: float | None  # read and written; None without a program
    best: float | None  # seconds that the device's peak and bandwidth allow; None if they are not known
    rank: int  # rank in `device_time`: computation, communication, copy, or container

    @property
    def roofline(self) -> float | None:
        """Fraction of the roofline: the best time over the time that it took.

        None if it is not known, or over 1: then the peak was measured on a busy machine, or a cache answered the reads.
        """
        share = self.best / self.elapsed if self.best and self.elapsed else None
        return None if share is None or share > 1 else share


_SUMMED = ('runs', 'seconds', 'elapsed', 'flops', 'bytes', 'best')


@dataclasses.dataclass(frozen=True)
class TracedGap:
    """A time in which a device ran nothing, in seconds, and the operations around it."""

    seconds: float
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class TracedSteps:
    """The steps of a trace."""

    path: AnyPath
    first: int | None  # number of the first step; None if the trace does not say
    steps: int
    devices: int
    reason: str  # why they were traced; ''
    seconds: float  # seconds of a step, from its first operation to the first one of the next step, or to its last one
    busy: float  # seconds of these in which the device ran something
    between: float  # seconds between the last operation of a step and the first one of the next: it waits for the host
    communicating: float  # seconds of communication, hidden or not
    operations: tuple[Row, ...]  # a row per operation, longest first
    gaps: tuple[TracedGap, ...]  # the longest gaps of one device, within steps
    memory: Mapping[str, Any]  # memory of a device when the trace began, as `steps.json` has it
    limits: Limits
    predicted: Mapping[str, float]  # seconds by phase that `cost/roofline.py` predicts, hidden ones left out; {}: none
    program: Program | None  # the program of the step; None: its text is missing

    @property
    def idle(self) -> float:
        """Seconds per step without any operation, within steps."""
        return self.seconds - self.busy - self.between

    @property
    def planned(self) -> dict[str, float]:
        """What `predicted` says about phases of the trace: the sum of the computation, the update, communication."""
        found: dict[str, float] = defaultdict(float)
        for name, seconds in self.predicted.items():
            found[_PREDICTED.get(name, 'communication')] += seconds
        return dict(found)

    def rows(self, by: By = 'operation') -> list[Row]:
        """The time by scope, operation or source line, longest first. All layers are one scope."""
        if by == 'operation':
            return list(self.operations)
        groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in self.operations:
            known = self.program.operations.get(row.name) if self.program else None
            groups[self._group(known, by, row), row.phase].append(row)
        return sorted((_sum(name, rows) for (name, _), rows in groups.items()), key=lambda row: -row.seconds)

    def _group(self, known: Operation | None, by: By, row: Row) -> str:
        if row.phase in ('copies', 'other programs', 'loops and calls'):
            return f'({row.phase})'
        if known is None or self.program is None:
            return '(not in the program)'
        if by == 'source':
            return self.program.source(known) or '(unknown)'
        return re.sub(r'^layer(_\d+)?\b', 'layers', '/'.join(known.scope)) or '(unknown)'

    def place(self, row: Row) -> tuple[str, str]:
        """Scope and source line of an operation; '': not known."""
        known = self.program.operations.get(row.name) if self.program else None
        return ('/'.join(known.scope), self.program.source(known)) if known and self.program else ('', '')

    def phases(self) -> dict[str, float]:
        """Seconds by phase. They sum to `seconds`."""
        found: dict[str, float] = defaultdict(float)
        for row in self.operations:
            found[row.phase] += row.seconds
        found |= {'gaps': self.idle, 'between steps': self.between}
        return {phase: found[phase] for phase in PHASES if found[phase] > 0}


def _sum(name: str, rows: Sequence[Row]) -> Row:
    def total(field: str) -> float | None:
        known = [value for row in rows if (value := getattr(row, field)) is not None]
        return sum(known) if known else None

    sums: dict[str, Any] = {field: total(field) for field in _SUMMED}
    return Row(name=name, phase=rows[0].phase, rank=min(row.rank for row in rows), **sums)
