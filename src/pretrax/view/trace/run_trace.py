"""Opens the trace of a run, and joins it to the program: where the time of a step and device went."""

import itertools
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pretrax.cost.devices import lookup
from pretrax.errors import UserError
from pretrax.hlo.parse import KINDS
from pretrax.hlo.program import Operation, Program
from pretrax.hlo.work import CONTROL
from pretrax.storage import AnyPath
from pretrax.system.json_file import read_entries
from pretrax.view.program.file import TEXT, read_program
from pretrax.view.trace.device_time import (
    COMMUNICATION,
    COMPUTATION,
    CONTAINER,
    COPY,
    DeviceTime,
    Interval,
    device_time,
)
from pretrax.view.trace.file import Event, read_trace, trace_files
from pretrax.view.trace.steps import Limits, Row, TracedGap, TracedSteps

STEPS_FILE = 'steps.json'
_CONTAINERS = CONTROL | {'async-start', 'async-done'}
_COPIES = ('memcpy', 'memset', 'copy-start', 'copy-done')


def find_traces(run: AnyPath) -> list[AnyPath]:
    """The traces of a run, oldest first.

    Args:
        run: directory of a run, its `profile/`, or one trace.

    Raises:
        UserError: it has none.
    """
    if run.is_file():
        return [run]
    if not run.exists():
        raise UserError(f'{run} does not exist\nexpected the directory of a run, such as runs/quickstart')
    in_profile = 'profile' in str(_whole(run)).split('/')
    files = trace_files(run if in_profile else run / 'profile')
    if not files:
        raise UserError(
            f'{run} has no trace\ntrace some steps: pretrax train CONFIG log.profile=3   (or log.profile_on_slow=3.0)'
        )
    return files


def open_newest(run: AnyPath, step: int | None = None) -> TracedSteps:
    """The newest trace of a run; with a step, the newest one that has it.

    Raises:
        UserError: the run has no trace that can be read, or none with this step.
    """
    files = find_traces(run)
    if step is None:
        return open_trace(files[-1])
    numbers = [(read_entries(path.parent / STEPS_FILE), path) for path in files]
    having = [path for about, path in numbers if about.get('first_step', 0) <= step <= about.get('last_step', -1)]
    if not having and all(about for about, _ in numbers):
        steps = ', '.join(f'{about.get("first_step")} to {about.get("last_step")}' for about, _ in numbers)
        raise UserError(f'no trace of {run} has step {step}\nits traces have the steps {steps}')
    return open_trace(having[-1] if having else files[-1], step)


def open_trace(path: AnyPath, step: int | None = None) -> TracedSteps:
    """Reads a trace, and joins it to the program beside it or in the run.

    Args:
        path: one of `find_traces`.
        step: only this step; None: all.

    Raises:
        UserError: the trace is missing or damaged, or does not have the step.
    """
    about = read_entries(path.parent / STEPS_FILE)
    environment = next((found for folder in _folders(path) if (found := read_entries(folder / 'environment.json'))), {})
    texts = [file for folder in _folders(path) if (file := folder / TEXT).exists()]
    program = read_program(texts[0]) if texts else None
    return _join(path, read_trace(path), program, about, environment, step)


def _folders(path: AnyPath) -> Iterable[AnyPath]:
    """Where the program may be: beside the trace, in a folder above it up to the run, or in `program/` there."""
    folder = _whole(path).parent
    for _ in range(5):
        yield from (folder, folder / 'program')
        folder = folder.parent


def _whole(path: AnyPath) -> AnyPath:
    """The path from the root on, so that it has the folders above a path such as '.'."""
    return path.absolute() if isinstance(path, pathlib.Path) else path


def _limits(about: Mapping[str, Any], environment: Mapping[str, Any]) -> Limits:
    kind = about.get('device_kind') or environment.get('device_kind')
    device = lookup(kind) if isinstance(kind, str) else None
    peak = environment.get('peak_flops')
    if not isinstance(peak, int | float) and device is not None:
        peak = device.peak('f32' if environment.get('compute') == 'f32' else 'bf16')
    known = peak if isinstance(peak, int | float) else None
    name, compute = device.name if device else str(kind or 'this device'), str(environment.get('compute', ''))
    return Limits(name, compute, known, device.bandwidth if device else None)


def _predicted(environment: Mapping[str, Any]) -> dict[str, float]:
    found = environment.get('predicted')
    try:
        return {str(phase['name']): float(phase['exposed']) for phase in found['phases']} if found else {}
    except (TypeError, KeyError, ValueError):
        return {}


