"""The results of a sweep as a table (Markdown, CSV, HTML, text) and as plots (SVG)."""

import csv
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pretrax.config.show import value_text
from pretrax.view.charts.chart import Chart, Line, Panel
from pretrax.view.charts.picture import chart_picture
from pretrax.view.tables import markdown_table, text_table
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
    """Writes results.md, results.csv, results.html, and a plot of each number over each quantity that varies.

    Args:
        directory: for the files.
        name: name of the sweep.
        hardware: hardware and versions of the sweep.
        command: the command that writes these files.
        results: from `launch.bench`: `status`, `changes`, `why`, and the numbers of timed rows.
    """
    plots = dict(_plots(results))
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
    page = template('sweep.html').render(
        title=name, command=command, facts=facts, head=head, rows=body,
        plots=[Markup(image[image.index(b'<svg') :].decode()) for image in plots.values()],
    )  # fmt: skip
    (directory / 'results.html').write_text(page)
    with (directory / 'results.csv').open('w', newline='') as file:
        keys = _swept(results)
        fields = list(
            dict.fromkeys(key for result in results for key in result if key not in ('changes', 'key', *keys))
        )
        lines = csv.writer(file)
        lines.writerow([*keys, *fields])
        for result in results:
            own = [value_text(result['changes'][key]) if key in result['changes'] else '' for key in keys]
            lines.writerow([*own, *(result.get(key, '') for key in fields)])


def table_text(results: Sequence[Result]) -> list[str]:
    """The table for a terminal."""
    return text_table(_table(results))


def _table(results: Sequence[Result]) -> list[list[str]]:
    """Headings and rows: the varied keys, the numbers, the status."""
    keys = _swept(results)
    shown = {key: number for key, number in _NUMBERS.items() if key not in keys}
    rows = [[*keys, *(heading for heading, _ in shown.values()), 'status']]
    for result in results:
        own = [value_text(result['changes'][key]) if key in result['changes'] else '' for key in keys]
        numbers = [show(result[key]) if result.get(key) is not None else '' for key, (_, show) in shown.items()]
        why = f': {result["why"]}' if result.get('why') else ''
        rows.append([*own, *numbers, f'{result["status"]}{why}'])
    return rows


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
            lines = [
                Line(name, *_columns(sorted(points)), color=number)
                for number, (name, points) in enumerate(curves.items())
            ]
            if lines:
                panel = Panel(f'{y_label} by {x_label}', lines, is_fraction=y == 'mfu')
                yield f'plot-{y}-by-{x}.svg', chart_picture(Chart([panel], x_label), '.svg')


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _others(result: Result, all_of_them: Sequence[Result], x: str) -> str:
    """Label of the other varied keys: those that differ among results with the same x."""

    def value(one: Result, key: str) -> str:
        return json.dumps(one['changes'].get(key))

    alike: dict[Any, list[Result]] = {}
    for one in all_of_them:
        alike.setdefault(one[x], []).append(one)
    free = [
        key for key in _swept(all_of_them) if any(len({value(o, key) for o in group}) > 1 for group in alike.values())
    ]
    return ' '.join(f'{key}={value_text(result["changes"].get(key))}' for key in free)


def _swept(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(key for result in results for key in result['changes']))
