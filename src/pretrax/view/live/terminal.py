"""Runs that are watched in a terminal: a table and text curves. In a pipe, a line for each report."""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

import numpy as np
import rich.console
import rich.live
import rich.table
import rich.text

from pretrax.amounts import clock_text, prefixed
from pretrax.errors import printable, unfiltered_output
from pretrax.observe.progress import format_line
from pretrax.storage import BucketPath
from pretrax.system.children import handling
from pretrax.view.charts.chart import Chart, Line, Panel
from pretrax.view.charts.text import chart_text
from pretrax.view.live.curves import Curve
from pretrax.view.live.run import WatchedRun
from pretrax.view.live.runs import Places
from pretrax.view.record.causes import FAMILY, shares_text
from pretrax.view.tables import fitted_table

EVERY, EVERY_IN_BUCKET = 1.0, 5.0  # seconds
_ENDED = ('finished', 'stopped', 'failed')
_COLORS = {'running': 'green', 'finished': 'blue', 'failed': 'red', 'lost': 'red', 'removed': 'red', 'stalled': 'red'}
_MOST_WARNINGS = 4
_MOST_SPENT = 3  # runs whose time is shown by cause
_CURVES = {'loss': 'training loss', 'val_loss': 'validation loss', 'tokens_per_second': 'tokens per second'}
_CHART = 8  # least rows of a chart, and those around it


def watch_in_terminal(places: Places, stream: TextIO | None = None) -> None:
    """Shows runs until all have ended, or until Ctrl-C. Where runs may appear, until Ctrl-C."""
    console = rich.console.Console(file=stream or unfiltered_output(), highlight=False, soft_wrap=False)
    stop = threading.Event()
    with handling((signal.SIGINT, signal.SIGTERM), lambda number: stop.set()):
        if console.is_terminal and not console.is_dumb_terminal:
            _show(places, console, stop)
        else:
            _print(places, lambda text: console.print(printable(text), markup=False, soft_wrap=True), stop)


def _polled(places: Places, stop: threading.Event) -> Iterator[list[WatchedRun]]:
    """The runs, after each look at their files."""
    runs: list[WatchedRun] = []
    with ThreadPoolExecutor(16, 'watch') as pool:
        while not stop.is_set():
            with contextlib.suppress(OSError):  # the directory may be there again next time
                found, dropped = places.look()
                runs = [run for run in runs if run not in dropped] + found
            list(pool.map(WatchedRun.poll, runs))
            yield runs
            if any(run.more for run in runs):
                continue
            if runs and not places.has_directories and all(run.state in _ENDED for run in runs):
                return
            stop.wait(EVERY_IN_BUCKET if any(isinstance(run.path, BucketPath) for run in runs) else EVERY)


class _Lines:
    """Prints what is new in runs."""

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self._known: dict[str, dict[str, Any]] = {}

    def show(self, run: WatchedRun) -> None:
        """Prints a change of state, new warnings, and the newest values."""
        info, known = run.info(), self._known.setdefault(run.id, {})
        state = f'{info["state"]}: {info["why"]}' if info['why'] else info['state']
        said: list[tuple[str, Any, str]] = [('state', (info['state'], info['why']), state)]
        said += [(f'warning {text}', True, f'WARNING: {text}') for text in info['warnings']]
        evaluated = run.curves.by_key.get('val_loss')
        if evaluated is not None:
            place = int(evaluated.points.steps[-1])
            values = {'step': place, 'val_loss': evaluated.last}
            said.append(('evaluation', (place, evaluated.count), format_line(values, info['steps'] or 0)))
        trained = run.curves.by_key.get('loss')
        if trained is not None and not info['reading']:
            left = None if info['ends'] is None else max(0.0, info['ends'] - time.time())
            values = {key: run.curves.by_key[key].last for key in _SHOWN if key in run.curves.by_key}
            values['step'] = int(trained.points.steps[-1])
            if info['state'] != 'running' and (spent := shares_text(_seconds(info))):
                said.append(('time', spent, f'time: {spent}'))
            said.append(('step', (values['step'], trained.count), format_line(values, info['steps'] or 0, left)))
        for what, value, text in said:
            if known.get(what) != value:
                known[what] = value
                self._write(f'{run.name}  {text}')


_SHOWN = ('loss', 'bits_per_byte', 'tokens_per_second', 'mfu')


def _print(places: Places, write: Callable[[str], None], stop: threading.Event) -> None:
    lines = _Lines(write)
    for number, runs in enumerate(_polled(places, stop)):
        if number == 0 and not runs:
            write(_nothing(places))
        for run in runs:
            lines.show(run)


