"""`attempts.jsonl` of a run: one event per line, from its launcher and from the processes that train it.

    {"time": 1790000000.0, "event": "started", "attempt": 2, "processes": [71, 72], "lost": 1789999998.9}
    {"time": 1790000003.2, "event": "began", "step": 120}
    {"time": 1790000004.8, "event": "stepped", "step": 121}
    {"time": 1790000061.0, "event": "ended", "why": "killed: process 1 (SIGKILL)", "code": -9, "step": 140}
    {"time": 1790000090.0, "event": "stopped", "step": 160, "why": "time limit"}

A launcher writes "started", with the process ids or the names of machines, and "ended"; inside a Slurm job also
"allocated", with its nodes and the newest checkpoint, and "released", with its exit code. The training writes "began"
with its first step, "stepped" after that step, and at its end "finished", "stopped" or "failed" with its last step.
`time` is in seconds since 1970; `lost` is the time at which the previous attempt was lost.
"""

import pathlib
import time
from typing import Any

from pretrax.machine.line_files import append_record, read_lines
from pretrax.storage import AnyPath
from pretrax.storage.parts import open_joined

FILE = 'attempts.jsonl'


def note(directory: pathlib.Path, event: str, **what: Any) -> None:
    """Appends an event. Raises OSError."""
    append_record(directory / FILE, {'time': time.time(), 'event': event, **what})


def read_attempts(directory: AnyPath) -> list[dict[str, Any]]:
    """All events, oldest first; none if the run has not begun. Lines that are not events are skipped."""
    try:
        with open_joined(directory / FILE) as lines:
            return [line.record for line in read_lines(lines, is_event) if line.record is not None]
    except FileNotFoundError:
        return []


def is_event(record: dict[str, Any]) -> bool:
    """Whether a JSON object is an event."""
    when = record.get('time')
    return (type(when) is int or type(when) is float) and abs(when) < 2**62 and isinstance(record.get('event'), str)
