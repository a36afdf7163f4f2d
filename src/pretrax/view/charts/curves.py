"""The curves of runs, read from their `metrics.jsonl`, as a chart or as a table."""

import dataclasses
import difflib
import math
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from pretrax.errors import UserError, printable, system_errors
from pretrax.observe.metrics import keys, read_metrics
from pretrax.storage import AnyPath, BucketPath, locate
from pretrax.view.charts.chart import Chart, Line, Panel
from pretrax.view.definitions import definition_of
from pretrax.view.record.run_record import no_such_run
from pretrax.view.tables import csv_table

type XAxis = Literal['step', 'tokens', 'time']
type Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    """The lines of metrics of a run. `name`: the last part of its path, or all of it if others end in the same."""

    name: str
    file: AnyPath
    records: Sequence[Record]


@dataclasses.dataclass(frozen=True)
class Curve:
    """The finite values of one key of one run."""

    run: str
    key: str
    steps: list[float]
    x: list[float]  # the same as `steps`, or tokens, or seconds since the run's first line
    values: list[float]
    nonfinite: int = 0


def load_runs(runs: Sequence[str]) -> list[RunMetrics]:
    """The metrics of runs; each is a run directory or a metrics file. Raises UserError with what exists."""
    if not runs:
        raise UserError('no run was given, expected at least one run directory, such as runs/quickstart')
    paths = [locate(run) for run in runs]
    names = [_name(path) for path in paths]
    return [_load(path, name if names.count(name) == 1 else str(path)) for path, name in zip(paths, names, strict=True)]


def default_keys(runs: Sequence[RunMetrics]) -> list[str]:
    """The training loss, and the validation loss if all runs have it."""
    return ['loss', *(['val_loss'] if all('val_loss' in keys(run.records) for run in runs) else [])]


def curve(run: RunMetrics, key: str, x: XAxis = 'step') -> Curve:
    """The curve of a key. Raises UserError with the keys that the run has."""
    found = keys(run.records)
    if key not in found:
        near = difflib.get_close_matches(key, found, n=1)
        hint = f', did you mean {near[0]!r}?' if near else ''
        raise UserError(f'{run.file} has no {key!r}{hint}\nit has: {", ".join(found)}')
    points = [
        (record['step'], place, float(record[key]))
        for place, record in zip(_places(run, x), run.records, strict=True)
        if isinstance(record.get(key), int | float)
    ]
    finite = [point for point in points if math.isfinite(point[2])]
    if not finite:
        raise UserError(f'{run.file}: none of the {len(points)} values of {key!r} is finite')
    steps, places, values = map(list, zip(*finite, strict=True))
    return Curve(run.name, key, steps, places, values, len(points) - len(finite))


def smoothed(steps: Sequence[float], values: Sequence[float], half_life: float) -> list[float]:
    """Exponential moving average: a value counts half as much as one that is `half_life` steps later.

    The weights of all values up to a step add up to one, so the first values are not pulled towards zero.
    """
    total = weight = 0.0
    averages = []
    for i, (step, value) in enumerate(zip(steps, values, strict=True)):
        decay = 0.5 ** (max(step - steps[i - 1], 0) / half_life) if i else 0.0
        total, weight = total * decay + value, weight * decay + 1
        averages.append(total / weight)
    return averages


def chart(
    curves: Sequence[Curve], x: XAxis = 'step', half_life: float = 0, log_x: bool = False, log_y: bool = False
) -> Chart:
    """The curves as a chart: a panel for each unit, a color for each run, a line style for each key.

    Args:
        half_life: steps of `smoothed`; 0: not smoothed.
        log_x, log_y: logarithmic axes, without the points that have no place there.

    Raises:
        UserError: a curve has no point on a logarithmic axis.
    """
    runs = list(dict.fromkeys(curve.run for curve in curves))
    panels: dict[str, list[Curve]] = {}
    for one in curves:
        panels.setdefault(_axis_of(one.key), []).append(one)
    scale, x_label = 1.0, x
    if x == 'time':
        scale, x_label = (1 / 3600, 'hours') if max(one.x[-1] for one in curves) > 7200 else (1 / 60, 'minutes')
    shown = [_panel(alike, runs, lambda one: _line(one, scale, half_life, log_x, log_y)) for alike in panels.values()]
    return Chart(shown, x_label, log_x, log_y)


