"""Processes that differ refuse to train together, with the key, the values and the processes."""

import json

import pytest

from pretrax.run.same_run import _difference
from run.test_processes import QUIET
from side_by_side import coordinator_address, run_side_by_side


def start(tmp_path, values, own, n=2):
    """Exit codes and messages of processes of one run; `own`: values and variables of the environment of each."""
    shared = {
        'JAX_COORDINATOR_ADDRESS': coordinator_address(), 'JAX_NUM_PROCESSES': str(n), 'JAX_NUM_CPU_DEVICES': '1'
    }  # fmt: skip
    commands, environments = [], []
    for index in range(n):
        changes, environment = own[index]
        path = tmp_path / f'{index}.yaml'
        path.write_text(json.dumps(values | {'run_dir': str(tmp_path / 'run')} | changes))
        commands.append(['pretrax', 'train', str(path)])
        environments.append({**QUIET, **shared, 'JAX_PROCESS_ID': str(index), **environment})
    processes = run_side_by_side(commands, environments)
    return [process.returncode for process in processes], [process.stdout + process.stderr for process in processes]


@pytest.fixture
def two(values):
    return values | {'mesh': {'r': 1, 'd': 2, 't': 1}, 'steps': 2, 'eval': {'every': 0}, 'checkpoint': {'every': 9}}


@pytest.mark.slow
def test_another_learning_rate_or_a_secret_is_named_in_all_processes_and_nothing_is_trained(two, tmp_path):
    rates = [two['optimizer'] | {'learning_rate': rate} for rate in (0.001, 0.002)]
    secret = {'storage': {'endpoint': '${oc.env:PLACE}'}}
    codes, texts = start(
        tmp_path,
        two,
        [({'optimizer': rate, **secret}, {'PLACE': f'https://hidden-{i}'}) for i, rate in enumerate(rates)],
    )
    assert codes == [2, 2], texts
    for text in texts:
        assert 'optimizer.learning_rate: 0.001 in process 0, 0.002 in process 1' in text
        assert 'storage.endpoint: one value in process 0, another one in process 1' in text
        assert 'hidden' not in text
    assert not (tmp_path / 'run' / 'metrics.jsonl').exists()


@pytest.mark.slow
def test_flags_that_change_numbers_are_compared_and_what_is_local_is_not(two, tmp_path):
    own = {'storage': {'profile': '${oc.env:PLACE}'}}
    flags = '--xla_backend_optimization_level=0 --xla_dump_to='
    both = [(own, {'PLACE': f'{tmp_path}/{i}', 'XLA_FLAGS': f'{flags}{tmp_path}/{i}'}) for i in range(2)]
    codes, texts = start(tmp_path, two, both)
    assert codes == [0, 0], texts
    both[1][1]['XLA_FLAGS'] += ' --xla_cpu_enable_fast_math=true'
    codes, texts = start(tmp_path, two | {'name': 'again'}, both)
    assert codes == [2, 2], texts
    assert all('--xla_cpu_enable_fast_math=true' in text for text in texts), texts


OTHER_TEXT = """
import os
from pretrax.config import register
from pretrax.data.batches.synthetic import SyntheticSource

@register('data', 'own')
class Own(SyntheticSource):
    def __init__(self, request):
        super().__init__(request, 96, 17)
        self.fingerprint = 'text of ' + os.environ['TEXT']
"""


@pytest.mark.slow
def test_other_text_under_the_same_path_is_refused(two, tmp_path):
    """As on two machines, whose files differ under the same path."""
    (tmp_path / 'own.py').write_text(OTHER_TEXT)
    two |= {'plugins': [str(tmp_path / 'own.py')], 'data': {'name': 'own'}}
    codes, texts = start(tmp_path, two, [({}, {'TEXT': 'node-1'}), ({}, {'TEXT': 'node-2'})])
    assert codes == [2, 2], texts
    expected = 'fingerprint of the data: text of node-1 in process 0, text of node-2 in process 1'
    assert all(expected in text for text in texts), texts


def test_many_differences_and_processes_fit_in_ten_lines():
    items = [{f'key{k}': (str(i % 4 * (k % 2)), f'{i % 4}') for k in range(30)} for i in range(1000)]
    lines = _difference(items).splitlines()
    assert len(lines) <= 10
    assert lines[1].strip() == (
        'key1: 0 in processes 0, 4, 8, 12 and 246 more, 1 in processes 1, 5, 9, 13 and 246 more, '
        '2 in processes 2, 6, 10, 14 and 246 more, ...'
    )
    assert lines[-2].strip() == 'and 10 more'
