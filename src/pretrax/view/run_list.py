"""The runs of a directory, each from a few small reads: a thousand runs are listed in seconds."""

import contextlib
import dataclasses
import fnmatch
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pretrax.amounts import age, natural_order
from pretrax.errors import UserError, first_line, system_errors
from pretrax.federation.objects import TABLE
from pretrax.federation.registry import is_federation
from pretrax.observe.attempts import FAILED, FINISHED, LOST, RUNNING, STOPPED, State, attempts_of, read_attempts
from pretrax.observe.attempts import FILE as ATTEMPTS
from pretrax.storage import AnyPath, BucketPath, locate
from pretrax.storage.parts import PART, parts_of
from pretrax.view.federation.lines import as_file, metric_lines
from pretrax.view.federation.read import NEWEST, read_federation
from pretrax.view.record.columns import Columns, parse_columns
from pretrax.view.record.state import RunState, state_of
from pretrax.view.record.verdict import KEYS, Losses, verdict
from pretrax.view.tables import text_table

METRICS = 'metrics.jsonl'
_FILES = {METRICS, ATTEMPTS, 'config.yaml'}  # a directory with one of them is a run
_HEAD = 16 * 1024  # bytes at the start of a file of metrics, which have the first losses
_TAIL = 64 * 1024  # bytes at the end of a file of metrics, which have the newest numbers
_SEARCHED = 8 * 1024 * 1024  # bytes at the end of a file of metrics that are searched for the best validation loss
_DEPTH = 3  # directories below the given one
_VALIDATION = b'"val_loss":'


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """A line of the list. None: not known."""

    name: str  # path below the listed directory
    path: str
    state: State | Literal['unreadable']  # state from `view.state`, or 'unreadable'
    why: str = ''
    step: int = 0  # last step with a line of metrics
    steps: int | None = None
    loss: float | None = None  # loss of the newest line that has one; may be NaN
    best_val_loss: float | None = None  # lowest finite validation loss
    best_step: int | None = None
    tokens_per_second: float | None = None  # tokens per second of the newest line that has one
    written: float | None = None  # when the last line was written, seconds since 1970
    verdict: str = ''  # what is wrong with its losses, such as 'diverged: ...'
    islands: int | None = None  # of a federation
    is_partial: bool = False  # the file is so large that the best validation loss is that of its last 8 MiB

    @property
    def progress(self) -> float | None:
        """Steps that are done, as a fraction of the configured ones."""
        return self.step / self.steps if self.steps else None


STATES = (RUNNING, FINISHED, STOPPED, FAILED, LOST, 'unreadable')
# What a list can be sorted by. A run without the number comes last.
ORDERS: dict[str, Callable[[RunSummary], Any]] = {
    'name': lambda run: natural_order(run.name),
    'state': lambda run: run.state,
    'step': lambda run: -run.step,
    'progress': lambda run: None if run.progress is None else -run.progress,
    'loss': lambda run: run.loss,
    'val_loss': lambda run: run.best_val_loss,
    'tokens_per_second': lambda run: None if run.tokens_per_second is None else -run.tokens_per_second,
    'age': lambda run: None if run.written is None else -run.written,
}


def list_runs(directories: Sequence[str]) -> list[RunSummary]:
    """The runs in directories, or these if they are runs themselves, in the order of their names.

    Raises:
        UserError: a directory does not exist, cannot be read, or has no runs.
    """
    found: dict[str, tuple[str, AnyPath]] = {}
    for text in directories:
        directory = locate(text)
        with system_errors(f'{directory} cannot be read'):
            runs = find_runs(directory)
        if not runs:
            raise UserError(f'no runs in {directory}: a run is a directory with a {METRICS}')
        many = len(directories) > 1
        for name, path in runs.items():
            found.setdefault(str(path), (str(path) if many else name, path))
    with ThreadPoolExecutor(16) as pool:  # file systems of clusters and buckets are slow to answer
        return sorted(pool.map(lambda run: summary(*run), found.values()), key=lambda run: natural_order(run.name))


def select(
    runs: Sequence[RunSummary], states: Sequence[str] = (), pattern: str = '*', order: str = 'name'
) -> list[RunSummary]:
    """The runs in these states (none: any) whose name matches a pattern, in an order of `ORDERS`."""
    kept = [run for run in runs if (not states or run.state in states) and fnmatch.fnmatchcase(run.name, pattern)]
    values = {run: value for run in kept if (value := ORDERS[order](run)) is not None and value == value}
    known = sorted(values, key=lambda run: (values[run], natural_order(run.name)))
    return known + [run for run in kept if run not in values]


def summary(name: str, path: AnyPath) -> RunSummary:
    """The line of a run. What goes wrong with its files is its state."""
    try:
        return _summary(name, path)
    except (OSError, UserError) as error:
        why = error.strerror if isinstance(error, OSError) else first_line(error)
        return RunSummary(name, str(path), 'unreadable', str(why))


