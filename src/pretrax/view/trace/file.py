"""Reads traces of training steps: what ran on which device, on which stream, from when to when.

A trace is an `.xplane.pb` of the profiler, which needs JAX to read, or the `perfetto_trace.json.gz` beside it, which
needs none. The layout of a trace depends on the platform:

    CPU    one plane '/host:CPU' with a line per thread; events with the statistic `hlo_op` are operations of a program,
           on the device `device_ordinal`, of the execution `run_id`
    GPU    a plane per device, a line per stream; kernels have `hlo_op` and `hlo_module`; copies have neither
    TPU    a plane per device; the line 'XLA Ops' has the operations, 'Async XLA Ops' those that overlap others,
           'XLA Modules' the executions of programs
"""

import bisect
import dataclasses
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pretrax.errors import UserError, system_errors
from pretrax.storage import AnyPath
from pretrax.system.gzip_file import gunzip
from pretrax.system.json_file import parse_json

XPLANE, PERFETTO = '.xplane.pb', 'perfetto_trace.json.gz'
_DERIVED = ('XLA Ops', 'XLA Modules', 'Steps', 'Framework', 'TensorFlow', 'Source', 'XLA TraceMe', 'Launch Stats')
Stats = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """An operation, or a copy, that ran once. `start`, `end`: in nanoseconds."""

    device: str  # such as 'GPU 0'
    stream: str  # what runs one operation at a time: a stream, or a thread of a CPU
    name: str  # name of the instruction in the program; of the kernel or copy if it belongs to none
    module: str  # the program; '' if not known
    start: float
    end: float
    run: int | None = None  # the execution of the program; None if not known


def trace_files(profile: AnyPath) -> list[AnyPath]:
    """The traces below a directory, oldest first: of each, the `.xplane.pb`, else the Perfetto file.

    With several processes, each host writes its own files; pretrax traces the first process only.
    """
    with system_errors(f'cannot read {profile}'):
        files = [path for path in _files(profile) if path.name.endswith((XPLANE, PERFETTO))]
    by_folder: dict[AnyPath, AnyPath] = {}
    for path in sorted(files, key=str):
        if path.parent not in by_folder or path.name.endswith(XPLANE):
            by_folder[path.parent] = path
    return list(by_folder.values())


def _files(folder: AnyPath) -> Iterator[AnyPath]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def read_trace(path: AnyPath) -> list[Event]:
    """Reads the events of a trace.

    Raises:
        UserError: the file is missing, is damaged, or has no operations of a device.
    """
    with system_errors(f'cannot read {path}'):
        data = path.read_bytes()
    try:
        events = _events(_from_xplane(data) if path.name.endswith(XPLANE) else _from_perfetto(data))
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f'{path} is not a trace, or is damaged: {error}\ntrace the run again: log.profile=3') from error
    if not events:
        raise UserError(f'{path} has no operations of a device\ntrace the run again: log.profile=3')
    return events


class _Line(NamedTuple):
    plane: str
    name: str
    events: list[tuple[str, float, float, Stats]]  # name, start, end


def _from_xplane(data: bytes) -> list[_Line]:
    """Lines from a file of the profiler. Lists, because nothing in it may be touched after `ProfileData` is gone."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)  # of its C++ types; as an error it would abort the process
        from jax.profiler import ProfileData

        profile = ProfileData.from_serialized_xspace(data)
        lines = [(plane.name or '', line) for plane in profile.planes for line in plane.lines]
        return [
            _Line(
                plane,
                line.name or '',
                [(e.name, e.start_ns, e.start_ns + e.duration_ns, dict(e.stats)) for e in line.events],
            )
            for plane, line in lines
        ]


def _from_perfetto(data: bytes) -> Iterator[_Line]:
    """Lines from a file in Chrome's trace format, whose times are in microseconds."""
    written = parse_json(gunzip(data))['traceEvents']
    planes, names = {}, {}
    lines: dict[tuple[int, int], list[tuple[str, float, float, Stats]]] = {}
    for event in written:
        kind, at = event.get('ph'), (event.get('pid'), event.get('tid'))
        if kind == 'M' and event['name'] == 'process_name':
            planes[at[0]] = event['args']['name']
        elif kind == 'M' and event['name'] == 'thread_name':
            names[at] = event['args']['name']
        elif kind == 'X':
            start, duration = 1e3 * event['ts'], 1e3 * event.get('dur', 0.0)
            lines.setdefault(at, []).append((event['name'], start, start + duration, event.get('args', {})))
    for at, events in lines.items():
        yield _Line(planes.get(at[0], ''), f'{names.get(at, "")}', events)


def _events(lines: Iterable[_Line]) -> list[Event]:
    events: list[Event] = []
    of_tpus: list[tuple[str, _Line]] = []
    executions: dict[str, list[tuple[float, str]]] = {}  # of a device: start and program
    for number, line in enumerate(lines):
        device = re.fullmatch(r'/device:(TPU|GPU):(\d+)', line.plane)
        name = f'{device[1]} {device[2]}' if device else ''
        if device is None:
            events += _thread_spans(line, f'{line.name} {number}') if line.plane == '/host:CPU' else ()
        elif device[1] == 'GPU':
            events += () if line.name.startswith(_DERIVED) else _stream_spans(line, name)
        elif line.name == 'XLA Modules':
            executions[name] = sorted((start, _program(text)) for text, start, _, _ in line.events)
        elif line.name in ('XLA Ops', 'Async XLA Ops'):
            of_tpus.append((name, line))
    for name, line in of_tpus:
        events += _tpu_spans(line, name, executions.get(name, []))
    return events


def _thread_spans(line: _Line, stream: str) -> Iterator[Event]:
    for _, start, end, stats in line.events:
        if 'hlo_op' in stats and 'device_ordinal' in stats:
            device, run = f'CPU {stats["device_ordinal"]}', int(stats['run_id']) if 'run_id' in stats else None
            yield Event(device, stream, str(stats['hlo_op']), str(stats.get('hlo_module', '')), start, end=end, run=run)


def _stream_spans(line: _Line, device: str) -> Iterator[Event]:
    for name, start, end, stats in line.events:
        module = _program(str(stats.get('hlo_module', '')))
        yield Event(device, line.name, str(stats.get('hlo_op', '')) or name, module, start, end)


def _tpu_spans(line: _Line, device: str, executions: list[tuple[float, str]]) -> Iterator[Event]:
    starts = [start for start, _ in executions]
    for name, start, end, _ in line.events:
        number = bisect.bisect_right(starts, start) - 1
        module, run = (executions[number][1], number) if number >= 0 else ('', None)
        instruction = name.split(' = ')[0].strip().removeprefix('%') or name  # of `%fusion.3 = bf16[8] fusion(...)`
        yield Event(device=device, stream=line.name, name=instruction, module=module, start=start, end=end, run=run)


def _program(name: str) -> str:
    """`jit_step(1234)` -> `jit_step`."""
    return re.sub(r'\(\d+\)$', '', name)
