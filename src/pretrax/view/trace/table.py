"""Traced steps as text for the terminal, with advice, as CSV, JSON, and an HTML page."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrax.amounts import prefixed, short_time, size
from pretrax.tables import read_table
from pretrax.view.definitions import TRACE_COLUMNS, TRACE_PHASE_COLUMNS, Definition
from pretrax.view.tables import csv_records, text_table
from pretrax.view.template import filled_columns, template
from pretrax.view.trace.device_time import COMMUNICATION, COMPUTATION
from pretrax.view.trace.steps import FORWARD_AND_BACKWARD, By, Row, TracedGap, TracedSteps

_MOST, _NAMED = 5, 3  # lines, and scopes that a line names
_WORTH = 0.05  # share of the step below which nothing is said

_ADVICE: dict[str, dict[str, str]] = read_table(Path(__file__).with_name('advice.yaml'))
_AXES, _PHASES = _ADVICE['axes'], _ADVICE['phases']


def advice(steps: TracedSteps) -> list[str]:
    """What takes most time, and what to try: at most five lines, the most expensive first."""
    whole = steps.seconds
    phases = [(seconds, f'{phase}: {_PHASES[phase]}') for phase, seconds in steps.phases().items() if phase in _PHASES]
    found = [*_communication(steps), *phases, *_computation(steps)]
    found = sorted((one for one in found if one[0] >= _WORTH * whole), reverse=True)
    return [f'{seconds / whole:.0%}  {line}' for seconds, line in found[:_MOST]]


def _communication(steps: TracedSteps) -> Iterator[tuple[float, str]]:
    exposed: dict[str, float] = defaultdict(float)
    for row in steps.operations:
        if row.rank == COMMUNICATION:
            known = steps.program.operations.get(row.name) if steps.program else None
            axes = known.collective.axes if known is not None and known.collective is not None else ()
            exposed[' '.join(axes)] += row.seconds
    if steps.limits.name == 'cpu' and sum(exposed.values()) > 0:
        advised = 'simulated devices wait here for the cores that they share: fewer devices are faster'
        yield sum(exposed.values()), f'communication between devices: {advised}'
        return
    for axes, seconds in exposed.items():
        over = f'exposed communication over {axes}' if axes else 'exposed communication'
        advised = _AXES.get(axes, 'fewer mesh axes, or a mesh whose inner axes stay inside one node or slice')
        yield seconds, f'{over}: {advised}'


def _computation(steps: TracedSteps) -> Iterator[tuple[float, str]]:
    """Scopes with computation that is far from its limit, or limited by the bandwidth of the memory, by what to try."""
    limits = steps.limits
    narrow = '' if limits.compute in ('bf16', 'fp16') else ', precision.compute=bf16'
    larger = f'larger products (batch.micro, batch.tokens), sizes that are multiples of 128{narrow}'
    fewer = f'fewer bytes: a fused kernel, or model.loss_chunks for the loss{narrow}'
    longer = 'small or strided operations: larger micro-batches (batch.micro)'
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for row in steps.rows('scope'):
        if row.rank != COMPUTATION or row.phase in _PHASES:
            continue
        work = (row.flops or 0.0) / limits.peak if limits.peak else 0.0
        traffic = (row.bytes or 0.0) / limits.bandwidth if limits.bandwidth else 0.0
        if row.best is None:
            found[fewer].append((row.seconds, f'{row.name} ({row.phase})'))
        elif row.roofline is None:
            continue  # faster than the limits that are known
        elif work >= traffic and row.roofline < 0.5:
            found[larger].append((row.seconds, f'{row.name} ({row.phase}, {row.roofline:.0%} of the peak FLOP/s)'))
        elif traffic > work:
            part = f'{row.roofline:.0%} of the bandwidth'
            tried = fewer if row.roofline >= 0.5 else longer
            found[tried].append((row.seconds, f'{row.name} ({row.phase}, {part})'))
    for tried, scopes in found.items():
        names = [name for _, name in scopes[:_NAMED]] + ['...'] * (len(scopes) > _NAMED)
        yield sum(seconds for seconds, _ in scopes), f'{", ".join(names)}: {tried}'


# Keys of a row in a file.
_VALUES = ('name', 'phase', 'runs', 'seconds', 'share', 'elapsed', 'exposed', 'flops', 'bytes', 'best', 'roofline')
_MOST_ROWS = 20
_DROPPED = ('runs', 'bytes/s', 'FLOP/s', 'elapsed', 'phase')  # by a narrow terminal


def _rate(amount: float | None, seconds: float) -> str:
    return prefixed(amount / seconds) if amount and seconds else ''


def _share(part: float, whole: float) -> str:
    return f'{100 * part / whole:.1f}%' if whole else ''


def cells(row: Row, step: float) -> list[str]:
    """A row as text, in the order of `TRACE_COLUMNS`."""
    return [
        row.name,
        row.phase,
        f'{row.runs:,.4g}',
        short_time(row.seconds),
        _share(row.seconds, step),
        short_time(row.elapsed),
        _rate(row.flops, row.elapsed),
        _rate(row.bytes, row.elapsed),
        '' if row.roofline is None else f'{100 * row.roofline:.0f}%',
    ]


def text(steps: TracedSteps, by: By, width: int | None = None, most: int = _MOST_ROWS) -> str:
    """The whole report for a terminal: the step, its phases, the table, gaps, memory, and what to try."""
    rows = [cells(row, steps.seconds) for row in steps.rows(by)]
    table = _aligned([by, *list(TRACE_COLUMNS)[1:]], rows[:most], width)
    if len(rows) > most:
        table.append(f'... and {len(rows) - most} more; --out FILE.csv writes all')
    parts = [[*summary(steps)], _aligned([*TRACE_PHASE_COLUMNS], phase_rows(steps), width), table]
    if steps.gaps:
        gaps = [f'  {short_time(gap.seconds):>8}  {_between(gap)}' for gap in steps.gaps]
        parts.append(['longest gaps of one device', *gaps])
    if memory := [*memory_lines(steps)]:
        parts.append(memory)
    if found := advice(steps):
        numbered = [f'  {number}. {line}' for number, line in enumerate(found, 1)]
        parts.append(['what takes most time, and what to try', *numbered])
    return '\n\n'.join('\n'.join(part) for part in parts)


def summary(steps: TracedSteps) -> Iterator[str]:
    """What was traced, and how its time divides."""
    several = f'steps {steps.first} to {steps.first + steps.steps - 1}' if steps.first is not None else 'steps'
    which = f'step {steps.first}' if steps.steps == 1 and steps.first is not None else several
    devices = f'{steps.devices} device{"s" * (steps.devices > 1)}'
    yield f'{which} on {devices}, {steps.limits.name}; times are per step and device'
    if steps.reason:
        yield f'traced because of {steps.reason}'
    shares = [('busy', steps.busy), ('gaps', steps.idle), ('between steps', steps.between)]
    yield f'step {short_time(steps.seconds)}: ' + ', '.join(
        f'{name} {short_time(seconds)} ({_share(seconds, steps.seconds)})' for name, seconds in shares
    )
    exposed = steps.phases().get('communication', 0.0)
    if steps.communicating:
        hidden = 1 - exposed / steps.communicating
        yield (
            f'communication {short_time(steps.communicating)}, of which {short_time(exposed)} exposed ({hidden:.0%} '
            'hidden)'
        )
    if steps.program is None:
        yield 'the program of the step is missing (program.hlo.txt.gz): no scopes, source lines, FLOPs and bytes'


def phase_rows(steps: TracedSteps) -> list[list[str]]:
    """The phases as text: time, share, the limit, and the prediction of `cost/roofline.py` where there is one."""
    phases = steps.phases()
    best = {phase: sum(row.best or 0.0 for row in steps.operations if row.phase == phase) for phase in phases}
    if FORWARD_AND_BACKWARD in steps.planned:  # predicted together
        parts = [phase for phase in ('forward', 'recomputation', 'backward') if phase in phases]
        for times in (phases, best):
            total = sum(times[phase] for phase in parts)
            times |= {FORWARD_AND_BACKWARD: total}
        rest = [phase for phase in phases if phase not in (*parts, FORWARD_AND_BACKWARD)]
        order = [(FORWARD_AND_BACKWARD, ''), *((phase, '  ') for phase in parts), *((phase, '') for phase in rest)]
    else:
        order = [(phase, '') for phase in phases]
    rows = []
    for phase, indent in order:
        seconds, planned = phases[phase], steps.planned.get(phase)
        cells = [indent + phase, short_time(seconds), _share(seconds, steps.seconds)]
        cells.append(short_time(best[phase]) if best[phase] else '')
        cells += [short_time(planned), f'{seconds / planned:.2f}'] if planned else ['', '']
        rows.append(cells)
    return rows


def memory_lines(steps: TracedSteps) -> Iterator[str]:
    """What was in the memory of a device when the trace began."""
    owners, peak = steps.memory.get('by_owner'), steps.memory.get('memory_peak_bytes_after')
    if not isinstance(owners, dict) or not owners:
        return
    shown = [f'{name} {size(n)}' for name, n in owners.items() if isinstance(n, int) and n > 1000]
    if isinstance(peak, int):
        shown += [f'at the peak, others {size(max(0, peak - sum(owners.values())))} (activations, gradients, program)']
    yield f'memory of a device: {", ".join(shown)}' if shown else 'memory of a device: less than 1 kB'


def _between(gap: TracedGap) -> str:
    return f'after {gap.before or "the start"}, before {gap.after}'


def _aligned(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Rows in columns without those that are empty."""
    used = filled_columns(rows) or [0]
    kept = [[row[number] for number in used] for row in (titles, *rows)]
    left = [i for i, number in enumerate(used) if not number or titles[number] == 'phase']
    return text_table(kept, left, _DROPPED, '--out FILE.csv', width)


