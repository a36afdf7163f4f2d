"""A comparison in words and tables, for a terminal, as Markdown, CSV and JSON, and as a page that needs no network."""

import dataclasses
import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pretrax.amounts import duration
from pretrax.view.charts.chart import Chart, Line, Panel, number_text
from pretrax.view.charts.page import chart_figures, page_of
from pretrax.view.compare.arms import Arm
from pretrax.view.compare.comparison import Comparison, Earlier, Result, averaged, curve_of, is_sparse
from pretrax.view.compare.statistics import Interval
from pretrax.view.definitions import definition_of
from pretrax.view.record.causes import shares
from pretrax.view.tables import csv_records, markdown_table, markdown_text, terminal_width, text_table

_LONGEST = 60  # characters of a cell in a terminal
_DROPPED = ('end', 'MFU', 'sd between seeds', 'best val_loss', 'seeds')  # by a narrow terminal
_COLUMNS = ('seed_deviation', 'best', 'last', 'tokens_per_second', 'mfu')


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the comparison: paragraphs, then a table whose first row has the headings, if it has one."""

    title: str
    paragraphs: list[str]
    rows: list[list[str]]
    terms: Sequence[str]  # that it uses, as in `view.definitions`
    columns: Sequence[str] = ()  # terms of the columns, if they have definitions


def sections(result: Result) -> list[Section]:
    """The comparison in the order in which it is read."""
    verdicts = [sentence for one in result.comparisons for sentence in verdict_text(one, result)]
    nothing = 'nothing that is known'
    return [
        Section('Verdict', verdicts, [], (result.key, 'final', 'interval', 'saved')),
        Section('Arms', [], arm_rows(result), ('arm',), ('arm', 'seeds', 'final', *_COLUMNS, 'end')),
        Section('Where the time went', [], time_rows(result), ('goodput',)),
        Section('What differs', [] if result.differences else [nothing], difference_rows(result), ('difference',)),
    ]


def as_text(result: Result) -> str:
    """For a terminal."""
    blocks, width = [], terminal_width()
    for section in sections(result):
        rows = [[_short(cell) for cell in row] for row in section.rows]
        left = range(len(rows[0])) if section.title == 'What differs' and rows else (0, 1)
        table = text_table(rows, left, _DROPPED, '--out FILE.md', width and width - 2) if rows else []
        texts = [line for text in section.paragraphs for line in (textwrap.wrap(text, width - 2) if width else [text])]
        blocks.append('\n'.join([section.title, *(f'  {line}' for line in [*texts, *table])]))
    return '\n\n'.join(blocks)


def as_markdown(result: Result) -> str:
    """A document in Markdown."""
    lines = [f'# {markdown_text(" and ".join(arm.label for arm in result.arms))}']
    for section in sections(result):
        lines += ['', f'## {section.title}', '']
        lines += [line for text in section.paragraphs for line in (markdown_text(text), '')]
        lines += markdown_table(section.rows) if section.rows else []
    return '\n'.join(lines).rstrip() + '\n'


def as_csv(result: Result) -> str:
    """A row for each comparison with the baseline."""
    return csv_records([_record(one, result) for one in result.comparisons])


def as_json(result: Result) -> str:
    """The comparisons, the arms and what differs."""
    arms = [
        {'arm': arm.letter, 'name': arm.name, 'runs': [str(run.path) for run in arm.runs], 'seeds': list(arm.seeds)}
        for arm in result.arms
    ]
    letters = [arm.letter for arm in result.arms]
    differences = [
        {'section': one.section, 'key': one.key, 'values': dict(zip(letters, one.values, strict=True))}
        for one in result.differences
    ]
    comparisons = [
        _record(one, result) | {'finals_a': one.a, 'finals_b': one.b, 'notes': one.notes} for one in result.comparisons
    ]
    found = {'arms': arms, 'comparisons': comparisons, 'differences': differences}
    return json.dumps(found, indent=1, default=str, allow_nan=False) + '\n'


def verdict_text(one: Comparison, result: Result) -> list[str]:
    """The verdict on an arm, in sentences."""
    a, b, key = result.arms[0].label, one.arm.label, result.key
    if one.verdict == 'not comparable':
        return [f'{b}: not comparable with {a}: {one.why}.', *(f'Note: {note}.' for note in one.notes)]
    head = {
        'better': f'{b} is better than {a}',
        'worse': f'{b} is worse than {a}',
        'equal': f'{b} and {a} are equal',
        'no difference shown': f'No difference between {b} and {a} is shown',
        'not decided': f'{b} and {a}: not decided',
    }[one.verdict]
    end = f'{_amount(one.end)} {result.x_name}'
    if one.verdict == 'equal':
        return [f'{head}: {one.why}, up to {end}.', *(f'Note: {note}.' for note in one.notes)]
    direction = 'lower' if one.difference < 0 else 'higher'
    letters = f'{one.arm.letter} - {result.arms[0].letter}'
    found = [
        f'{head}: {key} after {end} is {signed(abs(one.difference))[1:]} {direction} '
        f'({letters} = {signed(one.difference)}).'
    ]
    if one.interval is not None:
        found.append(f'{_percent(result.confidence)} interval of the difference: {_span(one.interval)}; {one.why}.')
        if len(result.arms) > 2:
            together = _percent(result.options.confidence)
            found.append(f'All {len(result.arms) - 1} intervals hold together with {together} (Bonferroni).')
    else:
        found.append(f'{one.why[0].upper()}{one.why[1:]}.')
    if one.within is not None:
        found.append(
            f'Training loss at the same steps of the last part of both: {signed(one.within.estimate)}, '
            f'{_percent(result.confidence)} interval {_span(one.within)}, for these two runs only.'
        )
    if one.earlier is not None:
        found.append(_earlier_text(one.earlier, one, result))
    return [*found, *(f'Note: {note}.' for note in one.notes)]


def arm_rows(result: Result) -> list[list[str]]:
    """Headings and a row for each arm."""
    finals = {result.arms[0].letter: result.comparisons[0].a} | {one.arm.letter: one.b for one in result.comparisons}
    head = ['arm', 'seeds', f'final {result.key}', 'sd between seeds', 'best val_loss', 'last loss', 'tokens/s', 'MFU']
    rows = [[*head, 'end']]
    for arm in result.arms:
        values = [value for value in finals[arm.letter] if math.isfinite(value)]
        ends = [float(curve.x[-1]) for run in arm.runs if len((curve := curve_of(run, result.key, result.x_name)).x)]
        are_known = all(isinstance(seed, int) for seed in arm.seeds)
        rows.append(
            [
                arm.label,
                ', '.join(map(str, arm.seeds)) if are_known else str(len(arm.seeds)),
                f'{np.mean(values):.4f}' if values else '',
                f'{np.std(values, ddof=1):.4f}' if len(values) > 1 else '',
                _mean_of(arm, 'val_loss', np.nanmin, '.4f'),
                _mean_of(arm, 'loss', lambda values: values[-1], '.4f'),
                _mean_of(arm, 'tokens_per_second', np.nanmedian, ',.0f'),
                _mean_of(arm, 'mfu', np.nanmedian, '.1%'),
                f'{_amount(min(ends))} {result.x_name}' if ends else '',
            ]
        )
    return rows


def time_rows(result: Result) -> list[list[str]]:
    """Headings, and for each cause its share of the time of all runs of an arm, the longest of the first arm first."""
    arms = [Counter() for _ in result.arms]
    for total, arm in zip(arms, result.arms, strict=True):
        for run in arm.runs:
            total.update(run.seconds)
    columns = [{definition.name: share for definition, _, share in shares(total)} for total in arms]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, '-') for column in columns)] for name in names]
    lengths = ['all time', *(duration(total.total()) for total in arms)]
    return [['cause', *(arm.label for arm in result.arms)], *rows, lengths] if rows else []


def difference_rows(result: Result) -> list[list[str]]:
    """Headings and a row for each fact that is not the same in all arms."""
    if not result.differences:
        return []
    head = ['', 'key', *(arm.label for arm in result.arms)]
    return [head, *([one.section, one.key, *(value or '-' for value in one.values)] for one in result.differences)]


def _amount(value: float) -> str:
    return number_text(value, digits=4) if value >= 1e6 else f'{value:,.0f}'


def signed(value: float) -> str:
    """A difference of losses."""
    return f'{value:+.4f}' if abs(value) >= 0.001 or not value else f'{value:+.2g}'


def _span(interval: Interval) -> str:
    return f'{signed(interval.low)} to {signed(interval.high)}'


def _percent(confidence: float) -> str:
    return f'{100 * confidence:.4g}%'


def _earlier_text(earlier: Earlier, one: Comparison, result: Result) -> str:
    other = result.arms[0].letter if earlier.by == one.arm.letter else one.arm.letter
    unit = result.x_name if result.x_name == 'tokens' else 'steps'
    text = (
        f'{earlier.by} reaches the final {result.key} of {other} after {_amount(earlier.at)} of '
        f'{_amount(earlier.end)} {unit}: {earlier.saved:.0%} fewer'
    )
    if earlier.low is None or earlier.high is None:
        return f'{text}, in these runs.'
    most = 1 - earlier.low / earlier.end
    least = f'{1 - earlier.high / earlier.end:.0%}' if earlier.high <= earlier.end else 'none'
    return f'{text} ({least} to {most:.0%} at the ends of the interval).'


def _mean_of(arm: Arm, key: str, statistic: Any, form: str) -> str:
    """The mean over the runs of a statistic of their finite numbers."""
    columns = [run.metrics[key].values for run in arm.runs if key in run.metrics]
    found = [float(statistic(finite)) for values in columns if len(finite := values[np.isfinite(values)])]
    return f'{np.mean(found):{form}}' if found else ''


def _record(one: Comparison, result: Result) -> dict[str, Any]:
    """The numbers of a comparison; None: not known."""
    interval, within, earlier = one.interval, one.within, one.earlier
    found = {
        'baseline': result.arms[0].name,
        'arm': one.arm.name,
        'key': result.key,
        'x': result.x_name,
        'end': one.end,
        'runs_baseline': len(result.arms[0].runs),
        'runs_arm': len(one.arm.runs),
        'baseline_final': float(np.mean(one.a or math.nan)),
        'arm_final': float(np.mean(one.b or math.nan)),
        'difference': one.difference,
        'low': interval and interval.low,
        'high': interval and interval.high,
        'confidence': result.confidence,
        'method': one.method or None,
        'verdict': one.verdict,
        'why': one.why,
        'within_runs': within and within.estimate,
        'within_runs_low': within and within.low,
        'within_runs_high': within and within.high,
        'earlier': earlier and earlier.by,
        'earlier_at': earlier and earlier.at,
        'earlier_end': earlier and earlier.end,
        'saved': earlier and earlier.saved,
    }
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in found.items()
    }


def _short(text: str) -> str:
    text = text.replace('\n', ' ')
    return text if len(text) <= _LONGEST else f'{text[: _LONGEST - 4]} ...'


_POINTS = 2000  # of a line; more are thinned out


def compare_page(result: Result) -> str:
    """The comparison as an HTML document, with the curves of the compared key, and below it of the training loss."""
    chart = Chart([Panel(_title(key), list(_lines(result, key))) for key in _keys(result)], result.x_name)
    return page_of(
        'compare/page.html',
        chart_figures(chart),
        kind='comparison',
        title=' and '.join(arm.label for arm in result.arms),
        sections=sections(result),
        curves=_keys(result),
    )


def _lines(result: Result, key: str) -> Iterator[Line]:
    ends = [one.end for one in result.comparisons if one.end == one.end]
    for number, arm in enumerate(result.arms):
        for run in arm.runs:
            curve = curve_of(run, key, result.x_name)
            if len(curve.x):
                smooth = averaged(curve, key, 0.05 * max([*ends, float(curve.x[-1])]))
                thinned = slice(None, None, -(-len(curve.x) // _POINTS))
                left_out = f'{curve.nonfinite} not finite' if curve.nonfinite else ''
                x, y = curve.x[thinned].tolist(), curve.y[thinned].tolist()
                yield Line(
                    arm.label, x, y, None if is_sparse(key) else smooth[thinned].tolist(), number, 0, left_out=left_out
                )


def _title(key: str) -> str:
    unit = definition_of(key).unit
    return key + (f' ({unit})' if unit else '') + ('' if is_sparse(key) else ', points and means over 5% of the run')


def _keys(result: Result) -> list[str]:
    runs = [run for arm in result.arms for run in arm.runs]
    return [key for key in dict.fromkeys([result.key, 'loss']) if all(key in run.metrics for run in runs)]