def _join(
    path: AnyPath,
    events: Sequence[Event],
    program: Program | None,
    about: Mapping[str, Any],
    environment: Mapping[str, Any],
    step: int | None,
) -> TracedSteps:
    main = _main_program(events, program)
    names = sorted({(event.module if event.module != main else '', event.name) for event in events})
    numbers = {name: number for number, name in enumerate(names)}
    facts = [program.operations.get(name) if program and not module else None for module, name in names]
    by_device: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_device[event.device].append(event)
    first = about.get('first_step') if isinstance(about.get('first_step'), int) else None
    parts: list[DeviceTime] = []
    betweens, lengths, count = 0.0, 0.0, 0
    for of_device in by_device.values():
        edges = _edges(of_device, main)
        if edges is None:
            continue
        chosen = _chosen(edges, step, first, path)
        intervals = []
        for event in of_device:
            number = numbers[event.module if event.module != main else '', event.name]
            rank = _rank(event.name, facts[number])
            intervals.append(Interval(number, event.stream, event.start, event.end, rank))
        for start, end in chosen:
            found = device_time(intervals, start, end)
            parts.append(found)
            lengths += end - start
            betweens += sum(gap.end - gap.start for gap in found.gaps if gap.end == end)
        count = len(chosen)
    if not parts:
        raise UserError(f'{path} has no operations of a training step\ntrace the run again: log.profile=3')
    share = 1e-9 / len(parts)  # to seconds per step and device
    limits = _limits(about, environment)
    return TracedSteps(
        path=path,
        first=step if step is not None else first,
        steps=count,
        devices=len(by_device),
        reason=str(about.get('reason', '')),
        seconds=lengths * share,
        busy=sum(part.busy for part in parts) * share,
        between=betweens * share,
        communicating=sum(part.communicating for part in parts) * share,
        operations=tuple(_rows(parts, names, facts, limits)),
        gaps=tuple(_longest_gaps(parts[0], names)),
        memory=about['memory'] if isinstance(about.get('memory'), dict) else {},
        limits=limits,
        predicted=_predicted(environment),
        program=program,
    )


def _main_program(events: Sequence[Event], program: Program | None) -> str:
    """The program of the step: that of the text, otherwise the one that ran longest."""
    times: dict[str, float] = defaultdict(float)
    for event in events:
        times[event.module] += event.end - event.start
    if program is not None and times.get(program.name):
        return program.name
    named = {module: time for module, time in times.items() if module}
    return max(named or times, key=lambda module: times[module])


def _edges(events: Sequence[Event], main: str) -> list[tuple[float, float]] | None:
    """Start and end of each step on a device: a step ends where the next starts, the last with its last operation.

    Each execution of the program is a step. Traces of GPUs do not say which execution an operation belongs to. There, a
    step begins with an operation that runs once per step.
    """
    own = [event for event in events if event.module == main]
    if not own:
        return None
    starts: dict[Any, float] = {}
    if all(event.run is not None for event in own):
        for event in own:
            starts[event.run] = min(event.start, starts.get(event.run, event.start))
    else:
        runs = Counter(event.name for event in own)
        steps = min(runs.values())
        mark = min((event for event in own if runs[event.name] == steps), key=lambda event: event.start).name
        starts = {number: event.start for number, event in enumerate(own) if event.name == mark}
        starts[min(starts, key=lambda number: starts[number])] = min(event.start for event in own)
    edges = [*sorted(starts.values()), max(event.end for event in own)]
    return list(itertools.pairwise(edges))


def _chosen(
    edges: list[tuple[float, float]], step: int | None, first: int | None, path: AnyPath
) -> list[tuple[float, float]]:
    if step is None:
        return edges
    numbers = range(first or 1, (first or 1) + len(edges))
    if step not in numbers:
        raise UserError(f'{path} does not have step {step}\nexpected {numbers[0]} to {numbers[-1]}')
    return [edges[numbers.index(step)]]


def _rank(name: str, known: Operation | None) -> int:
    base = re.sub(r'[.\d]+$', '', known.operation if known is not None else name).lower()
    if known is not None and known.collective is not None:
        return COMMUNICATION
    if base.removesuffix('-start').removesuffix('-done') in (*KINDS, 'send', 'recv', 'collective-broadcast'):
        return COMMUNICATION
    if 'nccl' in name.lower() or 'async-collective' in name or 'async_collective' in name:
        return COMMUNICATION
    if base in _CONTAINERS:
        return CONTAINER
    return COPY if base.startswith(_COPIES) else COMPUTATION


def _rows(
    parts: Sequence[DeviceTime],
    names: Sequence[tuple[str, str]],
    facts: Sequence[Operation | None],
    limits: Limits,
) -> list[Row]:
    rows = []
    for number in {number for part in parts for number in part.operations}:
        times = [part.operations[number] for part in parts if number in part.operations]
        (module, name), known, n = names[number], facts[number], len(parts)
        rank = _rank(name, known)
        runs, elapsed = sum(time.runs for time in times) / n, sum(time.elapsed for time in times) / n * 1e-9
        flops = None if known is None else known.flops * runs
        moved = None if known is None else known.bytes * runs
        best = limits.best(known.flops * runs, known.bytes * runs) if known and rank == COMPUTATION else None
        seconds = sum(time.counted for time in times) / n * 1e-9
        shown = name if not module or rank == COPY else f'{name} of {module}'
        rows.append(
            Row(shown, _phase(rank, known, module), runs, seconds, elapsed, flops, bytes=moved, best=best, rank=rank)
        )
    return sorted(rows, key=lambda row: (-row.seconds, -row.elapsed, row.name))


def _phase(rank: int, known: Operation | None, module: str) -> str:
    if rank == COMMUNICATION:
        return 'communication'
    if rank == COPY:
        return 'copies'
    if module:
        return 'other programs'
    if rank == CONTAINER:
        return 'loops and calls'
    if known is None:
        return 'computation'
    return {'update': 'optimizer', 'input': 'computation'}.get(known.phase, known.phase)


def _longest_gaps(part: DeviceTime, names: Sequence[tuple[str, str]], count: int = 5) -> Iterable[TracedGap]:
    for gap in sorted(part.gaps, key=lambda gap: gap.start - gap.end)[:count]:
        if gap.after >= 0:
            before = names[gap.before][1] if gap.before >= 0 else ''
            yield TracedGap((gap.end - gap.start) * 1e-9, before, names[gap.after][1])
