"""The predicted memory is within a tenth of what compilers allocate, for every row that benchmarks/memory.py compiled."""

import importlib.util
import json
from pathlib import Path

import pytest

from pretrax.ahead.plan import Planner
from pretrax.config import from_values
from pretrax.scale.topology import parse_topology

SCRIPT = Path(__file__).parents[2] / 'benchmarks' / 'memory.py'
WITHIN = 0.1


@pytest.fixture(scope='module')
def benchmark():
    spec = importlib.util.spec_from_file_location('benchmark_memory', SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_prediction_is_within_a_tenth_of_every_compiled_row(benchmark):
    found = json.loads(benchmark.RESULTS.read_text())['rows']
    assert set(found) == set(benchmark.ROWS), 'a row that was not compiled: benchmarks/memory.py'
    lines, wrong = [], []
    for name, (topology, slices, values) in benchmark.ROWS.items():
        memory = (
            Planner(from_values(values), parse_topology(topology, slices), lambda text: None).as_configured().memory
        )
        error = memory.total / found[name]['total'] - 1
        lines.append(
            f'{topology:<8} {name:<26} {found[name]["total"] / 1e9:8.2f} GB compiled, {memory.total / 1e9:8.2f} predicted, '
            f'{error:+6.1%}'
        )
        if abs(error) > WITHIN:
            wrong.append(lines[-1])
        state = memory.weights + memory.moments
        assert state == pytest.approx(found[name]['arguments'], rel=0.01), f'{name}: the state is known exactly'
    print('\n'.join(lines))
    assert len(lines) >= 12
    assert len({topology.split('-')[0].split('x')[0] for topology, _, _ in benchmark.ROWS.values()}) >= 3
    assert not wrong, '\n'.join(wrong)
