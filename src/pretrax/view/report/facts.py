"""The tables and figures of a report that are not curves, as text."""

import datetime
import math
import pathlib
import shlex
from typing import Any

import numpy as np

from pretrax.amounts import duration, prefixed, size
from pretrax.errors import UserError, first_line
from pretrax.observe.attempts import Attempt
from pretrax.storage import AnyPath
from pretrax.view.definitions import DEFINITIONS, FIGURES, Definition
from pretrax.view.record.causes import shares
from pretrax.view.record.run_record import RunRecord
from pretrax.view.trace.file import trace_files
from pretrax.view.trace.run_trace import open_trace

_LARGEST_TRACE = 32 << 20  # bytes; `pretrax trace` reads larger ones


def tiles(record: RunRecord) -> list[tuple[Definition, str]]:
    """What each figure is, and its value as text: those that are read first at the beginning."""
    metrics, done = record.metrics, record.last_step
    found = {}
    for key in ('loss', 'val_loss', 'bits_per_byte'):
        value = metrics.last(key)
        if value is not None:
            found[key] = DEFINITIONS[key], f'{value:.4f}'
    found['progress'] = FIGURES['progress'], f'{done:,} of {record.steps:,}' if record.steps else f'{done:,}'
    for name, definition in (('tokens', DEFINITIONS['tokens']), ('flops', FIGURES['flops'])):
        amount = record.trained(np.array(done), name) if done else None
        if amount is not None:
            found[name] = definition, prefixed(float(amount))
    speed = median(record, 'tokens_per_second')
    if speed:
        found['speed'] = DEFINITIONS['tokens_per_second']._replace(name='tokens/s, median'), prefixed(speed)
    if (mfu := median(record, 'mfu')) is not None:
        found['mfu'] = DEFINITIONS['mfu']._replace(name='MFU, median'), f'{mfu:.1%}'
    if (goodput := metrics.last('goodput')) is not None:
        found['goodput'] = DEFINITIONS['goodput'], f'{goodput:.1%}'
    if seconds := sum(record.seconds.values()):
        found['duration'] = FIGURES['duration'], duration(seconds)
    if record.attempts:
        found['restarts'] = FIGURES['restarts'], str(record.restarts)
    if record.rollbacks:
        found['rollbacks'] = FIGURES['rollbacks'], str(len(record.rollbacks))
    if 'skipped_steps' in metrics:
        found['skipped_steps'] = DEFINITIONS['skipped_steps'], f'{record.skipped_steps:,}'
    if count := record.steps_without_targets:
        found['steps_without_targets'] = DEFINITIONS['steps_without_targets'], f'{count:,} of {done:,}'
    first = ['loss', 'val_loss', 'progress', 'speed', 'duration']
    return [found[name] for name in dict.fromkeys([*first, *found]) if name in found]


def one_line(record: RunRecord) -> str:
    """What ran where, and when it wrote its newest event."""
    parameters, devices = record.environment.get('parameters'), dict(hardware_rows(record)).get('devices')
    newest = moment(max([event['time'] for event in record.events], default=None))
    size_of_model = f'{prefixed(float(parameters))} parameters' if parameters and _is_number(parameters) else ''
    return ' · '.join(filter(None, [size_of_model, devices, f'newest event {newest} UTC' if newest else '']))


def attempt_rows(record: RunRecord) -> list[list[str]]:
    """Number, start, duration, start-up, steps, outcome and reason of each attempt."""
    rows = []
    for number, one in enumerate(record.attempts, 1):
        is_last = number == len(record.attempts)
        startup = duration(one.stepped - one.start) if one.stepped and one.start else ''
        outcome = record.state.name if is_last and one.outcome == 'running' else one.outcome
        times = moment(one.start), _until(record, one, is_last), startup
        rows.append([str(number), *times, _steps(record, one, is_last), outcome, one.why])
    return rows


