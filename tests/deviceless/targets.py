"""Devices that are not there: JAX compiles for them, from PyPI's plugins alone. Run with JAX_PLATFORMS=cpu.

This file runs in an environment of its own (`test_deviceless.py`): with the plugins installed JAX would look for the
real devices in every other test.
"""

import collections
import json
import math
import os
import re
import sys
from typing import Any

os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from pretrax.cost.memory import temporaries_of
from pretrax.cost.topology import parse_topology
from pretrax.hlo.costs import costs
from pretrax.hlo.parse import collectives, summarize
from pretrax.model.axes import AXES
from pretrax.model.choices import TransformerOptions
from pretrax.model.loss import Batch
from pretrax.model.option_names import nest
from pretrax.model.request import ModelRequest
from pretrax.model.transformer import Transformer
from pretrax.plan.absent_devices import absent_devices
from pretrax.run.compiler_options import choose_compiler_options
from pretrax.run.placement import n_slices, place
from pretrax.shardlib import make_abstract
from pretrax.train import optimizer, schedule
from pretrax.train.groups import DEFAULT_NO_DECAY
from pretrax.train.state import abstract_state
from pretrax.train.step import Recipe, make_step


def devices_of(name: str, slices: int = 1) -> list[Any]:
    """Such as of 'h200' or 'v5e:4x4'."""
    return absent_devices(parse_topology(name, slices))


def compile_step(
    devices: list[Any],
    sizes: dict[str, int],
    rows: int,
    length: int,
    documents: int,
    accumulation: int = 1,
    micro_batches: int = 1,
    vocab_size: int = 50257,
    matmul: Any = 'compute',
    reduction: Any = 'f32',
    offload: tuple[str, ...] = (),
    **model: Any,
) -> Any:
    """The step that `pretrax train` runs, compiled for these devices."""
    assert math.prod(sizes.values()) == len(devices)
    mesh = dict.fromkeys(AXES, 1) | sizes
    arranged = Mesh(place(devices, mesh)[0], AXES, axis_types=(AxisType.Auto,) * len(AXES))
    with jax.set_mesh(arranged):
        request = ModelRequest(
            vocab_size=vocab_size, sequence_length=length, documents_per_row=documents, dtype=jnp.bfloat16,
            platform=devices[0].platform, mesh=mesh, micro_batches=micro_batches, device_kind=devices[0].device_kind,
            matmul=matmul,
            exempt=('head',), reduction=reduction, host_memory=True,
        )  # fmt: skip
        recipe = Recipe(
            model=Transformer(request, options=TransformerOptions(**nest(model))),
            optimizer=optimizer.adamw(),
            rate=schedule.cosine(1000, warmup=10),
            weight_decay=0.1,
            no_decay=DEFAULT_NO_DECAY,
            clip_norm=1.0,
            accumulation=accumulation,
            offload=offload,
        )
        batch = make_abstract(Batch, {'B': rows, 'L': length}, omit=('seeds', 'top_ids', 'top_log_probs', 'log_tail'))
        gpu = devices[0].platform in ('cuda', 'gpu')
        # Without a GPU there is no autotuning; Triton products are switched off to see the cuBLASLt form.
        given = {'xla_gpu_enable_triton_gemm': False} if gpu else {}
        options = choose_compiler_options(given, devices, mesh, n_slices(devices)).values
        return make_step(recipe).lower(abstract_state(recipe), batch).compile(compiler_options=options)


