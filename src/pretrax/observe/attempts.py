"""`attempts.jsonl` of a run: what became of it, one event a line, from the processes that train it and who starts them.

    {"time": 1790000000.0, "event": "started", "attempt": 2, "processes": [71, 72], "lost": 1789999998.9}
    {"time": 1790000003.2, "event": "began", "step": 120}
    {"time": 1790000004.8, "event": "stepped", "step": 121}
    {"time": 1790000061.0, "event": "ended", "why": "killed: process 1 (SIGKILL)", "code": -9, "step": 140}

A launcher notes "started" (with the process ids) and "ended"; the training "began", from a step, and "stepped", when its
first one is done. `time` is in seconds since 1970; `lost` is when the attempt before was lost.
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
    """All events so far, oldest first; none where the run has not begun. A line that a kill has cut short is left out."""
    path = directory / FILE
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith('\n')]