def _summary(name: str, path: AnyPath) -> RunSummary:
    content, is_partial, changed = _end_of(path / METRICS)
    federation = read_federation(path, newest=NEWEST) if not content and is_federation(path) else None
    if federation is not None:
        content = as_file(metric_lines(federation))
        is_partial = bool(federation.rounds) and federation.rounds[0].number > 1
    tail = content[-_TAIL:]
    metrics = parse_columns(tail if len(tail) == len(content) else tail.partition(b'\n')[2])
    try:
        config = (path / (federation.config if federation is not None else 'config.yaml')).read_bytes()
    except FileNotFoundError:
        config = b''
    steps = int(match[1]) if (match := re.search(rb'^steps: *(\d{1,15})\b', config, re.MULTILINE)) else None
    if federation is not None:
        state = RunState(*federation.state)
    else:
        state = state_of(path, attempts_of(read_attempts(path)), metrics, steps)
    best, best_step = _best_validation(content) or (None, None)
    times = metrics.known_times
    return RunSummary(
        name,
        str(path),
        state.name,
        state.why,
        step=int(metrics.steps.max(initial=0)),
        steps=steps,
        loss=metrics.last('loss'),
        best_val_loss=best,
        best_step=best_step,
        tokens_per_second=metrics.last('tokens_per_second'),
        written=float(times[-1]) if len(times) else changed,
        verdict=_verdict(content, metrics),
        islands=None if federation is None else len(federation.islands),
        is_partial=is_partial,
    )


def _verdict(content: bytes, newest: Columns) -> str:
    """The verdict on the first and the newest losses."""
    parts = [newest] if len(content) <= _TAIL else [parse_columns(content[:_HEAD].rpartition(b'\n')[0]), newest]
    by_key = [[Losses.from_columns(part, key) for part in parts] for key in KEYS]
    return verdict(*(Losses(*(np.concatenate(arrays) for arrays in zip(*one, strict=True))) for one in by_key))


def _best_validation(content: bytes) -> tuple[float, int] | None:
    """The lowest validation loss and its step. Only the lines with one are parsed."""
    lines = []
    place = content.find(_VALIDATION)
    while place >= 0:
        end = content.find(b'\n', place)
        end = len(content) if end < 0 else end
        lines.append(content[content.rfind(b'\n', 0, place) + 1 : end])
        place = content.find(_VALIDATION, end)
    column = parse_columns(b'\n'.join([*lines, b''])).get('val_loss')
    pairs = () if column is None else zip(column.values.tolist(), column.steps.tolist(), strict=True)
    return min((pair for pair in pairs if math.isfinite(pair[0])), default=None)


def _end_of(path: AnyPath) -> tuple[bytes, bool, float | None]:
    """The last bytes of a file of metrics, whether there are more before them, and when the file changed."""
    if isinstance(path, BucketPath):
        parts = parts_of(path)
        if not parts:
            return (path.read_bytes() if path.is_file() else b''), False, None
        last = parts[-(_SEARCHED // PART) :]
        return b''.join(part.read_bytes() for part in last), len(last) < len(parts), None
    try:
        with path.open('rb') as file:
            status = os.fstat(file.fileno())
            file.seek(max(0, status.st_size - _SEARCHED))
            return file.read(_SEARCHED), status.st_size > _SEARCHED, status.st_mtime
    except FileNotFoundError:
        return b'', False, None


def find_runs(directory: AnyPath) -> dict[str, AnyPath]:
    """{name: run directory} of the runs in a directory, without those inside of runs; or of the directory itself.

    Raises OSError.
    """
    if isinstance(directory, BucketPath):
        return _runs_in_bucket(directory)
    runs: dict[str, AnyPath] = {}

    def search(place: str, depth: int) -> None:
        with os.scandir(place) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        names = {entry.name for entry in found}
        if _FILES & names or (TABLE in names and is_federation(Path(place))):
            relative = os.path.relpath(place, directory)
            runs[relative if relative != '.' else directory.absolute().name] = Path(place)
        elif depth < _DEPTH:
            for entry in found:
                if entry.is_dir() and not entry.name.startswith('.'):
                    with contextlib.suppress(FileNotFoundError, PermissionError):  # it is gone, or not ours
                        search(entry.path, depth + 1)

    search(str(directory), 0)
    return runs


def _runs_in_bucket(directory: BucketPath) -> dict[str, AnyPath]:
    """The runs under a prefix, from one listing."""
    places: set[str] = set()
    federations: set[str] = set()
    for key in directory.files():
        parts = key.split('/')
        places |= {'/'.join(parts[:depth]) for depth in range(min(_DEPTH + 1, len(parts))) if parts[depth] in _FILES}
        federations |= {'/'.join(parts[:-1])} if parts[-1] == TABLE and len(parts) <= _DEPTH + 1 else set()
    places |= {place for place in federations - places if is_federation(directory / place)}
    outermost = [place for place in sorted(places) if not any(place.startswith(f'{other}/') for other in places)]
    if '' in outermost:
        return {directory.name: directory}
    return {place: directory / place for place in outermost}


def runs_text(runs: Sequence[RunSummary]) -> list[str]:
    """The lines of the list for a terminal."""
    drop = ('at step', 'done', 'last line', 'best val loss', 'step')
    return text_table(rows_of(runs), left=(0, 1), drop=drop, more='--json')


def rows_of(runs: Sequence[RunSummary], now: float | None = None) -> list[list[str]]:
    """Headings and a row for each run, for people."""
    rows = [['run', 'state', 'step', 'done', 'loss', 'best val loss', 'at step', 'tokens/s', 'last line']]
    for run in runs:
        rows.append(
            [
                run.name,
                ', '.join(filter(None, [run.state, run.why if run.islands else '', run.verdict.partition(':')[0]])),
                f'{run.step:,}' + (f'/{run.steps:,}' if run.steps else ''),
                '' if run.progress is None else f'{run.progress:.0%}',
                _number(run.loss, '.4f'),
                _number(run.best_val_loss, '.4f') + ('*' if run.is_partial else ''),
                '' if run.best_step is None else f'{run.best_step:,}',
                _number(run.tokens_per_second, ',.0f'),
                '' if run.written is None else age((time.time() if now is None else now) - run.written),
            ]
        )
    return rows


def _number(value: float | None, form: str) -> str:
    return '' if value is None else f'{value:{form}}'
