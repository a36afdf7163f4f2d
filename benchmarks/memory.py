"""Measures the memory of real steps with compilers for absent devices, to compare with `pretrax plan`.

    uv sync --inexact --extra tpu --extra cuda
    JAX_PLATFORMS=cpu python benchmarks/memory.py [part of a name] [--missing]

This compiles each row (half a minute to two minutes on two idle cores) and writes the results to results/memory.json,
with the versions. A row whose program has not changed is traced, but not compiled again. With --missing, only rows
without a result are compiled. It prints the table of docs/scaling.md, with the compiled memory and the prediction of
`pretrax plan`, and the errors. `tests/plan/test_memory.py` compares the two, and `tests/deviceless` compiles one row
again.
"""

import argparse
import hashlib
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax

from pretrax.amounts import size
from pretrax.config import from_values
from pretrax.cost.memory import Memory, memory_of, temporaries_of
from pretrax.cost.topology import parse_topology
from pretrax.model.option_names import nest
from pretrax.plan.absent_devices import absent_devices
from pretrax.plan.plan import Planner
from pretrax.plan.step import compile_ahead
from pretrax.run.compiled_step import lower_step
from pretrax.run.setup import Run, memory_of_run, prepare
from pretrax.system.software import versions

RESULTS = pathlib.Path(__file__).parent / 'results' / 'memory.json'

LLAMA_1B = {'family': 'llama', 'n_layers': 24, 'd_model': 2048, 'n_heads': 16, 'n_kv_heads': 8, 'd_ff': 5632}
LLAMA_3B = {'family': 'llama', 'n_layers': 28, 'd_model': 3072, 'n_heads': 24, 'n_kv_heads': 8, 'd_ff': 8192}
TEACHER = f'hf:{pathlib.Path(__file__).parent / "teachers" / "3b"}'  # the sizes of LLAMA_3B; its weights are not needed
MOE = {'family': 'mixtral', 'n_layers': 12, 'd_model': 1024, 'n_heads': 16, 'n_kv_heads': 8, 'd_ff': 3584}
WIDE = {'family': 'llama', 'n_layers': 6, 'd_model': 4096, 'n_heads': 32, 'n_kv_heads': 8, 'd_ff': 14336}
LATENT = {
    'family': 'deepseek-v3', 'n_layers': 6, 'd_model': 2048, 'n_heads': 16, 'd_ff': 1024, 'experts.n_experts': 16,
    'experts.experts_per_token': 4, 'experts.d_shared': 1024, 'attention.latent.q_rank': 1024,
}  # fmt: skip
DELTA = {'family': 'qwen3.5', 'n_layers': 8, 'd_model': 2048, 'n_heads': 8, 'n_kv_heads': 2, 'd_head': 256,
    'd_ff': 6144, 'recurrent.n_heads': 16, 'recurrent.n_key_heads': 16}  # fmt: skip
SMALL = {'family': 'llama', 'n_layers': 4, 'd_model': 512, 'n_heads': 8, 'n_kv_heads': 4, 'd_ff': 1408}
MAMBA = {'family': 'mamba2', 'n_layers': 16, 'd_model': 2048}
SLIDING = {'attention.window': 1024, 'attention.global_every': 6}
BF16 = {'compute': 'bf16'}
HOST = {'memory': {'offload': ['optimizer']}}
# Keys that each change the step of one decoder on several devices, and on one.
SHARDED: dict[str, dict[str, Any]] = {
    'nothing': {}, 'int8': {'precision': {'matmul': 'int8'}}, 'Muon': {'optimizer': 'muon'},
    'SOAP': {'optimizer': 'soap'}, 'Adafactor': {'optimizer': 'adafactor'}, 'Lion': {'optimizer': 'lion'},
    'state in host memory': HOST,
    'activations in host memory': {'save': {'input': 'offload', 'up': 'offload', 'gate': 'offload'}},
    'dropout': {'dropout': 0.1}, 'MTP': {'multi_token.n_layers': 1}, 'loss in chunks': {'loss_chunks': 8},
    'windows': SLIDING, 'documents': {'document_length': 512}, '4 passes, none saved': {'micro': 1, 'save': 'none'},
}  # fmt: skip
SINGLE: dict[str, dict[str, Any]] = {
    'fp8': {'precision': {'matmul': 'fp8'}}, 'Muon': {'optimizer': 'muon'}, 'Adafactor': {'optimizer': 'adafactor'},
    'Lion': {'optimizer': 'lion'}, 'state in host memory': HOST, 'dropout': {'dropout': 0.1, 'save': 'none'},
    'MTP': {'multi_token.n_layers': 1}, 'chunked windows': SLIDING | {'attention.window_type': 'chunked'},
    'documents': {'document_length': 512}, 'attention saved': {'save': 'attention'},
}  # fmt: skip
ON_CPU: dict[str, dict[str, Any]] = {
    'Muon': {'optimizer': 'muon'}, 'Adafactor': {'optimizer': 'adafactor'}, 'SOAP': {'optimizer': 'soap'},
    'MTP': {'multi_token.n_layers': 1}, 'dropout': {'dropout': 0.1}, 'windows': {'attention.window': 256},
    'documents': {'document_length': 300},
}  # fmt: skip
ROW = tuple[str, int, dict[str, Any]]


