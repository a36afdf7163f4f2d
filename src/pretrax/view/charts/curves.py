"""The curves of runs, read from their `metrics.jsonl`, as a chart or as a table."""

import dataclasses
import difflib
import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from pretrax.errors import UserError, printable, system_errors
from pretrax.federation.registry import is_federation
from pretrax.storage import AnyPath, BucketPath, locate
from pretrax.view.charts.chart import Chart, Line, Panel
from pretrax.view.definitions import definition_of
from pretrax.view.record.columns import Columns, extremes, read_metrics_columns
from pretrax.view.record.run_record import no_such_run
from pretrax.view.tables import csv_table

type XAxis = Literal['step', 'tokens', 'time']
DRAWN = ('loss', 'val_loss')  # the second if all runs have it


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    """The lines of metrics of a run. `name`: the last part of its path, or all of it if others end in the same."""

    name: str
    file: AnyPath
    metrics: Columns


@dataclasses.dataclass(frozen=True)
class Curve:
    """The finite values of one key of one run."""

    run: str
    key: str
    steps: np.ndarray  # int64
    x: np.ndarray  # the same as `steps`, or tokens, or seconds since the run's first line; float64
    values: np.ndarray  # float64
    nonfinite: int = 0


def load_runs(runs: Sequence[str], keys: Collection[str] | None = None) -> list[RunMetrics]:
    """The metrics of runs, of these keys or of all; each is a run directory or a metrics file.

    Raises UserError with what exists.
    """
    if not runs:
        raise UserError('no run was given, expected at least one run directory, such as runs/quickstart')
    paths = [locate(run) for run in runs]
    names = [_name(path) for path in paths]
    shown = [name if names.count(name) == 1 else str(path) for path, name in zip(paths, names, strict=True)]
    return [_load(path, name, keys) for path, name in zip(paths, shown, strict=True)]


def default_keys(runs: Sequence[RunMetrics]) -> list[str]:
    """The training loss, and the validation loss if all runs have it."""
    training, validation = DRAWN
    return [training, *([validation] if all(validation in run.metrics for run in runs) else [])]


def curve(run: RunMetrics, key: str, x: XAxis = 'step') -> Curve:
    """The curve of a key. Raises UserError with the keys that the run has."""
    if key not in run.metrics:
        found = list(read_metrics_columns(run.file, lambda text: None))
        near = difflib.get_close_matches(key, found, n=1)
        hint = f', did you mean {near[0]!r}?' if near else ''
        raise UserError(f'{run.file} has no {key!r}{hint}\nit has: {", ".join(found)}')
    column = run.metrics[key]
    is_finite = np.isfinite(column.values)
    if not is_finite.any():
        raise UserError(f'{run.file}: none of the {len(is_finite)} values of {key!r} is finite')
    places = _places(run, x)[column.lines]
    found = (column.steps, places, column.values)
    return Curve(run.name, key, *(array[is_finite] for array in found), nonfinite=int((~is_finite).sum()))


def smoothed(steps: np.ndarray, values: np.ndarray, half_life: float) -> np.ndarray:
    """Exponential moving average: a value counts half as much as one that is `half_life` steps later.

    The weights of all values up to a step add up to one, so the first values are not pulled towards zero.
    """
    total = weight = 0.0
    averages = np.empty(len(values))
    decays = np.append(0.0, 0.5 ** (np.maximum(np.diff(steps), 0) / half_life))
    for i, (decay, value) in enumerate(zip(memoryview(decays), memoryview(values), strict=True)):
        total, weight = total * decay + value, weight * decay + 1
        averages[i] = total / weight
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
    has_place = np.full(len(curve.x), True)
    if log_x:
        has_place &= curve.x > 0
    if log_y:
        has_place &= (curve.values > 0) & (averages > 0)
    if not has_place.any():
        raise UserError(f'{curve.run}: no point of {curve.key!r} is above zero, as a logarithmic axis needs')
    hidden = int((~has_place).sum())
    left_out = [f'{count} not {what}' for count, what in ((curve.nonfinite, 'finite'), (hidden, 'above 0')) if count]
    points = [array[has_place] for array in (curve.x * scale, curve.values, averages)]
    kept = extremes(points[1], np.arange(len(points[1])))
    xs, values, averages = ((array if kept is None else array[kept]).tolist() for array in points)
    return Line(curve.run, xs, values, averages if half_life else None, left_out=', '.join(left_out))