def checkpoint_rows(record: RunRecord) -> list[list[str]]:
    """Step, size, files, validation loss, blocked and whole time of the save, its end, and a warning, by checkpoint."""
    saves = {pause['step']: pause for pause in record.pauses if pause['work'] == 'save'}
    rows = []
    for one in record.checkpoints:
        save = saves.get(one.step)
        after = one.written - save['time'] if save and one.written else -1
        val_loss = '' if one.val_loss is None else f'{one.val_loss:.4f}'
        times = duration(save['seconds']) if save else '', duration(after) if after >= 0 else '', moment(one.written)
        warning = 'not all values are finite' if one.finite is False else ''
        rows.append([f'{one.step:,}', size(one.size), f'{one.files:,}', val_loss, *times, warning])
    return rows


def time_rows(record: RunRecord) -> list[list[str]]:
    """Cause, meaning, seconds and share of all time, the longest first."""
    found = shares(record.seconds)
    return [[definition.name, duration(n), share, definition.meaning] for definition, n, share in found]


def hardware_rows(record: RunRecord) -> list[tuple[str, str]]:
    """What the run ran on, as label and text."""
    known = record.environment
    numbers = {key: value for key, value in known.items() if _is_number(value)}
    devices = f'{known["devices"]} x {known["device_kind"]}' if {'devices', 'device_kind'} <= known.keys() else ''
    peak = f'{prefixed(numbers["peak_flops"], "FLOP/s")} per device' if 'peak_flops' in numbers else ''
    rows = [
        ('devices', devices),
        ('processes', known.get('processes')),
        ('host', known.get('host')),
        ('processor', f'{known["processor"]}, {known.get("cores", "?")} cores' if known.get('processor') else ''),
        ('memory of the machine', size(numbers['host_memory']) if 'host_memory' in numbers else ''),
        ('system', known.get('system')),
        ('peak', peak),
        ('compute', known.get('compute')),
        ('parameters', f'{numbers["parameters"]:,}' if 'parameters' in numbers else ''),
        ('FLOPs per token', prefixed(record.flops_per_token) if record.flops_per_token else ''),
    ]
    return [(name, str(value)) for name, value in rows if value not in (None, '')]


def repeat_lines(record: RunRecord) -> list[str]:
    """Commands that repeat the run in the same environment."""
    lines, git, versions = [], record.section('git'), record.section('versions')
    command = record.environment.get('command')
    if isinstance(git.get('commit'), str):
        changed = '   # files differed from this commit' if git.get('changed') else ''
        lines.append(f'git checkout {git["commit"]}{changed}')
    if versions:
        pinned = ', '.join(f'{name}=={versions[name]}' for name in ('jax', 'jaxlib') if name in versions)
        lines.append(f'uv sync --python {versions.get("python", "3")}   # installs the versions of uv.lock: {pinned}')
    lines += [f'export {name}={shlex.quote(str(value))}' for name, value in record.section('flags').items()]
    if isinstance(command, list) and command:
        lines.append(f'uv run {shlex.join(map(str, command))}')
    lines.append(
        f'uv run pretrax train {shlex.quote(f"{record.path}/config.yaml")} name=again run_dir=runs/again   # every '
        'value as it was'
    )
    return lines


def mesh_data(record: RunRecord) -> dict[str, Any] | None:
    """Sizes of the axes that have more than one place, and (device, process) in their order."""
    mesh, devices = record.environment.get('mesh'), record.environment.get('mesh_devices')
    if not isinstance(mesh, dict) or not all(type(size) is int and size > 0 for size in mesh.values()):
        return None
    axes = {str(name): size for name, size in mesh.items() if size > 1}
    total = math.prod(axes.values())
    is_listed = (
        isinstance(devices, list)
        and len(devices) == total
        and all(isinstance(one, list) and [type(number) for number in one] == [int, int] for one in devices)
    )
    return {
        'axes': axes,
        'all': mesh,
        'total': total,
        'devices': devices if is_listed else [[n, 0] for n in range(min(total, 4096))],
    }


_MEMORY = ('compiled', 'peak', 'before', 'compiling', 'limit')


