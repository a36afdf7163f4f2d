"""`attempts.jsonl` of a run: one event per line, from its launcher and from the processes that train it.

    {"time": 1790000000.0, "event": "started", "attempt": 2, "processes": [71, 72], "lost": 1789999998.9}
    {"time": 1790000003.2, "event": "began", "step": 120}
    {"time": 1790000004.8, "event": "stepped", "step": 121}
    {"time": 1790000061.0, "event": "ended", "why": "killed: process 1 (SIGKILL)", "code": -9, "step": 140}

A launcher writes "started", with the process ids, and "ended". The training writes "began" with its first step, and "stepped"
after that step. `time` is in seconds since 1970; `lost` is the time at which the previous attempt was lost.
"""

import json
import pathlib
import time
from typing import Any

FILE = 'attempts.jsonl'


def note(directory: pathlib.Path, event: str, **what: Any) -> None:
    """Appends an event."""
    with (directory / FILE).open('a') as lines:
        lines.write(json.dumps({'time': time.time(), 'event': event, **what}) + '\n')


def read_attempts(directory: pathlib.Path) -> list[dict[str, Any]]:
    """All events, oldest first; none if the run has not begun. An incomplete last line, which a kill leaves, is skipped."""
    path = directory / FILE
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith('\n')]
