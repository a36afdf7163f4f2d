"""What the update of Llama 3 8B costs on hardware that is not there, by the schedule of the compiled step.

    JAX_PLATFORMS=cpu python tests/deviceless/updates.py ['name of a row']

in an environment with the extras `tpu` and `cuda`: half a minute of CPU for a row of GPUs, two minutes for TPUs. Prints
a table; docs/parallelism.md quotes it.
"""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from pretrax.config import load
from pretrax.cost.links import places_of
from pretrax.cost.topology import Topology, parse_topology
from pretrax.hlo.costs import Speed
from pretrax.hlo.parse import computations_of
from pretrax.hlo.program import Operation, parse_program
from pretrax.hlo.schedule import read_schedule
from pretrax.plan.step import compile_ahead

CONFIG = Path(__file__).parents[2] / 'configs' / 'scale' / '8b.yaml'
TOKENS = 'batch.tokens=1048576'
# By default XLA for GPUs sends for one collective at a time: those between nodes then keep those inside waiting.
AT_ONCE = 'compiler.options.xla_gpu_experimental_parallel_collective_overlap_limit=4'
HARDWARE = {  # hardware, slices or nodes, changes
    '64 x H100': ('h100x8', 8, ['mesh.r=8', 'mesh.d=8', AT_ONCE]),
    'v5p-256': ('v5p-256', 1, ['mesh.d=128']),
}
OPTIMIZERS = {
    'AdamW': [],
    'Muon': ['optimizer.name=muon'],
    'Muon, bf16': ['optimizer.name=muon', 'optimizer.precision=bf16'],
}
ROWS = {f'{optimizer}, {hardware}': (hardware, optimizer) for hardware in HARDWARE for optimizer in OPTIMIZERS}
LAYER = 218_112_000  # weights of a layer: 4096 (2 x 4096 + 2 x 1024 + 3 x 14336 + 2)


def found(name: str) -> dict[str, Any]:
    """Milliseconds of the step and of its update, and the elements of the largest array of the update on a device.

    `exchange`: of matrices with their owners; `exposed`: time in which the step waits for it; `waits`: for any
    communication.
    """
    hardware, optimizer = ROWS[name]
    topology = parse_topology(*HARDWARE[hardware][:2])
    changes = [TOKENS, *HARDWARE[hardware][2], *OPTIMIZERS[optimizer]]
    planned = compile_ahead(load(CONFIG, changes), topology, lambda text: None)
    assert planned.compiled is not None, planned.needed
    text, mesh = planned.compiled.as_text(), planned.run.mesh
    schedule = read_schedule(text, dict(mesh.shape), topology, places_of(mesh.devices.flat))
    program = parse_program(text, dict(mesh.shape))
    exchange = [one for one in schedule.transfers if 'exchange' in program.operations[one.name].scope]
    update = [one for one in program.kernels() if one.phase == 'update' and one.collective is None]
    return {
        'name': name,
        'step': 1e3 * (schedule.compute + schedule.exposed),
        'waits': 1e3 * schedule.exposed,
        'update': 1e3 * seconds_of(update, text, topology),
        'exchange': 1e3 * sum(one.times * one.seconds for one in exchange),
        'exposed': 1e3 * sum(one.times * one.exposed for one in exchange),
        'sent': sum(one.times * one.bytes for one in exchange),
        'largest': max(largest_of(one) for one in program.kernels() if one.scope[:1] == ('optimizer',)),
        'memory': planned.needed,
    }


def seconds_of(operations: list[Operation], text: str, topology: Topology) -> float:
    """Seconds of operations other than collectives, at best."""
    computations = computations_of(text)
    speed = Speed(topology.device, computations)
    named = {(name, one.name): one for name, body in computations.items() for one in body}
    return sum(
        one.times * speed.seconds(named[one.computation, one.name], one.computation)
        for one in operations
        if not one.operation.endswith(('-start', '-done'))
    )


def largest_of(one: Operation) -> int:
    """Elements of the largest array in a result."""
    if one.operation == 'custom-call':  # without the workspace of a library
        return max((math.prod(_dims(x)) for x in re.findall(r'[bf]\w*\d+\[([\d,]+)\]', one.shape)), default=0)
    return max((math.prod(_dims(x)) for x in re.findall(r'\[([\d,]+)\]', one.shape)), default=0)


def _dims(text: str) -> list[int]:
    return [int(n) for n in text.split(',')]


def row(name: str, facts: dict[str, Any]) -> str:
    hardware, optimizer = ROWS[name]
    step, exposed = facts['step'], facts['exposed']
    return (
        f'| {hardware} | {optimizer} | {step:,.0f} ms | {facts["update"]:.1f} ms | {facts["sent"] / 1e9:.2f} GB '
        f'| {facts["exchange"]:.1f} ms | {exposed:.1f} ms | {(facts["update"] + exposed) / step:.1%} '
        f'| {exposed / step:.2%} | {facts["largest"] / LAYER:.2f} layers |'
    )


if __name__ == '__main__':
    for name in sys.argv[1:] or ROWS:
        facts = found(name)
        print(row(name, facts), json.dumps(facts), sep='\n', flush=True)