def memory_rows(memory: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures of `memory_data` as text."""
    planned = {name: n for name, n in memory['planned'].items() if n}
    parts = ', '.join(f'{name} {size(n)}' for name, n in sorted(planned.items(), key=lambda part: -part[1]))
    sizes = {name: size(memory[name]) for name in _MEMORY if name in memory}
    if planned:
        sizes = {'planned': f'{size(sum(planned.values()))} ({parts})'} | sizes
    definitions = {name: FIGURES[f'memory_{name}'] for name in sizes}
    return [(definitions[name].name, f'{text}: {definitions[name].meaning}') for name, text in sizes.items()]


def memory_data(record: RunRecord) -> dict[str, Any] | None:
    """Planned parts, compiled, measured and available bytes."""
    memory = record.section('memory')
    planned = memory.get('planned')
    parts = {name: n for name, n in planned.items() if _is_number(n) and n} if isinstance(planned, dict) else {}
    found = {name: memory[name] for name in _MEMORY if _is_number(memory.get(name))}
    return {'planned': parts, 'phase': memory.get('phase'), **found} if parts or found else None


def traced_phases(directory: AnyPath, warnings: list[str]) -> dict[str, float]:
    """Seconds per step and device of the newest trace by phase; {}: there is none, or it is too large to read here."""
    try:
        files = trace_files(directory / 'profile')
        if not files or (isinstance(files[-1], pathlib.Path) and files[-1].stat().st_size > _LARGEST_TRACE):
            return {}
        return open_trace(files[-1]).phases()
    except (UserError, OSError, ValueError, KeyError, TypeError) as error:
        warnings.append(f'the newest trace cannot be shown: {first_line(error)}')
        return {}


def time_data(record: RunRecord, traced: dict[str, float]) -> dict[str, Any] | None:
    """Seconds of a step: predicted and traced by phases, measured, and at the limit of the devices."""
    known, speed = record.environment, median(record, 'tokens_per_second')
    measured = record.batch_tokens / speed if record.batch_tokens and speed else None
    figures: list[Any] = [known.get('peak_flops'), known.get('devices')]
    limit, peak = None, math.prod(figures) if all(map(_is_number, figures)) else 0
    if record.flops_per_token and record.batch_tokens and peak > 0:
        limit = record.flops_per_token * record.batch_tokens / peak
        limit = None if measured is not None and measured < limit else limit  # the peak is too low
    listed = record.section('predicted').get('phases')
    phases = [
        phase
        for phase in (listed if isinstance(listed, list) else [])
        if isinstance(phase, dict) and _is_number(phase.get('exposed')) and isinstance(phase.get('name'), str)
    ]
    if measured is None and not phases and not traced:
        return None
    return {'measured': measured, 'limit': limit, 'phases': phases, 'traced': traced}


def median(record: RunRecord, key: str) -> float | None:
    """The median of the finite numbers of a key."""
    column = record.metrics.get(key)
    finite = column.values[np.isfinite(column.values)] if column is not None else np.array([])
    return float(np.median(finite)) if len(finite) else None


def moment(time: float | None) -> str:
    """Seconds since 1970 -> '2026-11-22 19:40:02', UTC; '' if it is not known."""
    try:
        return '' if time is None else datetime.datetime.fromtimestamp(time, datetime.UTC).strftime('%Y-%m-%d %H:%M:%S')
    except (ValueError, OverflowError, OSError):
        return ''


def _until(record: RunRecord, attempt: Attempt, is_last: bool) -> str:
    known = record.metrics.known_times
    newest = float(known[-1]) if is_last and len(known) else None
    end = attempt.ended if attempt.ended is not None else newest
    if attempt.start is None or end is None or end < attempt.start:
        return ''
    return duration(end - attempt.start)


def _steps(record: RunRecord, attempt: Attempt, is_last: bool) -> str:
    """The steps of an attempt, as far as they are known."""
    if attempt.first_step is None:
        return ''
    last = None if attempt.outcome == 'lost' else attempt.last_step
    if is_last:
        last = max(record.last_step, last or 0)
    return f'{attempt.first_step:,} to {last:,}' if last is not None else f'from {attempt.first_step:,}'


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # so neither NaN nor infinity
