"""The trials of a search as a table (text, Markdown, CSV) and as a page with parallel coordinates and importances."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pretrax.config.show import value_text
from pretrax.system.atomic import write_file
from pretrax.view.charts.chart import COLORS
from pretrax.view.charts.page import page_of, shown
from pretrax.view.tables import csv_table, markdown_table, text_table

type Trial = Mapping[str, Any]

_FIRST = 40  # trials of the table in a terminal
_BEST, _WORST = (10, 40, 120), (240, 190, 90)  # colors of the lines of trials


def write_report(
    directory: pathlib.Path,
    name: str,
    command: str,
    metric: str,
    steps: int,
    parameters: Mapping[str, bool],
    trials: Sequence[Trial],
    importances: Mapping[str, float],
) -> None:
    """Writes trials.md, trials.csv and report.html.

    Args:
        command: that writes these files.
        metric: what is minimized.
        steps: steps of a whole trial.
        parameters: the keys, and whether each has a logarithmic scale.
        trials: from `launch.search`.
        importances: importances of the parameters, which add up to one; {} if they are not known.
    """
    rows = table(trials, metric, list(parameters))
    facts = summary(trials, metric, steps)
    markdown = [f'# {name}', '', f'`{command}`', '', *facts, '', *markdown_table(rows)]
    if importances:
        parts = [['parameter', 'importance'], *([key, f'{part:.2f}'] for key, part in importances.items())]
        markdown += ['', *markdown_table(parts)]
    write_file(directory / 'trials.md', ('\n'.join(markdown) + '\n').encode())
    records: list[list[Any]] = [['trial', 'state', 'steps', metric, 'why', *parameters]]
    for trial in trials:
        own = [trial['values'].get(key) for key in parameters]
        records.append([trial['number'], trial['state'], trial['steps'], trial['value'], trial['why'], *own])
    write_file(directory / 'trials.csv', csv_table(records).encode())
    drawn = figures(trials, metric, parameters, importances)
    page = page_of('search/page.html', drawn, kind='search', title=name, command=command, facts=facts, rows=rows)
    write_file(directory / 'report.html', page.encode())


def summary(trials: Sequence[Trial], metric: str, steps: int) -> list[str]:
    """What happened: how many trials ended in which way, the best one, and the steps that were saved."""
    states = [trial['state'] for trial in trials]
    counted = ', '.join(f'{states.count(state)} {state}' for state in dict.fromkeys(states))
    lines = [f'{len(trials)} trials: {counted}']
    done = [trial for trial in trials if trial['state'] == 'done']
    if done:
        best = min(done, key=lambda trial: trial['value'])
        values = ' '.join(f'{key}={value_text(value)}' for key, value in best['values'].items())
        lines.append(f'best: trial {best["number"]}, {metric} {best["value"]:.4f}: {values}')
    trained = sum(trial['steps'] or 0 for trial in trials if trial['state'] != 'failed')
    whole = steps * sum(state not in ('failed', 'running') for state in states)
    if trained and whole:
        lines.append(f'{trained:,} steps trained, {trained / whole:.0%} of {whole:,} for the same trials to their end')
    return lines


def table(trials: Sequence[Trial], metric: str, parameters: Sequence[str]) -> list[list[str]]:
    """Headings and a row for each trial, the best first."""
    rows = [['trial', 'state', 'steps', metric, *parameters]]
    for trial in sorted(trials, key=_rank):
        value = '' if trial['value'] is None else f'{trial["value"]:.4f}'
        values = [parameter_text(trial['values'][key]) if key in trial['values'] else '' for key in parameters]
        rows.append([str(trial['number']), trial['state'], str(trial['steps'] or ''), value, *values])
    return rows


def table_text(trials: Sequence[Trial], metric: str, parameters: Sequence[str]) -> list[str]:
    """The table for a terminal: the best trials."""
    rows = table(trials, metric, parameters)
    more = [f'and {len(rows) - 1 - _FIRST} more'] if len(rows) > _FIRST + 1 else []
    return [*text_table(rows[: _FIRST + 1], left=(1,), drop=('steps', *parameters[::-1]), more='trials.csv'), *more]


def figures(
    trials: Sequence[Trial], metric: str, parameters: Mapping[str, bool], importances: Mapping[str, float]
) -> list[dict[str, Any]]:
    """The figures of `charts.page.page_of`: the curves of the trials, parallel coordinates, importances."""
    curves = []
    for trial in trials:
        points = [(step, value) for step, value in trial['curve'] if math.isfinite(value)]
        if points:
            color = COLORS[0] if trial['state'] == 'done' else COLORS[1]
            curves.append(
                {
                    'x': [step for step, _ in points],
                    'y': [value for _, value in points],
                    'name': f'trial {trial["number"]} {trial["state"]}',
                    'mode': 'lines+markers',
                    'line': {'color': color, 'width': 1.5},
                    'meta': 'values',
                }
            )
    found = [
        {
            'title': f'{metric} of each trial: to the end, or stopped early (orange)',
            'data': curves,
            'layout': {'xaxis': {'title': {'text': 'step'}}, 'yaxis': {}, 'hovermode': 'closest'},
        }
    ]
    lines, axes = _parallel(trials, metric, parameters)
    if lines:
        above = {'y': 1.05, 'yanchor': 'bottom', 'showarrow': False}
        layout = {
            'xaxis': {
                'range': [-0.15, len(parameters) + 0.15],
                'tickvals': list(range(len(axes))),
                'ticktext': [f'{shown(axis.low)}<br>{shown(axis.name)}' for axis in axes],
            },
            'yaxis': {'range': [-0.05, 1.05], 'visible': False},
            'hovermode': 'closest',
            'annotations': [{'text': shown(axis.high), 'x': number, **above} for number, axis in enumerate(axes)],
        }
        title = 'Parallel coordinates: each line is a trial, dark: low loss'
        found.append({'title': title, 'data': lines, 'layout': layout})
    if importances:
        pairs = list(importances.items())[::-1]
        bars = {
            'type': 'bar',
            'orientation': 'h',
            'x': [part for _, part in pairs],
            'y': [shown(key) for key, _ in pairs],
            'marker': {'color': COLORS[2]},
        }
        layout = {'xaxis': {'range': [0, 1]}, 'yaxis': {}, 'hovermode': 'closest'}
        found.append({'title': 'Importance of the parameters (PED-ANOVA)', 'data': [bars], 'layout': layout})
    return found


class _Axis(NamedTuple):
    """An axis of the parallel coordinates: where each trial is on it, from 0 to 1, and what is at its ends."""

    name: str
    places: list[float]
    low: str
    high: str


def _parallel(
    trials: Sequence[Trial], metric: str, parameters: Mapping[str, bool]
) -> tuple[list[dict[str, Any]], list[_Axis]]:
    """A line for each trial with a loss, through an axis for each parameter and one for the loss; and these axes.

    They are drawn as ordinary lines: Plotly's own `parcoords` compiles JavaScript, which the page does not allow.
    """
    ended = [trial for trial in trials if trial['value'] is not None and parameters.keys() <= trial['values'].keys()]
    if not ended:
        return [], []
    axes = [_axis(key, [trial['values'][key] for trial in ended], log) for key, log in parameters.items()]
    axes.append(_axis(metric, [trial['value'] for trial in ended], log=False))
    lines = []
    for number, trial in enumerate(ended):
        rank = sum(other['value'] < trial['value'] for other in ended) / max(len(ended) - 1, 1)
        red, green, blue = (round(low + (high - low) * rank) for low, high in zip(_BEST, _WORST, strict=True))
        texts = [
            *(f'{key}={parameter_text(trial["values"][key])}' for key in parameters),
            f'{metric} {trial["value"]:.4f}',
        ]
        lines.append(
            {
                'x': list(range(len(axes))),
                'y': [axis.places[number] for axis in axes],
                'text': [shown(text) for text in texts],
                'hoverinfo': 'name+text',
                'name': f'trial {trial["number"]} {trial["state"]}',
                'mode': 'lines+markers',
                'line': {'color': f'rgb({red},{green},{blue})', 'width': 1.5},
            }
        )
    return lines[::-1], axes


def _axis(name: str, values: Sequence[Any], log: bool) -> _Axis:
    """Numbers, their logarithms, or words at equal distances."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        numbers = [math.log(value) if log else value for value in values]
        low, high = parameter_text(min(values)), parameter_text(max(values))
    else:
        words = sorted({value_text(value) for value in values})
        numbers = [words.index(value_text(value)) for value in values]
        low, high = words[0], words[-1]
    width = max(numbers) - min(numbers) or 1
    return _Axis(name, [(number - min(numbers)) / width for number in numbers], low, high)


def _rank(trial: Trial) -> tuple[int, float, int]:
    """Finished trials by their value, then the others by the steps that they got."""
    if trial['state'] == 'done':
        return 0, trial['value'], trial['number']
    return 1, -(trial['steps'] or 0), trial['number']


def parameter_text(value: Any) -> str:
    """The value of a parameter, in a few digits."""
    return f'{value:.4g}' if isinstance(value, float) else value_text(value)
