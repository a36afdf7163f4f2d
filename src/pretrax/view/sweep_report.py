"""The results of a sweep as a table (Markdown, CSV, HTML, text) and as plots (SVG)."""

import importlib.util
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pretrax.config.show import value_text
from pretrax.view.charts.chart import Chart, Line, Panel
from pretrax.view.charts.picture import chart_picture
from pretrax.view.tables import csv_table, markdown_table, text_table
from pretrax.view.template import template

type Result = Mapping[str, Any]

# Numbers of a timed row: key -> (heading, formatting)
_NUMBERS: dict[str, tuple[str, Callable[[Any], str]]] = {
    'n_params': ('parameters', lambda n: f'{n:,}'),
    'devices': ('devices', str),
    'step_seconds': ('step, ms', lambda s: f'{1000 * s:,.4g}'),
    'tokens_per_second': ('tokens/s', lambda n: f'{n:,.0f}'),
    'mfu': ('MFU', lambda x: f'{x:.1%}'),
    'memory': ('memory, GB', lambda n: f'{n / 1e9:.3g}'),
    'loss': ('loss', lambda x: f'{x:.4f}'),
}
_ACROSS = {'n_params': 'parameters', 'batch_tokens': 'tokens per step', 'devices': 'devices'}
_UP = {'tokens_per_second': 'tokens/s', 'mfu': 'MFU', 'memory': 'memory per device, GB'}
_SCALE = {'memory': 1e-9}


def write_report(
    directory: pathlib.Path, name: str, hardware: Mapping[str, Any], command: str, results: Sequence[Result]
) -> None:
    """Writes results.md, results.csv, results.html and, if Matplotlib is installed, a plot of each number over each
    quantity that varies.

    Args:
        hardware: hardware and versions of the sweep.
        command: the command that writes these files.
        results: from `launch.bench`: `status`, `changes`, `why`, and the numbers of timed rows.
    """
    plots = dict(_plots(results)) if importlib.util.find_spec('matplotlib') else {}
    for old in directory.glob('plot-*.svg'):
        if old.name not in plots:
            old.unlink()
    for file, image in plots.items():
        (directory / file).write_bytes(image)
    facts = ', '.join(f'{key} {value}' for key, value in hardware.items())
    head, *body = _table(results)
    markdown = [f'# {name}', '', f'`{command}`', '', facts, '', *markdown_table([head, *body]), '']
    markdown += [f'![{file}]({file})' for file in plots]
    (directory / 'results.md').write_text('\n'.join(markdown) + '\n')
    images = [Markup(image[image.index(b'<svg') :].decode()) for image in plots.values()]
    page = template('sweep.html').render(title=name, command=command, facts=facts, head=head, rows=body, plots=images)
    (directory / 'results.html').write_text(page)
    keys = _swept(results)
    fields = dict.fromkeys(key for result in results for key in result if key not in ('changes', 'key', *keys))
    records = [[*_own(result, keys), *(result.get(key, '') for key in fields)] for result in results]
    (directory / 'results.csv').write_text(csv_table([[*keys, *fields], *records], '\r\n'), newline='')


def table_text(results: Sequence[Result]) -> list[str]:
    """The table for a terminal."""
    rows = _table(results)
    drop = ('devices', 'parameters', 'memory, GB', 'step, ms', 'MFU')
    return text_table(rows, left=(len(rows[0]) - 1,), drop=drop, more='results.csv')


def _table(results: Sequence[Result]) -> list[list[str]]:
    """Headings and rows: the varied keys, the numbers, the status."""
    keys = _swept(results)
    shown = {key: number for key, number in _NUMBERS.items() if key not in keys}
    rows = [[*keys, *(heading for heading, _ in shown.values()), 'status']]
    for result in results:
        numbers = [show(result[key]) if result.get(key) is not None else '' for key, (_, show) in shown.items()]
        why = f': {result["why"]}' if result.get('why') else ''
        rows.append([*_own(result, keys), *numbers, f'{result["status"]}{why}'])
    return rows


def _own(result: Result, keys: Sequence[str]) -> list[str]:
    """The values of the varied keys of a row."""
    return [value_text(result['changes'][key]) if key in result['changes'] else '' for key in keys]


def _plots(results: Sequence[Result]) -> Iterator[tuple[str, bytes]]:
    """(file name, SVG) of each number over each quantity that has more than one value."""
    done = [result for result in results if result['status'] == 'done']
    for x, x_label in _ACROSS.items():
        if len({result[x] for result in done}) < 2:
            continue
        for y, y_label in _UP.items():
            known = [result for result in done if result.get(y) is not None]
            curves: dict[str, list[tuple[float, float]]] = {}
            for result in known:
                curves.setdefault(_others(result, known, x), []).append((result[x], result[y] * _SCALE.get(y, 1)))
            lines = []
            for number, (name, points) in enumerate(curves.items()):
                across, up = zip(*sorted(points), strict=True)
                lines.append(Line(name, across, up, color=number))
            if lines:
                panel = Panel(f'{y_label} by {x_label}', lines, is_fraction=y == 'mfu')
                yield f'plot-{y}-by-{x}.svg', chart_picture(Chart([panel], x_label), '.svg')


def _others(result: Result, all_of_them: Sequence[Result], x: str) -> str:
    """Label of the other varied keys: those that differ among results with the same x."""
    free = []
    for key in _swept(all_of_them):
        pairs = {(one[x], json.dumps(one['changes'].get(key))) for one in all_of_them}
        if len(pairs) > len({across for across, _ in pairs}):
            free.append(f'{key}={value_text(result["changes"].get(key))}')
    return ' '.join(free)


def _swept(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(key for result in results for key in result['changes']))