def table(curves: Sequence[Curve], x: XAxis, half_life: float = 0) -> str:
    """The curves as CSV: a row for each run and step, a column for each key."""
    places = '' if x == 'step' else 'seconds' if x == 'time' else x
    found = [name for key in dict.fromkeys(one.key for one in curves) for name in (key, f'{key} smoothed')]
    fields = [*([places] if places else []), *(found if half_life else found[::2])]
    rows = (
        row
        for run in dict.fromkeys(one.run for one in curves)
        for row in _rows([one for one in curves if one.run == run], fields, places, half_life)
    )
    return csv_table(itertools.chain([['run', 'step', *fields]], rows))


def _rows(curves: Sequence[Curve], fields: Sequence[str], places: str, half_life: float) -> Iterator[tuple[Any, ...]]:
    """The rows of one run: one for each step, with these fields. `places`: the field of the x axis; '': it is step."""
    steps = np.unique(np.concatenate([one.steps for one in curves]))
    columns = {name: np.full(len(steps), np.nan) for name in fields}
    for one in curves:
        here = np.searchsorted(steps, one.steps)
        columns[one.key][here] = one.values
        if places:
            columns[places][here] = one.x
        if half_life:
            columns[f'{one.key} smoothed'][here] = smoothed(one.steps, one.values, half_life)
    for step, *numbers in zip(*map(memoryview, (steps, *columns.values())), strict=True):
        yield curves[0].run, step, *('' if number != number else number for number in numbers)


def _places(run: RunMetrics, x: XAxis) -> np.ndarray:
    """The x of every line, float64; of a line without tokens or a time, interpolated by step."""
    metrics = run.metrics
    if x == 'step':
        return metrics.steps.astype(np.float64)
    places = np.full(len(metrics.steps), np.nan)
    if x == 'time':
        places = metrics.times
    elif x in metrics:
        places[metrics[x].lines] = metrics[x].values
    is_known = ~np.isnan(places)
    if not is_known.any():
        raise UserError(f'{run.file} has no {x!r}: use --x step')
    known = places[is_known]
    nearest = np.interp(metrics.steps, metrics.steps[is_known], known)
    return np.where(is_known, places, nearest) - (known[0] if x == 'time' else 0)


def _name(path: AnyPath) -> str:
    if path.suffix == '.jsonl':
        return path.parent.name
    return path.name if isinstance(path, BucketPath) else pathlib.Path(os.path.abspath(path)).name


def _load(path: AnyPath, name: str, keys: Collection[str] | None) -> RunMetrics:
    is_run = path.suffix != '.jsonl' if isinstance(path, BucketPath) else path.is_dir()
    file = path / 'metrics.jsonl' if is_run else path
    warnings: list[str] = []
    with system_errors(f'{file} cannot be read'):
        if not (file.exists() or is_federation(file.parent)):
            raise UserError(no_such_run(path))
        if isinstance(file, pathlib.Path) and (file.is_char_device() or file.is_block_device()):
            raise UserError(f'{file} is a device; expected a run directory or a metrics file')
        metrics = read_metrics_columns(file, warnings.append, keys)
    more = [f'WARNING: {file}, and {len(warnings) - 3} more lines'] if len(warnings) > 3 else []
    for warning in [*warnings[:3], *more]:
        print(printable(warning), file=sys.stderr)
    if not len(metrics.steps):
        raise UserError(f'{file} has no metrics yet: the run has not reported its first step')
    return RunMetrics(name, file, metrics)
