"""The sides of benchmarks/cpu.py that need no PyTorch. The benchmark itself checks that all sides compute the same."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmark_scripts import benchmark_script

SCRIPT = Path(__file__).parents[2] / 'benchmarks' / 'cpu.py'


@pytest.fixture(scope='module')
def benchmark():
    return benchmark_script('cpu')


@pytest.mark.slow
def test_all_sides_start_from_the_same_weights_and_train_the_same_model(benchmark, tmp_path):
    ours = benchmark.Pretrax(benchmark.MODELS['small'], 'precision.compute=f32', 'mesh.r=2', 'mesh.d=2', 'mesh.t=2')
    inputs = ours.inputs()
    weights = {name: value for name, value in inputs.items() if name.startswith('weights.')}
    assert weights['weights.embed'].shape == (65, 128)
    heads = 4 * 128 * 128 + 4 * 128
    mlp = 2 * 4 * 128 * 128 + 5 * 128
    norms = 4 * 128
    assert sum(value.size for value in weights.values()) == 65 * 128 + 64 * 128 + 4 * (heads + mlp + norms) + 2 * 128
    assert inputs['tokens'].shape == inputs['targets'].shape == (benchmark.BATCHES, 12, 64)
    np.testing.assert_array_equal(inputs['tokens'][3], np.asarray(ours.run.batch(3 + benchmark.BATCHES).tokens))
    assert json.loads(str(inputs['settings']))['learning_rate'] == 3e-4
    np.savez(tmp_path / 'inputs.npz', allow_pickle=False, **inputs)
    nnx = benchmark.Peer(sys.executable, SCRIPT.with_name('nnx_gpt2.py'), tmp_path / 'inputs.npz')
    losses = ours.first_losses()
    np.testing.assert_allclose(nnx.losses, losses, rtol=0, atol=benchmark.TOLERANCE['f32'])
    assert nnx.turn(0.01).steps > 0
    nnx.close()
    assert losses[0] == pytest.approx(np.log(65), abs=0.1)
    before = ours.number
    turn = ours.turn(0.01)
    assert int(ours.state.step) == ours.number == before + turn.steps
    assert turn.seconds > 0


def test_the_table_shows_the_fastest_peer_and_warns_of_a_busy_machine(benchmark):
    row = {
        'name': 'small', 'model': '4 layers', 'tokens_per_second': {'pretrax': 30.0, 'PyTorch, eager f32': 10.0},
        'ratio': {'PyTorch, eager f32': 3.0}, 'strongest': 'PyTorch, eager f32', 'limit': 100.0, 'busy': 0.01,
        'pretrax_report': ['compute: f32'],
    }  # fmt: skip
    result = {
        'date': '2026-01-01', 'command': 'x', 'processor': 'y', 'cores': 2, 'versions': {}, 'rounds': 1, 'seconds': 1,
        'rows': [row],
    }  # fmt: skip
    assert '| small | PyTorch, eager f32 (its fastest) | 10 | 3.00x |' in benchmark.table(result).splitlines()
    assert '- small: at most 100 tokens/s; pretrax reaches 30%' in benchmark.table(result).splitlines()
    busy = {**result, 'rows': [{**row, 'limit': 20.0}]}
    assert '20 tokens/s; but pretrax is faster: that rate was measured too low' in benchmark.table(busy)
    assert 'Not a fair comparison' not in benchmark.table(result)
    row['busy'] = 0.4
    assert 'Not a fair comparison: other programs used 40% of the cores' in benchmark.table(result)


@pytest.mark.slow
def test_a_python_without_pytorch_is_refused_with_a_readable_error():
    done = subprocess.run(
        [sys.executable, SCRIPT, '--torch-python', '/nowhere/python'], capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == '--torch-python /nowhere/python cannot import torch and numpy\n'
