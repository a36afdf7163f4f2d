"""`attempts.jsonl` of a run: one event per line, from its launcher and from the processes that train it; and the
attempts to train that these describe.

    {"time": 1790000000.0, "event": "started", "attempt": 2, "processes": [71, 72], "lost": 1789999998.9}
    {"time": 1790000003.2, "event": "began", "step": 120}
    {"time": 1790000004.8, "event": "stepped", "step": 121}
    {"time": 1790000061.0, "event": "ended", "why": "killed: process 1 (SIGKILL)", "code": -9, "step": 140}
    {"time": 1790000090.0, "event": "stopped", "step": 160, "why": "time limit"}

A launcher writes "started", with the process ids or the names of machines, and "ended"; inside a Slurm job also
"allocated", with its nodes and the newest checkpoint, and "released", with its exit code. The training writes "began"
with its first step, "stepped" after that step, and at its end "finished", "stopped" or "failed" with its last step.
A device that computed something wrong is "corrupted", and "quarantined" after some times, with its process.
`time` is in seconds since 1970; `lost` is the time at which the previous attempt was lost. `alive` is the time at which
the file was last written or touched before: the training touches it every second in which a step ends.
"""

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pretrax.storage import AnyPath
from pretrax.storage.parts import read_records
from pretrax.system.line_files import append_record

FILE = 'attempts.jsonl'
CORRUPTED, QUARANTINED = 'corrupted', 'quarantined'  # see `run/replay.py`
RUNNING, FINISHED, STOPPED, FAILED, LOST = 'running', 'finished', 'stopped', 'failed', 'lost'
type State = Literal['running', 'finished', 'stopped', 'failed', 'lost']


def note(directory: pathlib.Path, event: str, **what: Any) -> dict[str, Any]:
    """Appends an event, and returns it. Raises OSError."""
    path = directory / FILE
    alive = {'alive': round(path.stat().st_mtime, 3)} if path.exists() else {}
    record = {'time': time.time(), 'event': event, **what, **alive}
    append_record(path, record)
    return record


def touch(directory: pathlib.Path) -> None:
    """Says that the training is alive, to whoever appends the next event."""
    with contextlib.suppress(OSError):
        os.utime(directory / FILE)


def read_attempts(directory: AnyPath) -> list[dict[str, Any]]:
    """All events, oldest first; none if the run has not begun. Lines that are not events are skipped."""
    return read_records(directory / FILE, is_event)


def quarantined(directory: AnyPath) -> dict[str, Any] | None:
    """The event of the device that was quarantined since processes were started last; None: none was."""
    events = read_attempts(directory)
    began = max((number for number, event in enumerate(events) if event['event'] == 'started'), default=0)
    return next((event for event in events[began:] if event['event'] == QUARANTINED), None)


def is_event(record: dict[str, Any]) -> bool:
    """Whether a JSON object is an event."""
    return is_time(record.get('time')) and isinstance(record.get('event'), str)


def is_time(value: Any) -> bool:
    """Whether a value of a file is a finite number of seconds."""
    return type(value) in (int, float) and abs(value) < 2**62


@dataclasses.dataclass
class Attempt:
    """One attempt. Times are in seconds since 1970; None: not known."""

    started: float | None = None  # when a launcher started the processes
    began: float | None = None  # when the training began to prepare its first step
    stepped: float | None = None  # when its first step was done; the compilation lies between
    ended: float | None = None
    first_step: int | None = None  # the step that it continued from
    last_step: int | None = None
    outcome: State = RUNNING  # how it ended; 'running' if it has not ended, or if nothing says how
    why: str = ''  # the reason of a stop or a failure
    processes: int | None = None  # number of processes that a launcher started; None: no launcher

    @property
    def start(self) -> float | None:
        """When it was first heard of."""
        return self.began if self.started is None else self.started


def attempts_of(events: Iterable[Mapping[str, Any]]) -> list[Attempt]:
    """The attempts that the lines of `attempts.jsonl` describe, oldest first.

    An attempt that another one follows, and whose end nobody has written, was lost.
    """
    attempts: list[Attempt] = []
    for event in events:
        kind, when, step = event['event'], float(event['time']), event.get('step')
        current = attempts[-1] if attempts else None
        is_open = current is not None and current.outcome == RUNNING
        if kind == 'started' or (kind == 'began' and (not is_open or current is None or current.began is not None)):
            if is_open and current is not None:
                current.outcome = LOST
            attempts.append(current := Attempt())
        if current is None:
            continue
        if kind == 'started':
            processes = event.get('processes')
            current.started, current.processes = when, len(processes) if isinstance(processes, list) else 0
        elif kind == 'began':
            current.began, current.first_step = when, _number(step)
        elif kind == 'stepped':
            current.stepped, current.last_step = when, _number(step)
        elif kind in (FINISHED, STOPPED, FAILED):
            current.ended, current.outcome, current.why = when, kind, str(event.get('why') or '')
            current.last_step = _number(step) if step is not None else current.last_step
        elif kind == 'ended' and current.outcome == RUNNING:  # what the training wrote about its end is more exact
            code, current.ended, current.why = event.get('code'), when, str(event.get('why') or '')
            current.outcome = FINISHED if code == 0 else FAILED if code in (1, 2, 78) else LOST
    return attempts


def _number(step: Any) -> int | None:
    return step if type(step) is int else None