def facts(compiled: Any) -> dict[str, Any]:
    """What the tests ask of a compiled step."""
    types: dict[str, str] = {}  # of every value in the program
    outside_fusions: list[str] = []
    calls: collections.Counter[str] = collections.Counter()
    sums: collections.Counter[str] = collections.Counter()  # of products that are no calls
    products: collections.Counter[str] = collections.Counter()
    lines = compiled.as_text().splitlines()
    for line in lines:
        if found := re.match(r'\s*(?:ROOT )?%?([\w.-]+) = \(?(\w+\[[\d,]*\])', line):
            types[found[1]] = found[2]
    inside = ''
    for line in lines:
        if line and not line[0].isspace():
            inside = line.split(' ')[0]
        found = re.match(r'\s*(?:ROOT )?%?[\w.-]+ = (\(?\w+\[[\d,]*\])\S* .*?([\w-]+)\(', line)
        if not found:
            continue
        if 'fused' not in inside:
            outside_fusions.append(found[1].strip('('))
        if found[2] in ('dot', 'convolution'):
            operands = re.findall(r'%([\w.-]+)', line.split(f' {found[2]}(')[1].split(')')[0])[:2]
            kinds = [types[name].split('[')[0] for name in operands]
            sums[f'{" x ".join(kinds)} -> {found[1].strip("(").split("[")[0]}'] += 1
        if target := re.search(r'custom_call_target="([^"]+)"', line):
            calls[target[1]] += 1
            if 'matmul' in target[1] or 'gemm' in target[1]:
                operands = re.findall(r'%([\w.-]+)', line.split(' custom-call(')[1].split(')')[0])[:2]
                kinds = [types[name].split('[')[0] for name in operands]
                products[f'{" x ".join(kinds)} -> {found[1].strip("(").split("[")[0]}'] += 1
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    mesh = jax.tree.leaves(compiled.input_shardings)[0].mesh
    return {
        'calls': calls,
        'products': products,
        'sums': sums,
        'collectives': {
            f'{kind} {" ".join(axes)}': times
            for kind, axes, times, _, _ in summarize(collectives(compiled.as_text(), mesh.shape))
        },
        'buffers': sorted(set(outside_fusions)),
        'donated': len(re.findall(r'(?:may|must)-alias', lines[0])),
        'state_arrays': len(jax.tree.leaves(compiled.in_tree.unflatten(range(compiled.in_tree.num_leaves))[0][0])),
        'host_transfers': sorted(set(re.findall(r' (send|recv|infeed|outfeed)\(', text)) | set(HOST.findall(text))),
        **_costs(text),
        'argument_bytes': memory.argument_size_in_bytes,
        'alias_bytes': memory.alias_size_in_bytes,
        'temporary_bytes': temporaries_of(compiled),
        'host_argument_bytes': memory.host_argument_size_in_bytes,
        'host_temporary_bytes': memory.host_temp_size_in_bytes,
    }


HOST = re.compile(r'custom_call_target="([^"]*(?:callback|annotate_device_placement|MoveToHost)[^"]*)"|S\(5\)')


def _costs(text: str) -> dict[str, Any]:
    """{phase: (kernels, FLOPs)}, of a program for a GPU."""
    if 'cublas' not in text:
        return {}
    return {'costs': {cost.phase: (cost.kernels, cost.flops) for cost in costs(text, parse_topology('h200').device)}}


SMALL = {'rows': 8, 'length': 512, 'documents': 1, 'vocab_size': 1024} | {
    'family': 'llama', 'n_layers': 2, 'd_model': 512, 'n_heads': 4, 'd_ff': 1024,
}  # fmt: skip

CASES = {
    # four documents in a row: packed sequences, the harder case for a fused kernel
    'gpt2-124m on an H200': lambda: compile_step(
        devices_of('h200'), {}, rows=16, length=1024, documents=4, preset='gpt2-124m'
    ),
    '1.3B on v5e:4x4': lambda: compile_step(
        devices_of('v5e:4x4'), {'d': 8, 't': 2}, rows=32, length=2048, documents=4,
        family='llama', n_layers=24, d_model=2048, n_heads=16, n_kv_heads=8, d_ff=5632,
    ),
    'fp8 on an H200': lambda: compile_step(devices_of('h200'), {}, matmul='fp8', **SMALL),
    'int8 on v5e:2x2': lambda: compile_step(
        devices_of('v5e:2x2'), {'d': 2, 't': 2}, matmul='int8', offload=('optimizer',),
        save={'input': 'offload', 'up': 'offload', 'gate': 'offload'}, **SMALL,
    ),
}  # fmt: skip

if __name__ == '__main__':
    print(json.dumps(facts(CASES[sys.argv[1]]())))