def row(topology: str, model: dict[str, Any], rows: int, length: int, mesh: dict[str, int], **more: Any) -> ROW:
    """A configuration and its hardware. `more`: micro, slices, vocab_size, the keys below, and options of the model."""
    micro, slices, vocab = more.pop('micro', None), more.pop('slices', 1), more.pop('vocab_size', 32000)
    optimizer, documents = more.pop('optimizer', 'adamw'), more.pop('document_length', None)
    sections = {key: more.pop(key) for key in ('precision', 'memory') if key in more}
    return topology, slices, sections | {
        'name': 'memory', 'steps': 10, 'distill': more.pop('distill', None), 'mesh': mesh,
        'data': {'name': 'synthetic', 'vocab_size': vocab, 'document_length': documents},
        'batch': {'tokens': more.pop('tokens', rows * length), 'sequence_length': length, 'micro': micro},
        'optimizer': {'name': optimizer, 'learning_rate': 3e-4}, 'model': nest(model | more),
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
    **{f'wide, d: {name}': row('v6e-8', WIDE, 32, 4096, {'d': 8}, **more) for name, more in SHARDED.items()},
    **{f'wide: {name}': row('h200', WIDE | {'n_layers': 3}, 8, 4096, {}, **more) for name, more in SINGLE.items()},
    'wide, fp8, d': row('tpu7x-8', WIDE, 32, 4096, {'d': 8}, precision={'matmul': 'fp8'}),
    'wide, d t, 2 parts': row('v5p-16', WIDE, 32, 4096, {'d': 4, 't': 2}, batch_parts=2),
    'wide, d c, ring': row('v5p-16', WIDE, 8, 16384, {'d': 2, 'c': 4}, **{'attention.context': 'ring'}),
    'wide, d p, 2 rounds': row(
        'v5p-16', WIDE | {'n_layers': 8}, 32, 4096, {'d': 2, 'p': 4}, micro=1, **{'pipeline.rounds': 2}
    ),
    'wide, r d of 2 slices': row('v5e-16', WIDE, 64, 2048, {'r': 2, 'd': 16}, slices=2, save='none'),
    '2 layers of 8B, 8 x 8,192 tokens, none saved': row(
        'v6e-8', {'preset': 'llama3-8b', 'n_layers': 2}, 64, 8192, {'d': 8}, vocab_size=128256, save='none'
    ),
    '2 layers of 70B, 4 x 4,096 tokens, none saved': row(
        'v6e-8', {'preset': 'llama2-70b', 'n_layers': 2}, 32, 4096, {'d': 8}, save='none'
    ),
    '2 layers of 8B, loss in chunks': row(
        'v6e-8', {'preset': 'llama3-8b', 'n_layers': 2, 'loss_chunks': 8}, 64, 8192, {'d': 8}, vocab_size=128256,
        save='none',
    ),
    'GPT-2 124M, 2 x 512 tokens': row(
        'cpu', {'preset': 'gpt2-124m'}, 2, 512, {}, vocab_size=50257, precision=BF16
    ),
    'small': row('cpu', SMALL, 4, 1024, {}, precision=BF16),
    'small, none saved': row('cpu', SMALL, 4, 1024, {}, precision=BF16, save='none'),
    'small, 4 passes, Lion': row('cpu', SMALL, 4, 1024, {}, precision=BF16, micro=1, save='none', optimizer='lion'),
    'small, f32': row('cpu', SMALL, 4, 1024, {}, precision={'compute': 'f32'}),
    'small, loss in chunks': row('cpu', SMALL, 4, 1024, {}, precision=BF16, loss_chunks=8),
    'small delta net': row('cpu', DELTA | {'n_layers': 4, 'd_model': 512, 'd_ff': 1408}, 4, 1024, {}, precision=BF16),
    'small Mamba 2': row('cpu', MAMBA | {'n_layers': 4, 'd_model': 512}, 4, 1024, {}, precision=BF16),
    'small latent': row('cpu', LATENT | {'n_layers': 4, 'd_model': 512, 'd_ff': 256}, 4, 1024, {}, precision=BF16),
    'small mixture': row('cpu', SMALL | {'family': 'mixtral'}, 4, 1024, {}, precision=BF16),
    **{f'small: {name}': row('cpu', SMALL, 4, 1024, {}, precision=BF16, **more) for name, more in ON_CPU.items()},
    'latent, d e': row('v5p-16', LATENT, 32, 4096, {'d': 2, 'e': 4}, save='none'),
    'latent, d of a node': row('h200x8', LATENT, 32, 4096, {'d': 8}, save='none'),
    'delta net, d': row('v5p-16', DELTA, 32, 4096, {'d': 8}),
    'delta net': row('h200', DELTA, 8, 4096, {}, save='none'),
    'Mamba 2, d': row('v6e-8', MAMBA, 32, 4096, {'d': 8}),
    'wide, d of a node: SOAP': row('h200x8', WIDE, 32, 4096, {'d': 8}, optimizer='soap'),
    'wide, d of a node: fp16, growing': row(
        'a100x8', WIDE, 32, 4096, {'d': 8}, precision={'compute': 'fp16'}, tokens=[[0, 65536], [5, 131072]]
    ),
    'wide, d c of a node': row('h200x8', WIDE, 16, 8192, {'d': 4, 'c': 2}),
    'wide, d of a node: host': row('h200x8', WIDE, 64, 4096, {'d': 8}, memory={'offload': ['optimizer', 'weights']}),
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


def prepared(name: str) -> Run:
    """The run of a row, on devices that may be absent."""
    topology, slices, values = ROWS[name]
    devices = jax.devices('cpu')[:1] if topology == 'cpu' else absent_devices(parse_topology(topology, slices))
    return prepare(from_values(values), lambda text: None, devices)


def expected(name: str) -> Memory:
    """The memory that `pretrax plan` predicts for a row, or, on a CPU, the start-up report of `pretrax train`."""
    topology, slices, values = ROWS[name]
    if topology == 'cpu':
        memory = memory_of_run(prepared(name))
        assert memory is not None
        return memory
    return Planner(from_values(values), parse_topology(topology, slices), lambda text: None).as_configured().memory


def compiled(name: str, known: dict[str, Any] | None) -> dict[str, Any]:
    """The compiler's memory for a row, in bytes per device: `known`, if that is of the same program."""
    began = time.perf_counter()
    run = prepared(name)
    options = run.compiler_options.values
    with jax.set_mesh(run.mesh):
        lowered = lower_step(run)
        program = hashlib.sha256(f'{versions()} {options} {lowered.as_text()}'.encode()).hexdigest()
        if known and known.get('program_sha256') == program:
            return known
        step = lowered.compile(compiler_options=options)
    stats = step.memory_analysis()
    assert stats is not None
    print(f'{name}: {memory_of(step) / 1e9:.2f} GB, after {time.perf_counter() - began:.0f} s', flush=True)
    return {
        'total': memory_of(step),
        'arguments': stats.argument_size_in_bytes,
        'temporaries': temporaries_of(step),
        'program': stats.generated_code_size_in_bytes,
        'host': stats.host_temp_size_in_bytes + stats.host_argument_size_in_bytes,
        'program_sha256': program,
    }


def table(results: dict[str, Any]) -> list[str]:
    """Every compiled row with the prediction of `pretrax plan`."""
    lines, errors = ['| hardware | step | compiled | predicted | error |', '|' + '---|' * 5], []
    for name, (topology, _, _) in ROWS.items():
        if name in results:
            predicted, total = expected(name).total, results[name]['total']
            lines.append(
                f'| {topology} | {name} | {size(total)} | {size(predicted)} | {100 * (predicted / total - 1):+.1f} % |'
            )
            errors.append(100 * abs(predicted / total - 1))
    median, *_, ninth = statistics.quantiles(errors, n=10)[4:9]
    summary = f'{len(errors)} of {len(ROWS)} steps compiled; median error {median:.1f} %, 90 % within {ninth:.1f} %'
    return [*lines, '', f'{summary}, worst {max(errors):.1f} %']


def main() -> int:
    parser = argparse.ArgumentParser(description='Measure the memory of steps with compilers')
    parser.add_argument('part', nargs='?', default='', help='compile only rows whose names contain this')
    parser.add_argument('--missing', action='store_true', help='compile only rows without a result')
    parser.add_argument('--out', type=pathlib.Path, default=RESULTS)
    parser.add_argument('--axes', action='store_true', help='one model on meshes of every axis, as a table')
    arguments = parser.parse_args()
    if arguments.axes:
        print_by_axis()
        return 0
    results: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {'rows': {}}
    for name in ROWS:
        if arguments.part in f'{ROWS[name][0]} {name}' and not (arguments.missing and name in results['rows']):
            results['rows'][name] = compiled(name, results['rows'].get(name))
            results |= {'command': 'JAX_PLATFORMS=cpu python benchmarks/memory.py', 'versions': versions()}
            arguments.out.write_text(json.dumps(results, indent=1) + '\n')
    print('\n'.join(table(results['rows'])))
    return 0


if __name__ == '__main__':
    sys.exit(main())
