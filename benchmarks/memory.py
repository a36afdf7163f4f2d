"""Measures the memory of real steps with compilers for absent devices, to compare with `pretrax plan`.

    uv sync --inexact --extra tpu --extra cuda
    JAX_PLATFORMS=cpu python benchmarks/memory.py [part of a name]

This compiles each row (half a minute to two minutes) and writes the results to results/memory.json, with the versions.
Other rows keep their results. It prints the table of docs/scaling.md, with the compiled memory and the prediction of
`pretrax plan`. `tests/plan/test_memory.py` compares the two, and `tests/deviceless` compiles one row again.
"""

import argparse
import json
import os
import pathlib
import sys
import time
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from pretrax.config import from_values
from pretrax.cost.memory import memory_of, size, temporaries_of
from pretrax.cost.topology import parse_topology
from pretrax.model.option_names import nest
from pretrax.plan.plan import Planner
from pretrax.plan.step import compile_ahead
from pretrax.run.setup import memory_of_run
from pretrax.system.software import versions

RESULTS = pathlib.Path(__file__).parent / 'results' / 'memory.json'

LLAMA_1B = {'family': 'llama', 'n_layers': 24, 'd_model': 2048, 'n_heads': 16, 'n_kv_heads': 8, 'd_ff': 5632}
LLAMA_3B = {'family': 'llama', 'n_layers': 28, 'd_model': 3072, 'n_heads': 24, 'n_kv_heads': 8, 'd_ff': 8192}
TEACHER = f'hf:{pathlib.Path(__file__).parent / "teachers" / "3b"}'  # the sizes of LLAMA_3B; its weights are not needed
MOE = {'family': 'mixtral', 'n_layers': 12, 'd_model': 1024, 'n_heads': 16, 'n_kv_heads': 8, 'd_ff': 3584}
ROW = tuple[str, int, dict[str, Any]]


def row(topology: str, model: dict[str, Any], rows: int, length: int, mesh: dict[str, int], **more: Any) -> ROW:
    """A configuration and its hardware. `more`: micro, slices, vocab_size, distill, save and options of the model."""
    micro, slices, vocab = more.pop('micro', None), more.pop('slices', 1), more.pop('vocab_size', 32000)
    distill = more.pop('distill', None)
    return topology, slices, {
        'name': 'memory', 'steps': 10, 'model': nest(model | more), 'data': {'name': 'synthetic', 'vocab_size': vocab},
        'batch': {'tokens': rows * length, 'sequence_length': length, 'micro': micro},
        'optimizer': {'name': 'adamw', 'learning_rate': 3e-4}, 'mesh': mesh, 'distill': distill,
    }  # fmt: skip


ROWS: dict[str, ROW] = {
    '1.3B, d t': row('v5e-16', LLAMA_1B, 32, 2048, {'d': 8, 't': 2}),
    '1.3B, d t, none saved': row('v5e-16', LLAMA_1B, 64, 2048, {'d': 8, 't': 2}, save='none'),
    '8B, d, none saved': row('v6e-16', {'preset': 'llama3-8b'}, 32, 4096, {'d': 16}, vocab_size=128256, save='none'),
    '8B, d t, none saved': row('v5p-32', {'preset': 'llama3-8b'}, 32, 4096, {'d': 4, 't': 4}, vocab_size=128256,
    save='none'),
    '3B, d, dots saved': row('v5p-32', LLAMA_3B, 64, 4096, {'d': 16}, save='dots'),
    '1.3B, d c, none saved': row('v5e-16', LLAMA_1B, 8, 16384, {'d': 4, 'c': 4}, save='none'),
    '3B, d p': row('v5p-16', LLAMA_3B, 32, 4096, {'d': 4, 'p': 2}, micro=1),
    'mixture, d e': row('v5e-16', MOE, 64, 2048, {'d': 4, 'e': 4}, save='none'),
    'GPT-2 124M': row('h200', {'preset': 'gpt2-124m'}, 64, 1024, {}, vocab_size=50257),
    'GPT-2 124M, loss in chunks': row(
        'h200', {'preset': 'gpt2-124m', 'loss_chunks': 8}, 64, 1024, {}, vocab_size=50257
    ),
    '0.5B, none saved': row('h200', LLAMA_1B | {'n_layers': 8}, 32, 2048, {}, save='none'),
    '0.5B, 4 passes': row('h200', LLAMA_1B | {'n_layers': 8}, 32, 2048, {}, micro=8),
    '8B, d of a node': row('h200x8', {'preset': 'llama3-8b'}, 16, 4096, {'d': 8}, vocab_size=128256),
    '3B, d t of a node, none saved': row('h100x8', LLAMA_3B, 32, 4096, {'d': 4, 't': 2}, save='none'),
    '1.3B, r d of a node, attention saved': row('a100x8', LLAMA_1B, 64, 2048, {'r': 2, 'd': 4}, save='attention'),
    'GPT-2 774M, d of a node, 4 passes': row('a100x8', {'preset': 'gpt2-774m'}, 256, 1024, {'d': 8}, micro=8,
    vocab_size=50257),
    '3B, d p of a node': row('h100x8', LLAMA_3B, 32, 4096, {'d': 4, 'p': 2}, micro=1),
    'mixture': row('h200', MOE, 16, 2048, {}),
    '0.5B learns from 3B, d t': row(
        'v5e-16', LLAMA_1B | {'n_layers': 8}, 64, 2048, {'d': 8, 't': 2},
        distill={'teacher': TEACHER, 'hidden': {'layers': [[3, 13], [7, 27]]}},
    ),
    '0.5B learns from 3B': row('h200', LLAMA_1B | {'n_layers': 8}, 16, 2048, {}, save='none',
    distill={'teacher': TEACHER}),
    'mixture, d e of a node': row('h200x8', MOE, 64, 2048, {'d': 2, 'e': 4}),
}  # fmt: skip


