"""Reads the exposed communication of real steps from compiled programs, to compare with `pretrax plan`.

    uv sync --inexact --extra tpu --extra cuda
    python benchmarks/schedule.py [part of a name] [--again] [--predict]

Compiles steps of a few layers with the compilers of absent devices (10 to 60 s each), reads their schedule with
`pretrax.hlo.schedule`, and writes results/schedule.json after each row. Finished rows are skipped. It prints the
table of docs/scaling.md: communication, exposed communication and the whole step, as compiled and as `pretrax plan`
predicts them. The rows in `LEFT_OUT` were not used to set the constants of the prediction. `--predict` compiles
nothing. Seconds come from peaks and bandwidths; nothing is measured. `tests/cost/test_exposed.py` compares the two.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterable
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from pretrax.config import from_values
from pretrax.cost.links import places_of
from pretrax.cost.memory import memory_of
from pretrax.cost.roofline import Prediction
from pretrax.cost.topology import Topology, parse_topology
from pretrax.hlo.compiler_options import TABLE
from pretrax.hlo.costs import ASSUMED
from pretrax.hlo.schedule import Schedule, read_schedule
from pretrax.model.option_names import nest
from pretrax.plan.plan import Planner
from pretrax.plan.step import compile_ahead
from pretrax.system.software import versions

RESULTS = pathlib.Path(__file__).parent / 'results' / 'schedule.json'


def _decoder(n_layers: int, d_model: int, n_heads: int, d_ff: int) -> dict[str, Any]:
    """A decoder of configs/scale with fewer layers."""
    sizes = {'n_layers': n_layers, 'd_model': d_model, 'n_heads': n_heads, 'n_kv_heads': n_heads, 'd_head': 128}
    return {'family': 'llama', **sizes, 'd_ff': d_ff, 'layers': 'scan'}


EIGHT = {'preset': 'llama3-8b', 'n_layers': 4, 'layers': 'scan'}
SIXTEEN, THIRTY_TWO = _decoder(4, 4096, 64, 28672), _decoder(4, 8192, 64, 28672)
LARGE = _decoder(4, 8192, 128, 57344)
MOE = {
    'family': 'mixtral', 'n_layers': 4, 'd_model': 2048, 'n_heads': 16, 'n_kv_heads': 8, 'd_ff': 7168, 'layers': 'scan',
}  # fmt: skip
ROW = tuple[str, int, dict[str, Any]]


def row(topology: str, model: dict[str, Any], rows: int, length: int, mesh: dict[str, int], **more: Any) -> ROW:
    """A configuration and its hardware.

    `rows`: sequences; `defaults`: without compiler options; `more`: micro, slices, vocab_size and options of the model.
    """
    micro, slices = more.pop('micro', None), more.pop('slices', 1)
    removed = {option.name: None for option in TABLE} if more.pop('defaults', False) else {}
    vocab = more.pop('vocab_size', 128256 if model is EIGHT else 32000)
    return topology, slices, {
        'name': 'schedule', 'steps': 10, 'model': nest(model | {'save': 'none'} | more),
        'data': {'name': 'synthetic', 'vocab_size': vocab},
        'batch': {'tokens': rows * length, 'sequence_length': length, 'micro': micro},
        'optimizer': {'name': 'adamw', 'learning_rate': 3e-4}, 'mesh': mesh, 'compiler': {'options': removed},
    }  # fmt: skip


ROWS: dict[str, ROW] = {
    'v5p, 8B, d': row('v5p:8x8x4', EIGHT, 256, 8192, {'d': 256}),
    'v5p, 8B, d, XLA defaults': row('v5p:8x8x4', EIGHT, 256, 8192, {'d': 256}, defaults=True),
    'h100, 8B, d': row('h100x8', EIGHT, 16, 4096, {'d': 8}),
    'v5e, 16B, d': row('v5e:16x16', SIXTEEN, 1024, 2048, {'d': 256}),
    'v5p, 32B, d t, dots saved': row('v5p:4x4x4', THIRTY_TWO, 384, 2048, {'d': 16, 't': 4}, save='dots'),
    'v5e, 128B, d t': row('v5e:16x16', LARGE, 256, 2048, {'d': 16, 't': 16}),
    'v5e, 16B, r d': row('v5e:16x16', SIXTEEN, 2048, 2048, {'r': 2, 'd': 256}, slices=2),
    'v5e, 32B, d': row('v5e:16x16', THIRTY_TWO, 1024, 2048, {'d': 256}),
    'v5e, 8B, d t': row('v5e:8x8', EIGHT, 64, 4096, {'d': 16, 't': 4}),
    'v5p, 8B, d, dots saved': row('v5p:4x4x4', EIGHT, 64, 8192, {'d': 64}, save='dots'),
    'v5p, 8B, d c': row('v5p:4x4x4', EIGHT, 16, 32768, {'d': 16, 'c': 4}),
    'v5p, 8B, d p': row('v5p:4x4x4', EIGHT, 128, 8192, {'d': 16, 'p': 4}, micro=1, n_layers=8),
    'v5p, mixture, d e': row('v5p:4x4x4', MOE, 256, 4096, {'d': 16, 'e': 4}),
    'v6e, 8B, d, all saved': row('v6e:8x8', EIGHT, 64, 4096, {'d': 64}, save='all'),
    'v6e, 8B, d t': row('v6e:8x8', EIGHT, 64, 8192, {'d': 16, 't': 4}),
    'v4, 8B, d': row('v4:4x4x4', EIGHT, 64, 4096, {'d': 64}),
    'v4, 8B, r d': row('v4:4x4x4', EIGHT, 128, 4096, {'r': 2, 'd': 64}, slices=2),
    'h100, 8B, d, all saved': row('h100x8', EIGHT, 16, 4096, {'d': 8}, save='all'),
    'h100, 8B, d t': row('h100x8', EIGHT, 16, 4096, {'d': 4, 't': 2}),
    'h100, 8B, d c': row('h100x8', EIGHT, 8, 16384, {'d': 4, 'c': 2}),
    'h100, 8B, d p': row('h100x8', EIGHT, 32, 4096, {'d': 4, 'p': 2}, micro=1),
    'h100, mixture, d e': row('h100x8', MOE, 32, 4096, {'d': 2, 'e': 4}),
    'h200, 8B, d, dots saved': row('h200x8', EIGHT, 32, 4096, {'d': 8}, save='dots'),
    'h200, 8B, d t, all saved': row('h200x8', EIGHT, 32, 4096, {'d': 2, 't': 4}, save='all'),
    'h100, 8B, r d': row('h100x8', EIGHT, 64, 4096, {'r': 4, 'd': 8}, slices=4),
    'a3-high, 8B, r d': row('a3-high', EIGHT, 32, 4096, {'r': 2, 'd': 8}, slices=2),
}  # fmt: skip

# The constants of `cost/exposed.py` were not set from these: they show how well its rules describe other steps.
LEFT_OUT = frozenset({'v5e, 16B, r d', 'v5e, 32B, d', 'v4, 8B, r d', 'v6e, 8B, d t', 'v5p, mixture, d e'})


def hardware_of(name: str) -> Topology:
    """The hardware of a row. It reaches what is assumed of the program, so that only schedules are compared."""
    topology, slices, _ = ROWS[name]
    hardware = parse_topology(topology, slices)
    return dataclasses.replace(hardware, reach=ASSUMED[hardware.platform])


def compiled(name: str, programs: pathlib.Path | None) -> dict[str, Any]:
    """The schedule of a row: seconds per device and step."""
    began, hardware = time.perf_counter(), hardware_of(name)
    planned = compile_ahead(from_values(ROWS[name][2]), hardware, lambda text: None)
    if planned.compiled is None:
        raise SystemExit(f'{name}: does not fit {hardware}: {planned.needed:,} bytes')
    text, mesh = planned.compiled.as_text(), planned.run.mesh
    if programs is not None:
        (programs / f'{name.replace(", ", "_").replace(" ", "-")}.txt').write_text(text)
    schedule = read_schedule(text, dict(mesh.shape), hardware, places_of(mesh.devices.flat))
    print(f'{name}: {schedule.exposed * 1e3:.1f} ms exposed, after {time.perf_counter() - began:.0f} s', flush=True)
    return facts(schedule, dict(mesh.shape)) | {
        'memory': memory_of(planned.compiled),
        'options': planned.run.compiler_options.values,
    }


def facts(schedule: Schedule, mesh: dict[str, int]) -> dict[str, Any]:
    """Seconds of a step: of its other operations, of communication, and of that exposed, also by axis."""
    over = {axis: schedule.over(axis) for axis in mesh if mesh[axis] > 1}
    return {
        'compute': schedule.compute,
        'communication': schedule.seconds,
        'exposed': schedule.exposed,
        'axes': {
            axis: {'bytes': of.bytes, 'seconds': of.seconds, 'exposed': of.exposed}
            for axis, of in over.items()
            if of.times
        },
    }


def predicted(name: str) -> Prediction:
    """The prediction of `pretrax plan` for a row."""
    return Planner(from_values(ROWS[name][2]), hardware_of(name), lambda text: None).as_configured().prediction


def errors(name: str, read: dict[str, Any]) -> tuple[float, float]:
    """Relative errors of the predicted exposed communication and of the predicted step of a row."""
    plan = predicted(name)
    return plan.exposed / read['exposed'] - 1, plan.seconds / (read['compute'] + read['exposed']) - 1


def mean_errors(off: Iterable[tuple[float, float]]) -> list[float]:
    """Means of the absolute errors, of exposed communication and of steps."""
    return [sum(map(abs, each)) / len(each) for each in zip(*off, strict=True)]


def table(rows: dict[str, Any]) -> list[str]:
    """Every compiled row with the prediction of `pretrax plan`, in milliseconds."""
    lines = [
        '| hardware | step | communication | predicted | exposed | predicted | error | step | predicted | error |',
        '|' + '---|' * 10,
    ]
    off = {name: errors(name, rows[name]) for name in ROWS if name in rows}
    for name, (exposed, step) in off.items():
        topology, slices, values = ROWS[name]
        read, plan = rows[name], predicted(name)
        mesh = ' '.join(f'{axis}={n}' for axis, n in values['mesh'].items())
        what = name.partition(', ')[2] + ' (left out)' * (name in LEFT_OUT)
        lines.append(
            f'| {slices} x {topology} | {what}: `{mesh}` | {1e3 * read["communication"]:.3g} | '
            f'{1e3 * plan.communication:.3g} | {1e3 * read["exposed"]:.3g} | {1e3 * plan.exposed:.3g} | '
            f'{exposed:+.0%} | '
            f'{1e3 * (read["compute"] + read["exposed"]):.4g} | {1e3 * plan.seconds:.4g} | {step:+.0%} |'
        )
    for what, names in (('all', off.keys()), ('left out', off.keys() & LEFT_OUT)):
        exposed, step = mean_errors(off[name] for name in names)
        lines += ['', f'mean absolute error of {len(names)} rows ({what}): exposed {exposed:.0%}, step {step:.0%}']
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description='Read the exposed communication of compiled steps')
    parser.add_argument('part', nargs='?', default='', help='compile only rows whose names contain this')
    parser.add_argument('--again', action='store_true', help='compile finished rows again')
    parser.add_argument('--predict', action='store_true', help='compile nothing')
    parser.add_argument('--out', type=pathlib.Path, default=RESULTS)
    parser.add_argument('--programs', type=pathlib.Path, help='also write the optimized programs to this directory')
    asked = parser.parse_args()
    results: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {'rows': {}}
    for name in ROWS:
        if asked.predict or asked.part not in name or (name in results['rows'] and not asked.again):
            continue
        results['rows'][name] = compiled(name, asked.programs)
        results |= {'command': 'python benchmarks/schedule.py', 'versions': versions()}
        asked.out.write_text(json.dumps(results, indent=1) + '\n')
    print('\n'.join(table(results['rows'])))
    return 0


if __name__ == '__main__':
    sys.exit(main())
