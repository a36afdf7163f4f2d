"""A chart as a figure for Plotly, and as a page that needs no network."""

import functools
import json
from html import escape
from importlib.resources import files
from typing import Any

from pretrax.errors import printable
from pretrax.view.charts.chart import COLORS, Chart, Line
from pretrax.view.template import template

_DASHES = ('solid', 'dash', 'dot', 'dashdot')
_MARKED = 60  # a line of at most as many points, such as evaluations, has a mark at each
_GAP = 0.09  # between two panels, of the height


def chart_figure(chart: Chart) -> dict[str, Any]:
    """The `data` and the `layout` of a figure for Plotly."""
    count = len(chart.panels)
    height = 480 if count == 1 else 280 * count
    data: list[dict[str, Any]] = []
    axis = {'type': 'log' if chart.log_x else 'linear', 'title': {'text': shown(chart.x_label)}}
    layout: dict[str, Any] = {
        'xaxis': axis | {'anchor': f'y{count if count > 1 else ""}'},
        'hovermode': 'x unified',
        'legend': {'orientation': 'h', 'y': -60 / height, 'yanchor': 'top'},
        'margin': {'l': 70, 'r': 20, 't': 40, 'b': 40},
        'height': height + 80,
        'annotations': [],
    }
    in_legend = list(map(id, chart.legend()))
    for number, (panel, title) in enumerate(zip(chart.panels, chart.titles(), strict=True)):
        suffix = str(number + 1) if number else ''
        top = 1 - number * (1 + _GAP) / (count + _GAP * (count - 1))
        bottom = top - 1 / (count + _GAP * (count - 1))
        layout[f'yaxis{suffix}'] = {
            'domain': [max(bottom, 0), top],
            'type': 'log' if chart.log_y else 'linear',
            'tickformat': '.3~%' if panel.is_fraction else '',
        }
        layout['annotations'].append(heading(title, top))
        for line in panel.lines:
            data += _traces(line, f'y{suffix}', id(line) in in_legend)
    return {'data': data, 'layout': layout}


def heading(text: str, y: float) -> dict[str, Any]:
    """An annotation of a figure for Plotly at its left edge; `y` as a fraction of its height."""
    place = {'x': 0, 'xref': 'paper', 'xanchor': 'left', 'y': y, 'yref': 'paper', 'yanchor': 'bottom'}
    return {'text': f'<b>{shown(text)}</b>', **place, 'showarrow': False}


def chart_page(chart: Chart, title: str) -> str:
    """The chart as an HTML document."""
    return template('charts/page.html').render(
        title=title, plotly=plotly_script(), figure=in_script(chart_figure(chart))
    )


@functools.cache
def plotly_script() -> str:
    """The JavaScript of Plotly."""
    return files('plotly').joinpath('package_data/plotly.min.js').read_text()


def in_script(value: Any) -> str:
    """JSON that can stand in a script element of a page."""
    return json.dumps(value, allow_nan=False).replace('<', '\\u003c').replace('\u2028', '\\u2028')


def _traces(line: Line, axis: str, in_legend: bool) -> list[dict[str, Any]]:
    """The line; if it is smoothed, behind it the pale line of its points."""
    color, label = COLORS[line.color % len(COLORS)], shown(line.label)
    trace: dict[str, Any] = {
        'x': list(line.x),
        'y': list(line.y if line.smoothed is None else line.smoothed),
        'name': label,
        'legendgroup': label,
        'showlegend': in_legend,
        'yaxis': axis,
        'mode': 'lines+markers' if len(line.x) <= _MARKED else 'lines',
        'line': {'color': color, 'dash': _DASHES[line.style % len(_DASHES)], 'width': 2},
    }
    if line.smoothed is None:
        return [trace]
    pale = {'mode': 'lines', 'line': {'color': f'{color}4d', 'width': 1}, 'hoverinfo': 'skip'}  # 30 % opaque
    return [trace | pale | {'y': list(line.y), 'showlegend': False}, trace]


def shown(text: str) -> str:
    """Text for Plotly, which reads a part of HTML, and a formula between dollar signs."""
    return escape(printable(text).replace('\n', ' '), quote=False).replace('$', '&#36;')