# Meshes for one step on a node of eight; with e the model is a mixture.
BY_AXIS = ({'r': 8}, {'d': 8}, {'d': 4, 't': 2}, {'d': 4, 'c': 2}, {'d': 4, 'p': 2}, {'d': 4, 'e': 2})


def print_by_axis() -> None:
    """Prints memory per device for each mesh, compiled and predicted. Records nothing."""
    print('| model | mesh | compiled | predicted |\n' + '|---' * 4 + '|')
    for mesh in BY_AXIS:
        model, micro = (MOE if 'e' in mesh else LLAMA_1B), (2 if 'p' in mesh else None)
        values = row('h200x8', model, 32, 2048, mesh, save='full', micro=micro)[2]
        planned = compile_ahead(from_values(values), parse_topology('h200x8'), lambda text: None)
        expected = memory_of_run(planned.run)
        assert expected is not None
        written = ' '.join(f'{axis}={n}' for axis, n in mesh.items())
        print(
            f'| {"mixture" if "e" in mesh else "1.3B"} | `{written}` | {planned.needed / 1e9:.1f} GB | '
            f'{expected.total / 1e9:.1f} GB |',
            flush=True,
        )


def compiled(name: str) -> dict[str, Any]:
    """The compiler's memory for a row, in bytes per device."""
    topology, slices, values = ROWS[name]
    began = time.perf_counter()
    planned = compile_ahead(from_values(values), parse_topology(topology, slices), lambda text: None)
    if planned.compiled is None:
        raise SystemExit(f'{name}: does not fit {topology}: {planned.needed:,} bytes')
    stats = planned.compiled.memory_analysis()
    print(f'{name}: {memory_of(planned.compiled) / 1e9:.2f} GB, after {time.perf_counter() - began:.0f} s', flush=True)
    return {
        'total': memory_of(planned.compiled),
        'arguments': stats.argument_size_in_bytes,
        'temporaries': temporaries_of(planned.compiled),
        'program': stats.generated_code_size_in_bytes,
    }


def table(results: dict[str, Any]) -> list[str]:
    """Every compiled row with the prediction of `pretrax plan`."""
    lines = ['| hardware | step | compiled | predicted | error |', '|' + '---|' * 5]
    for name, (topology, slices, values) in ROWS.items():
        if name in results:
            planner = Planner(from_values(values), parse_topology(topology, slices), lambda text: None)
            predicted, total = planner.as_configured().memory.total, results[name]['total']
            lines.append(
                f'| {topology} | {name} | {size(total)} | {size(predicted)} | {100 * (predicted / total - 1):+.1f} % |'
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description='Measure the memory of steps with compilers')
    parser.add_argument('part', nargs='?', default='', help='compile only rows whose names contain this')
    parser.add_argument('--out', type=pathlib.Path, default=RESULTS)
    parser.add_argument('--axes', action='store_true', help='one model on meshes of every axis, as a table')
    arguments = parser.parse_args()
    if arguments.axes:
        print_by_axis()
        return 0
    results: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {'rows': {}}
    for name in ROWS:
        if arguments.part in f'{ROWS[name][0]} {name}':
            results['rows'][name] = compiled(name)
            results |= {'command': 'JAX_PLATFORMS=cpu python benchmarks/memory.py', 'versions': versions()}
            arguments.out.write_text(json.dumps(results, indent=1) + '\n')
    print('\n'.join(table(results['rows'])))
    return 0


if __name__ == '__main__':
    sys.exit(main())
