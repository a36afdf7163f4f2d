"""The start-up report: the data, the devices and every choice of a run, with the reasons.

The terminal shows the essential lines, or all of them with --verbose. `startup.txt` in the run directory has all.
"""

import pathlib
from collections.abc import Iterable
from typing import NamedTuple

from pretrax.errors import Report

FILE = 'startup.txt'
ESSENTIAL = {
    'text',
    'data',
    'tokens',
    'mixture',
    'devices',
    'mesh',
    'batch',
    'model',
    'compute',
    'memory',
    'mfu',
}


class StartupLine(NamedTuple):
    """A line of the start-up report, `topic: text`."""

    topic: str
    text: str

    def __str__(self) -> str:
        return f'{self.topic}: {self.text}' if self.topic else self.text

    @property
    def is_essential(self) -> bool:
        return not self.topic or self.topic in ESSENTIAL or 'SLOW' in self.text or 'WARNING' in self.topic


class StartupReport:
    """Collects the start-up report, and shows its essential lines as they come, or all if `verbose`."""

    def __init__(self, report: Report, verbose: bool):
        self.lines: list[StartupLine] = []
        self._report, self._verbose = report, verbose

    def add(self, line: StartupLine) -> None:
        self.lines.append(line)
        if self._verbose or line.is_essential:
            self._report(str(line))

    def report(self, text: str) -> None:
        """Adds a line given as text; a short text before the first colon is its topic."""
        topic, colon, rest = text.partition(': ')
        self.add(StartupLine(topic, rest) if colon and len(topic.split()) < 3 else StartupLine('', text))

    def extend(self, lines: Iterable[StartupLine]) -> None:
        """Adds lines."""
        for line in lines:
            self.add(line)

    def write(self, run_dir: pathlib.Path) -> None:
        """Writes all lines to `startup.txt`."""
        (run_dir / FILE).write_text(''.join(f'{line}\n' for line in self.lines))