def _show(places: Places, console: rich.console.Console, stop: threading.Event) -> None:
    last: rich.console.RenderableType = ''
    with rich.live.Live(console=console, auto_refresh=False, screen=True) as live:
        for runs in _polled(places, stop):
            last = picture(runs, str(places), console.width, console.height)
            live.update(last, refresh=True)
    console.print(last)


def picture(runs: Sequence[WatchedRun], where: str, width: int, height: int) -> rich.console.RenderableType:
    """What a terminal of this size shows: a table of the runs, warnings, and curves in the rows that are left."""
    if not runs:
        return rich.text.Text(printable(_nothing(where)))
    infos = [run.info() for run in runs]
    most = max(1, min(len(runs), height - 8))
    table = _table(infos[:most], width)
    texts = [f'{info["name"]}: {text}' for info in infos for text in info['warnings']]
    notes = [f'{len(runs) - most} more runs'] if len(runs) > most else []
    notes += texts[:_MOST_WARNINGS]
    notes += [f'{len(texts) - _MOST_WARNINGS} more'] if texts[_MOST_WARNINGS:] else []
    parts: list[rich.console.RenderableType] = [table]
    spent = [(info['name'], shares_text(_seconds(info))) for info in infos[:_MOST_SPENT]]
    parts += [
        rich.text.Text(printable(f'{name}: {text}'), no_wrap=True, overflow='ellipsis') for name, text in spent if text
    ]
    parts += [rich.text.Text(printable(note), style='yellow', no_wrap=True, overflow='ellipsis') for note in notes]
    left = height - (most + 2 + len(notes) + sum(bool(text) for _, text in spent)) - 1
    panels = [panel for key, title in _CURVES.items() if (panel := _panel(runs, key, title)) is not None]
    around = 4 + min(len(runs), 7)
    count = min(len(panels), max(left // (_CHART + around), 1 if left > 4 + around else 0))
    for panel in panels[:count]:
        rows = left // count - around
        parts += [rich.text.Text(''), rich.text.Text(chart_text(Chart([panel]), width - 1, rows), no_wrap=True)]
    return rich.console.Group(*parts)


def _nothing(where: object) -> str:
    return f'No runs yet in {where}. They are shown when they appear.'


def _panel(runs: Sequence[WatchedRun], key: str, title: str) -> Panel | None:
    curves = {run.name: run.curves.by_key[key] for run in runs[:7] if key in run.curves.by_key}
    lines = [line for name, curve in curves.items() if (line := _line(name, curve)) is not None]
    return Panel(title, lines) if lines else None


def _line(name: str, curve: Curve) -> Line | None:
    """The finite points of a curve; None: it has none."""
    finite = np.isfinite(curve.points.means)
    if not finite.any():
        return None
    left_out = f'{curve.nonfinite_count} not finite' if curve.nonfinite_count else ''
    x, y = curve.points.steps[finite].tolist(), curve.points.means[finite].tolist()
    return Line(printable(name), x, y, left_out=left_out)


def _table(infos: Sequence[dict[str, Any]], width: int) -> rich.table.Table:
    head = ['run', 'state', 'step', '%', 'ends', 'loss', 'val', 'tok/s', 'MFU', 'last']
    table, _ = fitted_table([head, *map(_row, infos)], (0, 1), ('%', 'last', 'MFU', 'ends', 'step', 'val'), width)
    for column in table.columns:  # a line for each run
        column.no_wrap, column.overflow = True, 'ellipsis'
    return table


def _row(info: dict[str, Any]) -> list[str | rich.text.Text]:
    step, steps, last, now = info['step'], info['steps'], info['last'], time.time()
    state = 'stalled' if info['stalled'] else info['state']
    texts = [
        str(step) if step is not None else '-',
        f'{100 * step / steps:.1f}' if step is not None and steps else '-',
        clock_text(max(0.0, info['ends'] - now)) if info['ends'] is not None else '-',
        _number(last.get('loss'), lambda value: f'{value:.4f}'),
        _number(last.get('val_loss'), lambda value: f'{value:.4f}'),
        _number(last.get('tokens_per_second'), lambda value: prefixed(value, space='')),
        _number(last.get('mfu'), lambda value: f'{100 * value:.1f}'),
        clock_text(max(0.0, now - info['heard'])) if info['heard'] is not None else '-',
    ]
    return [info['name'], rich.text.Text(state, style=_COLORS.get(state, '')), *texts]


def _seconds(info: dict[str, Any]) -> dict[str, float]:
    """Seconds by cause in the newest values."""
    return {key.removeprefix(FAMILY): n for key, n in info['last'].items() if key.startswith(FAMILY)}


def _number(value: float | str | None, show: Callable[[float], str]) -> str:
    """A number of a table. 'nan' and 'inf' are texts."""
    return '-' if value is None else value if isinstance(value, str) else show(value) if math.isfinite(value) else '-'
