"""The islands and the rounds of a federation as tables, for a terminal and for pages."""

import dataclasses
from typing import Any

from pretrax.amounts import duration, size
from pretrax.observe.attempts import FINISHED
from pretrax.view.federation.lines import metric_lines
from pretrax.view.federation.read import Federation
from pretrax.view.tables import text_table

ISLANDS = (
    'island',
    'share',
    'state',
    'round',
    'step',
    'loss',
    'tokens used',
    'left out',
    'late',
    'rejected',
    'process',
)
ROUNDS = ('round', 'step', 'loss', 'val loss', 'tokens', 'exchange', 'sent', 'islands', 'without')


def island_rows(federation: Federation) -> list[list[str]]:
    """A row for each island, by share, with the columns `ISLANDS`."""
    return [
        [
            one.name,
            str(one.share),
            one.state,
            '' if one.round is None else f'{one.round:,}',
            '' if one.step is None else f'{one.step:,}',
            '' if one.loss is None else f'{one.loss:.4f}',
            f'{one.used:,}',
            f'{one.left_out:,}',
            f'{one.late:,}',
            f'{one.rejected:,}',
            one.holder,
        ]
        for one in federation.islands
    ]


def round_records(federation: Federation, newest: int) -> list[dict[str, Any]]:
    """The newest rounds, the newest first: the numbers of their lines of metrics, and the islands in each."""
    numbers: dict[int, dict[str, Any]] = {}
    for line in metric_lines(federation):
        numbers.setdefault(line['round/round'], {}).update(line)
    closings = [one.closing for one in federation.rounds[-newest:][::-1] if one.closing is not None]
    return [
        {
            **{key.removeprefix('round/'): x for key, x in numbers[one.round].items() if 'island_' not in key},
            'tokens': numbers[one.round]['round/tokens'],
            'islands': one.in_order(),
            'late': one.left_out,
            'rejected': one.rejected,
            'closed_by': one.by,
        }
        for one in closings
    ]


def round_rows(federation: Federation, newest: int) -> list[list[str]]:
    """A row for each of the newest rounds, the newest first, with the columns `ROUNDS`."""
    rows = []
    for one in round_records(federation, newest):
        without = [f'{name} (late)' for name in one['late']]
        without += [f'{name} (rejected: {reason})' for name, reason in one['rejected'].items()]
        row = [f'{one[key]:,}' for key in ('round', 'step')]
        row += [f'{one[key]:.4f}' if key in one else '' for key in ('loss', 'val_loss')]
        row += [f'{one["tokens"]:,}', duration(one['seconds']) if 'seconds' in one else '', size(one['bytes_up'])]
        rows.append([*row, ', '.join(one['islands']), ', '.join(without)])
    return rows


def open_text(federation: Federation) -> str:
    """What the open round waits for; '' if all islands have finished."""
    if federation.state[0] == FINISHED:
        return ''
    opened, states = federation.opened, {one.name: one.state for one in federation.islands}
    there = ', '.join(sorted(opened.contributions)) or 'nobody'
    marks = {name: f' ({state})' if state in ('lost', 'silent') else '' for name, state in states.items()}
    waits = ', '.join(name + marks[name] for name in federation.waits_for) or 'no island that trains'
    return f'round {opened.number:,} is open: {there} contributed, it waits for {waits}'


def status_lines(federation: Federation, newest: int) -> list[str]:
    """The status for a terminal."""
    state, why = federation.state
    rows = [list(ISLANDS), *island_rows(federation)]
    drop = ('rejected', 'share', 'left out', 'round', 'late', 'loss', 'tokens')
    lines = [f'{state}, {why}' if why else state, '', *text_table(rows, (0, 2, 10), drop, '--json')]
    if federation.rounds:
        rows = [list(ROUNDS), *round_rows(federation, newest)]
        drop = ('val loss', 'sent', 'tokens', 'exchange', 'loss')
        lines += ['', *text_table(rows, (7, 8), drop, '--json')]
    return [*lines, '', text] if (text := open_text(federation)) else lines


def status_record(federation: Federation, newest: int) -> dict[str, Any]:
    """The status as JSON."""
    state, why = federation.state
    opened = federation.opened
    return {
        'state': state,
        'why': why,
        'terms': federation.table.terms,
        'islands': [dataclasses.asdict(one) for one in federation.islands],
        'rounds': round_records(federation, newest),
        'open': {
            'round': opened.number,
            'contributed': sorted(opened.contributions),
            'waits_for': list(federation.waits_for),
        },
        'problems': list(federation.problems),
    }
