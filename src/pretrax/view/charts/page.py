"""A chart as a figure for Plotly, and as a page that needs no network."""

import dataclasses
import functools
import gzip
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from pretrax.errors import printable
from pretrax.view.charts.chart import COLORS, MARKED, Chart, Line
from pretrax.view.template import template

_DASHES = ('solid', 'dash', 'dot', 'dashdot')


def chart_figures(chart: Chart) -> list[dict[str, Any]]:
    """The `title`, `data` and `layout` of a figure for Plotly, for each panel."""
    figures = []
    for panel in chart.panels:
        single = dataclasses.replace(chart, panels=[panel])
        in_legend = list(map(id, single.legend()))
        layout = {
            'xaxis': {'type': 'log' if chart.log_x else 'linear', 'title': {'text': shown(chart.x_label)}},
            'yaxis': {'type': 'log' if chart.log_y else 'linear', 'tickformat': '.3~%' if panel.is_fraction else ''},
            'hovermode': 'x unified',
            'showlegend': True,
        }
        data = [trace for line in panel.lines for trace in _traces(line, id(line) in in_legend)]
        figures.append({'title': single.titles()[0], 'data': data, 'layout': layout})
    return figures


def chart_page(chart: Chart, title: str) -> str:
    """The chart as an HTML document."""
    return page_of('charts/page.html', chart_figures(chart), kind='plot', title=title)


def page_of(name: str, figures: Sequence[dict[str, Any]], **more: Any) -> str:
    """A page of figures, with the template that extends `charts/page.html`."""
    return template(name).render(figures=figures, drawn=in_script(figures), plotly=plotly_script(), **more)


@functools.cache
def plotly_script() -> str:
    """The JavaScript of Plotly's Cartesian charts: the npm package plotly.js-cartesian-dist-min (MIT license)."""
    return files(str(__package__)).joinpath('plotly.min.js').read_text(encoding='utf-8')


@functools.cache
def compressed_plotly() -> bytes:
    return gzip.compress(plotly_script().encode(), 6, mtime=0)


def in_script(value: Any) -> str:
    """JSON that can stand in a script element of a page."""
    return json.dumps(value, allow_nan=False).replace('<', '\\u003c').replace('\u2028', '\\u2028')


def _traces(line: Line, in_legend: bool) -> list[dict[str, Any]]:
    """The line; if it is smoothed, behind it the pale line of its points. The meta of the points is 'values'."""
    color, label = COLORS[line.color % len(COLORS)], shown(line.label)
    trace: dict[str, Any] = {
        'x': list(line.x),
        'y': list(line.y if line.smoothed is None else line.smoothed),
        'name': label,
        'legendgroup': label,
        'showlegend': in_legend,
        'mode': 'lines+markers' if len(line.x) <= MARKED else 'lines',
        'line': {'color': color, 'dash': _DASHES[line.style % len(_DASHES)], 'width': 2},
    }
    if line.smoothed is None:
        return [trace | {'meta': 'values'}]
    pale = {
        'meta': 'values',
        'mode': 'lines',
        'line': {'color': f'{color}4d', 'width': 1},
        'hoverinfo': 'skip',
    }  # 30 % opaque
    return [trace | pale | {'y': list(line.y), 'showlegend': False}, trace]


def shown(text: str) -> str:
    """Text for Plotly, which reads a part of HTML, and a formula between dollar signs."""
    return escape(printable(text).replace('\n', ' '), quote=False).replace('$', '&#36;')
