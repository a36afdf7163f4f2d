"""The predicted memory is within a tenth of what compilers allocate,
for every row that was compiled but those named here.
"""

import json
import math

import pytest

from benchmark_scripts import benchmark_script
from pretrax.config import from_values
from pretrax.cost.topology import parse_topology
from pretrax.plan.plan import Planner

WITHIN = 0.1
COMPILED = 57  # rows that were compiled
EXPOSED_WITHIN = 0.02  # of the step, of rows of the scaling tables
WAITS = {'64b 1x v5p-128': 0.06, '64b 2x v5p-128': 0.21}  # these take 96 % of the memory: XLA hides little or nothing
# Between slices of v5e, XLA keeps a second copy of the gradients for their sum over r; this model has the largest
# shards.
BEYOND_OF_SCALE = {f'128b {slices}x v5e-256': -0.11 for slices in (2, 4, 8, 16, 32)}
# With a vocabulary of 128,256 the head is a sixth of the step: when its weights' gradient is made, and how well what is
# of its size lies in memory, the compiler for TPUs decides step by step (benchmarks/lab-notes.md).
# On CPUs f32, layers with a state, latent attention, experts, and a loss in chunks need more than predicted; why is not
# known. On GPUs the backward pass of a delta net has about 50 arrays of the size of its f32 values at a time. Latent
# attention over d needs more; why is not known.
BEYOND = {
    '8B, d, none saved': -0.12,
    '8B, d t, none saved': 0.18,
    'small, 4 passes, Lion': 0.12,
    'small, f32': -0.11,
    'small, loss in chunks': -0.22,
    'small delta net': -0.26,
    'small Mamba 2': -0.15,
    'small latent': -0.28,
    'small mixture': -0.16,
    'delta net': -0.35,
    'wide: Adafactor': 0.12,
    'wide: attention saved': 0.11,
    'latent, d of a node': -0.16,
}


def test_the_prediction_is_within_a_tenth_of_every_compiled_step():
    benchmark = benchmark_script('memory')
    found = json.loads(benchmark.RESULTS.read_text())['rows']
    assert found.keys() <= benchmark.ROWS.keys(), 'the result of a row that is gone: benchmarks/memory.py'
    assert len(found) >= COMPILED
    lines, wrong = [], []
    for name in found:
        topology, _, values = benchmark.ROWS[name]
        memory = benchmark.expected(name)
        error = memory.total / found[name]['total'] - 1
        lines.append(
            f'{topology:<8} {name:<26} {found[name]["total"] / 1e9:8.2f} GB compiled, {memory.total / 1e9:8.2f} '
            'predicted, '
            f'{error:+6.1%}'
        )
        low, high = min(-WITHIN, BEYOND.get(name, 0)), max(WITHIN, BEYOND.get(name, 0))
        if not low <= error <= high:
            wrong.append(lines[-1])
        state = memory.weights + memory.moments + teacher_weights(benchmark, values)
        within = 0.02 if values['distill'] else 0.01  # t does not shard the projection of hidden states
        assert state == pytest.approx(found[name]['arguments'], rel=within), f'{name}: the state is known exactly'
    print('\n'.join(lines))
    assert len({benchmark.ROWS[name][0].split('-')[0].split('x')[0] for name in found}) >= 6
    assert not wrong, '\n'.join(wrong)


def teacher_weights(benchmark, values):
    """Bytes on each device of the teacher of a row, in bf16: the model of another row."""
    if values['distill'] is None:
        return 0
    topology, slices, teacher = benchmark.ROWS['3B, d, dots saved']
    planner = Planner(from_values(teacher), parse_topology(topology, slices), lambda text: None)
    return 2 * planner.n_stored_params / math.prod(values['mesh'].values())


def test_rows_of_the_scaling_tables_fit_and_their_memory_and_exposed_communication_are_predicted():
    benchmark = benchmark_script('scale')
    found, rows = json.loads(benchmark.RESULTS.read_text()), {row.name: row for row in benchmark.ROWS}
    memory, waits = {}, {}
    for name, one in found.items():
        plan = benchmark.predicted(rows[name])
        assert one['fits'], name
        assert one['command'] == rows[name].command()
        memory[name] = plan['predicted_bytes'] / one['bytes'] - 1
        if 'schedule' in one:
            waits[name] = plan['predicted_exposed'] - benchmark.exposed_share(one['schedule'])
    assert {row.decoder for row in benchmark.ROWS} == {rows[name].decoder for name in found}, 'a size without a row'
    beyond = {name: error for name, error in memory.items() if abs(error) > max(WITHIN, -BEYOND_OF_SCALE.get(name, 0))}
    assert not beyond
    assert not {name: error for name, error in waits.items() if abs(error) > WAITS.get(name, EXPOSED_WITHIN)}
