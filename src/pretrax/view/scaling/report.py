"""The points of a fit of scaling laws, from runs or a table, and the fit as text, JSON and a picture."""

import csv
import io
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pretrax.cost.scaling_laws import Fit, Point
from pretrax.errors import UserError, system_errors
from pretrax.storage import AnyPath
from pretrax.system.json_file import parse_json
from pretrax.view.charts.chart import COLORS, number_text
from pretrax.view.charts.picture import figure_bytes
from pretrax.view.record.run_record import RunRecord
from pretrax.view.tables import text_table

_LARGEST = 64 * 2**20  # bytes of a table


def point_of(run: RunRecord, metric: str) -> Point:
    """The point of a finished run, with its curve.

    Raises:
        UserError: the run is not finished, or lacks the metric or the number of its parameters.
    """
    params = run.environment.get('parameters')
    column = run.metrics.get(metric)
    tokens = None if column is None else run.axis('tokens', column)
    if column is None or tokens is None or not len(column.values):
        raise UserError(f'{run.path} has no {metric}\nit has: {", ".join(run.metrics)}')
    if not isinstance(params, int | float) or params <= 0:
        raise UserError(f'{run.path}/environment.json does not say how many parameters the model has')
    if run.steps is None or int(column.steps[-1]) < run.steps:
        raise UserError(f'{run.path} is not finished: {metric} ends at step {int(column.steps[-1])} of {run.steps}')
    keep = np.isfinite(column.values) & (tokens > 0)
    if not keep[-1]:
        raise UserError(f'{run.path}: the last {metric} is not finite; leave this run out')
    curve = tuple(zip(tokens[keep].tolist(), column.values[keep].tolist(), strict=True))
    return Point(float(params), curve[-1][0], curve[-1][1], curve)


def read_table(path: AnyPath) -> list[Point]:
    """Points from a .csv file with a heading, or a .jsonl file: `params`, `tokens` and `loss`.

    Rows with the same `run` are the curve of one run, whose row with the most tokens is its end.

    Raises:
        UserError: the file cannot be read, or a row is not a point; the message names the row.
    """
    with system_errors(f'{path} cannot be read', '\nexpected a .csv or .jsonl file with params, tokens, loss'):
        text = path.read_bytes()[:_LARGEST].decode()
    if path.suffix == '.csv':
        rows: list[Mapping[str, Any]] = list(csv.DictReader(io.StringIO(text)))
    elif path.suffix == '.jsonl':
        rows = []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                rows.append(parse_json(line))
            except ValueError:
                raise UserError(f'{path}:{number} is not JSON: {line[:60]!r}') from None
    else:
        raise UserError(f'{path}: expected a name that ends in .csv or .jsonl')
    runs: dict[Any, list[tuple[float, float, float]]] = {}
    for number, row in enumerate(rows, 2 if path.suffix == '.csv' else 1):
        try:
            numbers = float(row['params']), float(row['tokens']), float(row['loss'])
            if not all(math.isfinite(value) and value > 0 for value in numbers):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f'{path}:{number} has no params, tokens and loss above 0: {
                    str(dict(row) if isinstance(row, dict) else row)[:100]
                }'
            ) from None
        runs.setdefault(row.get('run') or number, []).append(numbers)
    points = []
    for name, lines in runs.items():
        if len({params for params, _, _ in lines}) != 1:
            raise UserError(f'{path}: run {name} has more than one number of params')
        curve = tuple(sorted((tokens, loss) for _, tokens, loss in lines))
        points.append(Point(lines[0][0], *curve[-1], curve if len(curve) > 1 else ()))
    return points


def matching(directory: pathlib.Path, patterns: Sequence[str]) -> list[pathlib.Path]:
    """The run directories that these patterns name. Raises UserError for one that names nothing."""
    found: dict[pathlib.Path, None] = {}
    for pattern in patterns:
        base = pathlib.Path('/') if pathlib.Path(pattern).is_absolute() else directory
        here = base / pattern
        named = [here] if here.exists() else sorted(base.glob(pattern.lstrip('/')))  # a name may have brackets
        paths = [path for path in named if (path / 'metrics.jsonl').is_file()]
        if not paths:
            raise UserError(f'runs: {pattern} names no run in {base}; expected directories with a metrics.jsonl')
        found.update(dict.fromkeys(paths))
    return list(found)


_NAMES = {1: '1 envelope', 2: '2 IsoFLOP', 3: '3 L(N, D)'}


