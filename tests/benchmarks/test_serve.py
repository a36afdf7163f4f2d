"""The sides of benchmarks/serve.py that need no PyTorch.
The benchmark itself checks that both write the same tokens.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmark_scripts import benchmark_script

SCRIPT = Path(__file__).parents[2] / 'benchmarks' / 'serve.py'


@pytest.fixture(scope='module')
def benchmark():
    return benchmark_script('serve')


def test_the_latency_of_every_token_is_measured(benchmark):
    """Two streams of five tokens; no token arrives before it is written."""
    row = benchmark.latency(streams=2, tokens=5, seconds=0.01)
    assert row['tokens'] == 10
    assert 0 < row['median_ms'] <= row['p99_ms']


def test_the_models_have_the_sizes_in_their_names(benchmark):
    small = benchmark.Decoder.create(*benchmark.MODELS['1.3M'])
    assert sum(shape_size(shape) for shape in small.shapes.values()) == 1_344_640
    # Of the two tables of 1,536 x 128, a step multiplies by one.
    assert small.bytes_per_step('f32') == 4 * (1_344_640 - 1536 * 128)
    assert small.bytes_per_step('int8') == 1_344_640 - 1536 * 128


def shape_size(shape):
    size = 1
    for n in shape:
        size *= n
    return size


@pytest.mark.slow
def test_continuous_and_static_batching_are_compared(benchmark):
    benchmark.REQUESTS['1.3M'] = 16, 8
    row = benchmark.batching('1.3M', rounds=1)
    assert row['ratio'] > 0
    assert 1 < row['ideal'] < 8


def test_the_table_shows_what_is_wanted_and_warns_of_a_busy_machine(benchmark):
    row = {
        'name': '124M, batch 1, f32', 'tokens_per_second': 30.0, 'transformers': 20.0, 'ratio': 1.5, 'best_ratio': 1.25,
        'of_copy': 0.6, 'copy_gigabytes_per_second': 20.0,
    }  # fmt: skip
    result = {
        'date': '2026-01-01', 'command': 'x', 'processor': 'y', 'cores': 2, 'versions': [], 'rounds': 1, 'tokens': 4,
        'busy': 0.0, 'decode': [row],
        'batching': [{
            'name': '1.3M', 'ratio': 2.0, 'least': 1.9, 'shrinking': 1.5, 'ideal': 2.5, 'requests': 96,
            'mean_length': 64,
        }],
        'latency': {'streams': 64, 'median_ms': 1.0, 'p99_ms': 2.0},
    }  # fmt: skip
    text = benchmark.table(result)
    assert '| 124M, batch 1, f32 | 30.0 | 20.0 | 1.50x | 1.25x | 1.5x | 60% |' in text.splitlines()
    assert 'Other programs' not in text
    result['busy'] = 0.4
    assert 'Other programs used 40% of the cores' in benchmark.table(result)


@pytest.mark.slow
def test_a_python_without_pytorch_is_refused_with_a_readable_error():
    command = [sys.executable, SCRIPT, '--torch-python', '/nowhere/python']
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == 'give a Python with torch and transformers: --torch-python PATH\n'
