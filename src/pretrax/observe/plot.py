"""Plots curves of runs from their `metrics.jsonl`, without a plotting library, as SVG, HTML or text."""

import dataclasses
import difflib
import html
import math
import pathlib
from collections.abc import Iterable, Sequence

from pretrax.errors import UserError
from pretrax.observe.metrics import keys, read_metrics

# Okabe and Ito 2008: distinguishable for color-blind readers.
COLORS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#000000')
MARKS = 'o+x*#%@'


@dataclasses.dataclass(frozen=True)
class Series:
    """One curve: the points of one key of one run. Nonfinite values are left out and counted."""

    name: str
    steps: list[float]
    values: list[float]
    nonfinite: int = 0


def load_series(runs: Sequence[str], key: str) -> list[Series]:
    """The curves of a key; each run is a run directory or a metrics file. Raises UserError with what exists."""
    if not runs:
        raise UserError('no run was given, expected at least one run directory, such as runs/quickstart')
    paths = [pathlib.Path(run) for run in runs]
    names = [path.parent.name if path.suffix == '.jsonl' else path.resolve().name for path in paths]
    return [
        _load(path, key, name if names.count(name) == 1 else str(path)) for path, name in zip(paths, names, strict=True)
    ]


def _load(path: pathlib.Path, key: str, name: str) -> Series:
    file = path / 'metrics.jsonl' if path.is_dir() else path
    if not file.exists():
        raise UserError(_no_such_run(path))
    records = read_metrics(file)
    if not records:
        raise UserError(f'{file} has no metrics yet: the run has not reported its first step')
    found = keys(records)
    if key not in found:
        near = difflib.get_close_matches(key, found, n=1)
        hint = f', did you mean {near[0]!r}?' if near else ''
        raise UserError(f'{file} has no {key!r}{hint}\nit has: {", ".join(found)}')
    points = [(record['step'], record[key]) for record in records if record.get(key) is not None]
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if not finite:
        raise UserError(f'{file}: none of the {len(points)} values of {key!r} is finite')
    steps, values = zip(*finite, strict=True)
    return Series(name, list(steps), list(values), len(points) - len(finite))


def _no_such_run(path: pathlib.Path) -> str:
    if path.is_dir():
        return f'{path} is not a run: it has no metrics.jsonl'
    places = [place for place in (path.parent, pathlib.Path('runs')) if place.is_dir()]
    runs = sorted({str(file.parent) for place in places for file in place.glob('*/metrics.jsonl')})
    by_name = {pathlib.Path(run).name: run for run in runs}
    near = difflib.get_close_matches(path.name, by_name, n=1, cutoff=0.5)
    if near:
        return f'no run at {path}, did you mean {by_name[near[0]]}?'
    return f'no run at {path}' + (f'\nruns: {", ".join(runs[:8])}' if runs else '; a run is a directory like runs/NAME')


def svg(series: Sequence[Series], key: str, width: int = 860, height: int = 480, x_label: str = 'step') -> str:
    """A line chart as an SVG document."""
    left, right, top, bottom = 70, 20, 44, 48
    x_ticks, y_ticks = ticks(*_range(s.steps for s in series), count=8), ticks(*_range(s.values for s in series))
    (x0, x1), (y0, y1) = (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1])

    def x(step: float) -> float:
        return left + (step - x0) / (x1 - x0) * (width - left - right)

    def y(value: float) -> float:
        return height - bottom - (value - y0) / (y1 - y0) * (height - top - bottom)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tick in y_ticks:
        parts.append(f'<path d="M{left} {y(tick):.1f}H{width - right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    for tick in x_ticks:
        parts.append(f'<path d="M{x(tick):.1f} {top}V{height - bottom}" stroke="#eee"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{height - bottom + 18}" text-anchor="middle">{tick:.7g}</text>')
    parts.append(
        f'<text x="{(left + width - right) / 2}" y="{height - 10}" text-anchor="middle">{html.escape(x_label)}</text>'
    )
    parts.append(f'<text x="{left}" y="20" font-weight="bold">{html.escape(key)}</text>')
    for row, (curve, color) in enumerate(zip(series, _cycle(COLORS, len(series)), strict=True)):
        points = [(x(step), y(value)) for step, value in zip(curve.steps, curve.values, strict=True)]
        line = ' '.join(f'{px:.1f},{py:.1f}' for px, py in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        if len(points) <= 60:  # few points, such as evaluations: mark each
            parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{color}"/>' for px, py in points]
        base = top + 20 + 18 * row
        parts.append(f'<path d="M{width - right - 30} {base - 4}h20" stroke="{color}" stroke-width="3"/>')
        parts.append(f'<text x="{width - right - 38}" y="{base}" text-anchor="end">{html.escape(_label(curve))}</text>')
    return '\n'.join([*parts, '</svg>', ''])


def text(series: Sequence[Series], key: str, width: int = 80, height: int = 18) -> str:
    """The same chart in characters, for a terminal."""
    y_ticks = ticks(*_range(s.values for s in series))
    (x0, x1), (y0, y1) = _range(s.steps for s in series), (y_ticks[0], y_ticks[-1])
    labels = {round((1 - (tick - y0) / (y1 - y0)) * (height - 1)): f'{tick:.6g}' for tick in y_ticks}
    margin = max(map(len, labels.values()))
    columns = max(width - margin - 3, 20)
    grid = [[' '] * columns for _ in range(height)]
    for curve, mark in zip(series, _cycle(MARKS, len(series)), strict=True):
        for step, value in zip(curve.steps, curve.values, strict=True):
            column = round((step - x0) / ((x1 - x0) or 1) * (columns - 1))
            grid[round((1 - (value - y0) / (y1 - y0)) * (height - 1))][column] = mark
    rows = [f'{labels.get(i, ""):>{margin}} |{"".join(row).rstrip()}' for i, row in enumerate(grid)]
    foot = f'{"":>{margin}} +{"-" * columns}'
    ends = f'{"":>{margin}}  {x0:<{columns // 2}.7g}{f"step {x1:.7g}":>{columns - columns // 2}}'
    legend = [
        f'{"":>{margin}}  {mark} {_label(curve)}: {curve.values[0]:.5g} to {curve.values[-1]:.5g}, '
        f'lowest {min(curve.values):.5g} at step {curve.steps[curve.values.index(min(curve.values))]}'
        for curve, mark in zip(series, _cycle(MARKS, len(series)), strict=True)
    ]
    return '\n'.join([key, *rows, foot, ends, *legend])


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round numbers at equal distances that enclose [low, high]."""
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    distance = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / distance + 1e-9), math.ceil(high / distance - 1e-9)
    return [i * distance for i in range(first, last + 1)]


def _range(columns: Iterable[Iterable[float]]) -> tuple[float, float]:
    values = [value for column in columns for value in column]
    return min(values), max(values)


def _cycle(choices: Sequence[str], count: int) -> list[str]:
    return [choices[i % len(choices)] for i in range(count)]


def _label(curve: Series) -> str:
    return curve.name + (f' ({curve.nonfinite} not finite)' if curve.nonfinite else '')