def _panel(curves: Sequence[Curve], runs: Sequence[str], line: Callable[[Curve], Line]) -> Panel:
    found = list(dict.fromkeys(curve.key for curve in curves))
    lines = []
    for one in curves:
        name = one.run if len(found) == 1 else one.key if len(runs) == 1 else f'{one.run} {one.key}'
        color = runs.index(one.run) if len(runs) > 1 else found.index(one.key)
        lines.append(dataclasses.replace(line(one), name=name, color=color, style=found.index(one.key)))
    known = definition_of(found[0])
    unit = f' ({known.unit})' if known.unit and not known.is_fraction else ''
    return Panel(', '.join(found) + unit, lines, known.is_fraction)


def _axis_of(key: str) -> str:
    """Losses share an axis; any other key has its own."""
    unit = definition_of(key).unit
    return unit if unit in ('nats per token', 'bits') else key


def _line(curve: Curve, scale: float, half_life: float, log_x: bool, log_y: bool) -> Line:
    averages = smoothed(curve.steps, curve.values, half_life) if half_life else curve.values
    points = [
        (x * scale, value, average)
        for x, value, average in zip(curve.x, curve.values, averages, strict=True)
        if (x > 0 or not log_x) and ((value > 0 and average > 0) or not log_y)
    ]
    if not points:
        raise UserError(f'{curve.run}: no point of {curve.key!r} is above zero, as a logarithmic axis needs')
    hidden = len(curve.x) - len(points)
    left_out = [f'{count} not {what}' for count, what in ((curve.nonfinite, 'finite'), (hidden, 'above 0')) if count]
    xs, values, averages = map(list, zip(*points, strict=True))
    return Line(curve.run, xs, values, averages if half_life else None, left_out=', '.join(left_out))


def table(curves: Sequence[Curve], x: XAxis, half_life: float = 0) -> str:
    """The curves as CSV: a row for each run and step, a column for each key."""
    found = list(dict.fromkeys(curve.key for curve in curves))
    order = {name: i for i, name in enumerate(dict.fromkeys(curve.run for curve in curves))}
    rows: dict[tuple[str, float], dict[str, Any]] = {}
    for one in curves:
        averages = smoothed(one.steps, one.values, half_life) if half_life else one.values
        for step, place, value, average in zip(one.steps, one.x, one.values, averages, strict=True):
            row = rows.setdefault((one.run, step), {'run': one.run, 'step': step})
            row |= {one.key: value}
            row |= {'seconds' if x == 'time' else x: place} if x != 'step' else {}
            row |= {f'{one.key} smoothed': average} if half_life else {}
    fields = ['run', 'step', *([{'time': 'seconds'}.get(x, x)] if x != 'step' else [])]
    fields += [name for key in found for name in (key, *([f'{key} smoothed'] if half_life else []))]
    ordered = sorted(rows.items(), key=lambda item: (order[item[0][0]], item[0][1]))
    return csv_table([fields, *([row.get(field, '') for field in fields] for _, row in ordered)])


def _places(run: RunMetrics, x: XAxis) -> list[float]:
    """The x of every line; of a line without tokens or a time, interpolated by step."""
    if x == 'step':
        return [record['step'] for record in run.records]
    known = [(record['step'], record[x]) for record in run.records if isinstance(record.get(x), int | float)]
    if not known:
        raise UserError(f'{run.file} has no {x!r}: use --x step')
    steps, places = zip(*known, strict=True)
    start = places[0] if x == 'time' else 0
    nearest = np.interp([record['step'] for record in run.records], steps, places)
    own = [record.get(x) for record in run.records]
    pairs = zip(own, nearest, strict=True)
    return [float(place if isinstance(place, int | float) else near) - start for place, near in pairs]


def _name(path: AnyPath) -> str:
    if path.suffix == '.jsonl':
        return path.parent.name
    return path.name if isinstance(path, BucketPath) else pathlib.Path(os.path.abspath(path)).name


def _load(path: AnyPath, name: str) -> RunMetrics:
    is_run = path.suffix != '.jsonl' if isinstance(path, BucketPath) else path.is_dir()
    file = path / 'metrics.jsonl' if is_run else path
    warnings: list[str] = []
    with system_errors(f'{file} cannot be read'):
        if not file.exists():
            raise UserError(no_such_run(path))
        if isinstance(file, pathlib.Path) and (file.is_char_device() or file.is_block_device()):
            raise UserError(f'{file} is a device; expected a run directory or a metrics file')
        records = read_metrics(file, warnings.append)
    more = [f'WARNING: {file}, and {len(warnings) - 3} more lines'] if len(warnings) > 3 else []
    for warning in [*warnings[:3], *more]:
        print(printable(warning), file=sys.stderr)
    if not records:
        raise UserError(f'{file} has no metrics yet: the run has not reported its first step')
    return RunMetrics(name, file, records)