def as_text(points: Sequence[Point], fits: Sequence[Fit], targets: Sequence[float]) -> list[str]:
    """The coefficients, then a row for each budget and approach."""
    lines = [
        f'{len(points)} runs, {_size(min(p.params for p in points))} to {_size(max(p.params for p in points))} '
        'parameters'
    ]
    for fit in fits:
        shown = [_coefficient(fit, name) for name in fit.values if name != 'log k']
        lines.append(f'approach {_NAMES[fit.approach]}: {", ".join(shown)}')
    rows = [['FLOPs', 'approach', 'parameters', '95% interval', 'tokens', 'tokens per parameter', 'loss']]
    for flops in targets:
        for fit in fits:
            params = fit.optimum(flops)
            tokens = flops / 6 / params
            interval, loss = fit.interval(flops), fit.loss(params, tokens)
            between = '' if interval is None else f'{_size(interval[0])} to {_size(interval[1])}'
            last = '' if loss is None else f'{loss:.4f}'
            approach, ratio = _NAMES[fit.approach], f'{tokens / params:.3g}'
            rows.append([f'{flops:.3g}', approach, _size(params), between, _size(tokens), ratio, last])
    return [
        *lines,
        *(['', *text_table(rows, left=(1,), drop=('tokens per parameter', '95% interval'))] if targets else []),
    ]


def as_json(points: Sequence[Point], fits: Sequence[Fit], targets: Sequence[float]) -> str:
    """Points, coefficients and intervals, and the best sizes."""
    found = {
        'points': [{'params': point.params, 'tokens': point.tokens, 'loss': point.loss} for point in points],
        'fits': [{'approach': fit.approach, 'values': fit.values, 'intervals': fit.intervals} for fit in fits],
        'optimal': [
            {
                'flops': flops,
                'approach': fit.approach,
                'params': fit.optimum(flops),
                'tokens': flops / 6 / fit.optimum(flops),
                'interval_of_params': fit.interval(flops),
            }
            for flops in targets
            for fit in fits
        ],
    }
    return json.dumps(found, indent=1) + '\n'


def picture(points: Sequence[Point], fits: Sequence[Fit], targets: Sequence[float], suffix: str) -> bytes:
    """The losses of the runs by FLOPs with one color per size, and the best size by FLOPs with its interval."""

    def draw(figure: Any) -> None:
        from matplotlib import colormaps

        left, right = figure.subplots(1, 2)
        sizes = sorted({point.params for point in points})
        for point in sorted(points, key=lambda point: point.params):
            color = colormaps['viridis'](sizes.index(point.params) / max(len(sizes) - 1, 1))
            curve = point.curve or ((point.tokens, point.loss),)
            left.plot(
                [6 * point.params * tokens for tokens, _ in curve],
                [loss for _, loss in curve],
                color=color,
                linewidth=0.8,
            )
            left.plot([point.flops], [point.loss], 'o', color=color, markersize=4)
        left.set_xscale('log')
        left.set(xlabel='FLOPs', ylabel='loss, nats per token', title=f'{len(points)} runs, dark: few parameters')
        budgets = [point.flops for point in points] + list(targets)
        flops = np.geomspace(min(budgets), max(budgets), 60)
        for fit in fits:
            color = COLORS[fit.approach - 1]
            right.plot(
                flops,
                [fit.optimum(c) for c in flops],
                color=color,
                label=f'{_NAMES[fit.approach]}: a = {fit.values["a"]:.3f}',
            )
            if fit.samples:
                low, high = np.array([fit.interval(c) for c in flops]).T
                right.fill_between(flops, low, high, color=color, alpha=0.15, linewidth=0)
            if fit.optima:
                right.plot(*np.array(fit.optima).T, '.', color=color, markersize=4)
        right.set_xscale('log')
        right.set_yscale('log')
        right.set(xlabel='FLOPs', ylabel='parameters', title='best size')
        right.legend(frameon=False)

    return figure_bytes(draw, suffix, height=4.2)


def _coefficient(fit: Fit, name: str) -> str:
    value = f'{name} = {fit.values[name]:.4g}'
    if name not in fit.intervals:
        return value
    low, high = fit.intervals[name]
    return f'{value} ({low:.4g} to {high:.4g})'


def _size(value: float) -> str:
    return number_text(value, digits=3) if math.isfinite(value) and value >= 1e6 else f'{value:,.0f}'
