"""A chart in characters, for a terminal."""

import math
from collections.abc import Callable, Iterable, Sequence

from pretrax.view.charts.chart import Chart, Panel, log_ticks, number_text, ticks

MARKS = 'o+x*#%@'


def chart_text(chart: Chart, width: int = 80, height: int = 18) -> str:
    """The panels, one below another, each with its legend."""
    return '\n\n'.join(_panel(panel, chart, width, height) for panel in chart.panels)


def _panel(panel: Panel, chart: Chart, width: int, height: int) -> str:
    shown = [(line, line.y if line.smoothed is None else line.smoothed) for line in panel.lines]
    low, high = _range(values for _, values in shown)
    y_ticks = (log_ticks if chart.log_y else ticks)(low, high)
    row = _place(y_ticks[-1], y_ticks[0], height, chart.log_y)
    x0, x1 = _range(line.x for line in panel.lines)
    labels = {row(tick): number_text(tick, panel.is_fraction) for tick in y_ticks}
    margin = max(map(len, labels.values()))
    columns = max(width - margin - 3, 20)
    column = _place(x0, x1, columns, chart.log_x)
    grid = [[' '] * columns for _ in range(height)]
    marks = [MARKS[i % len(MARKS)] for i in range(len(shown))]
    for (line, values), mark in zip(shown, marks, strict=True):
        for x, value in zip(line.x, values, strict=True):
            grid[row(value)][column(x)] = mark
    rows = [f'{labels.get(i, ""):>{margin}} |{"".join(cells).rstrip()}' for i, cells in enumerate(grid)]
    foot = f'{"":>{margin}} +{"-" * columns}'
    last = f'{chart.x_label} {number_text(x1, digits=7)}'
    ends = f'{"":>{margin}}  {number_text(x0):<{columns // 2}}{last:>{columns - columns // 2}}'
    legend = []
    for (line, values), mark in zip(shown, marks, strict=True):
        lowest = min(range(len(values)), key=values.__getitem__)
        first, final, least = (number_text(values[i], panel.is_fraction, 5) for i in (0, -1, lowest))
        legend.append(
            f'{"":>{margin}}  {mark} {line.label}: {first} to {final}, '
            f'lowest {least} at {chart.x_label} {number_text(line.x[lowest], digits=7)}'
        )
    return '\n'.join([panel.title, *rows, foot, ends, *legend])


def _place(start: float, end: float, count: int, is_log: bool) -> Callable[[float], int]:
    """From a value to its row or column, one of `count`."""
    scale: Callable[[float], float] = math.log10 if is_log else float
    low, distance = scale(start), (scale(end) - scale(start)) or 1.0
    return lambda value: round((scale(value) - low) / distance * (count - 1))


def _range(columns: Iterable[Iterable[float]]) -> tuple[float, float]:
    values = [value for column in columns for value in column]
    return min(values), max(values)


def bars_text(labels: Sequence[str], values: Sequence[int], width: int = 80) -> list[str]:
    """One line per value: its label, a bar relative to the largest value, and the value."""
    margin, figures = max(map(len, labels)), max(len(f'{value:,}') for value in values)
    room = max(width - margin - figures - 4, 10)
    most = max(*values, 1)
    # Every value above zero has at least one mark.
    marks = ['#' * max(round(value / most * room), min(value, 1)) for value in values]
    return [
        f'{label:>{margin}} |{mark:<{room}} {value:>{figures},}'
        for label, mark, value in zip(labels, marks, values, strict=True)
    ]