def as_csv(steps: TracedSteps, by: By) -> str:
    """All rows, with numbers in seconds, FLOPs and bytes."""
    return csv_records([_values(row, steps, by) for row in steps.rows(by)])


def as_json(steps: TracedSteps, by: By) -> str:
    """The whole report: the step, phases, all rows, gaps, memory and advice."""
    found = {
        'trace': str(steps.path),
        'first_step': steps.first,
        'steps': steps.steps,
        'devices': steps.devices,
        'reason': steps.reason,
        'seconds': steps.seconds,
        'busy': steps.busy,
        'phases': steps.phases(),
        'planned': dict(steps.planned),
        'communication': steps.communicating,
        'by': by,
        'rows': [_values(row, steps, by) for row in steps.rows(by)],
        'gaps': list(map(dataclasses.asdict, steps.gaps)),
        'memory': dict(steps.memory),
        'advice': advice(steps),
    }
    return json.dumps(found, indent=1) + '\n'


def _values(row: Row, steps: TracedSteps, by: By) -> dict[str, Any]:
    place = dict(zip(('scope', 'source'), steps.place(row), strict=True)) if by == 'operation' else {}
    found = {key: value for key, value in dataclasses.asdict(row).items() if key != 'rank'}
    found['share'] = row.seconds / steps.seconds if steps.seconds else None
    found['exposed'] = row.seconds if row.rank == COMMUNICATION else None
    found['roofline'] = row.roofline
    return {key: found[key] for key in _VALUES} | place


def as_html(steps: TracedSteps, by: By, title: str) -> str:
    """A page without scripts that needs no network; each table has the definitions of its columns below its title."""
    rows = [cells(row, steps.seconds) for row in steps.rows(by)]
    columns = TRACE_PHASE_COLUMNS, {by: TRACE_COLUMNS['name']} | dict(list(TRACE_COLUMNS.items())[1:])
    tables = [_table('Phases', columns[0], phase_rows(steps)), _table(f'By {by}', columns[1], rows)]
    return template('trace/table.html').render(
        title=title,
        summary=list(summary(steps)),
        tables=tables,
        gaps=[f'{short_time(gap.seconds)} {_between(gap)}' for gap in steps.gaps],
        memory=list(memory_lines(steps)),
        advice=advice(steps),
    )


def _table(title: str, columns: Mapping[str, Definition], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A table without the columns that are empty."""
    used = filled_columns(rows)
    kept = {name: each.meaning for number, (name, each) in enumerate(columns.items()) if number in used}
    return {'title': title, 'columns': kept, 'rows': [[row[number] for number in used] for row in rows]}
