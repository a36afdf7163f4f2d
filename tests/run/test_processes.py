"""Two processes that share a run do what one process with the same devices does."""

import json
import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from config.smallest import VALUES
from data_options import data_options
from preloaded import programs
from pretrax import config_from_values, pretrain
from pretrax.data.batches.source import DataRequest
from pretrax.data.text import open_text
from pretrax.data.tokenizers.tokenizer_training import train_tokenizer
from pretrax.errors import UserError
from pretrax.model.option_names import nest
from pretrax.observe.metrics import read_metrics
from pretrax.run.processes import Identity, identity, join_processes
from runs import BIGRAM, Quiet
from side_by_side import coordinator_address, run_side_by_side

# Without the 8 devices of the tests, and with programs that compile quickly.
QUIET = os.environ | {'XLA_FLAGS': '--xla_backend_optimization_level=0'}


@pytest.mark.slow
def test_two_and_four_processes_train_like_one(values, tmp_path):
    """Two of two devices, then four of one. Tokens travel to experts between both pairs;
    keys, in a ring, between the four.
    """
    values |= {'eval': {'every': 3, 'batches': 2}, 'schedule': {'name': 'constant', 'warmup': 2}}
    values['sample'] = {'every': 3, 'prompts': ['abc', 'fed cab', 'd'], 'tokens': 12}
    values['model'] = nest(
        values['model'] | {'n_experts': 4, 'experts_per_token': 2, 'balance_loss': 0.01, 'context': 'ring'}
    )
    pretrain(config_from_values(values | {'run_dir': str(tmp_path / 'one')}), progress=Quiet())

    config = tmp_path / 'run.yaml'
    config.write_text(json.dumps(values | {'mesh': {'r': 1, 'd': 1, 'e': 2, 'c': 2}}))
    for steps, n_processes in (3, 2), (6, 4):  # the second one resumes
        printed, *_ = run_together(config, tmp_path / 'run', steps, n_processes, devices=4)
        assert printed.count(f'sample at step {steps}: ') == 3
    alone, together = read_metrics(tmp_path / 'one' / 'metrics.jsonl'), read_metrics(tmp_path / 'run' / 'metrics.jsonl')
    assert [line['step'] for line in together] == [line['step'] for line in alone]
    for a, b in zip(alone, together, strict=True):
        for key in {'loss', 'grad_norm', 'weight_norm', 'val_loss'} & a.keys():
            np.testing.assert_allclose(b[key], a[key], rtol=1e-5)


RECORDER = """
import json, os
from pretrax.config import register
from pretrax.data.batches.source import Source
from pretrax.data.options import OPTIONS
from pretrax.data.text import open_text
from pretrax.run import contracts
from bigram import Bigram

contracts._check_source = contracts._check_causality = lambda *_: None  # they read batches too, before training

@register('model', 'bigram')
def bigram(request):
    return Bigram(request.vocab_size)

@register('data', 'recorded', options=OPTIONS)
class Recorded(Source):
    def __init__(self, request, *, options):
        self.source = open_text(request, options=options)
        self.vocab_size = self.source.vocab_size
        self.file = open(os.environ['RECORD'], 'a')

    def batch(self, step, rows, batch_rows):
        batch = self.source.batch(step, rows, batch_rows)
        print(json.dumps([step, rows.start, batch.tokens.tolist(), batch.mask.tolist()]), file=self.file, flush=True)
        return batch
"""


@pytest.mark.slow
def test_one_stream_of_tokens_whatever_number_of_processes_resumes(values, documents, tmp_path):
    """A run goes on with 1, 2 and 4 processes; what each of them read is put together and compared token by token."""
    tokenizer = tmp_path / 'tokenizer.json'
    tokenizer.write_bytes(train_tokenizer([documents.read_text()], 300).content)
    half = tmp_path / 'half.jsonl'
    half.write_text(''.join(documents.read_text().splitlines(keepends=True)[::2]))
    data = {
        'tokenizer': str(tokenizer), 'validation': 0, 'packing': 'best_fit',
        'mixture': [
            {'name': 'all', 'weight': [[0, 1], [6, 4]], 'text': str(documents)},
            {'name': 'half', 'weight': 2, 'text': str(half), 'packing': 'concatenate'},
        ],
    }  # fmt: skip
    (tmp_path / 'recorder.py').write_text(RECORDER)
    config = tmp_path / 'run.yaml'
    values |= {
        'mesh': {'r': 1, 'd': 4, 't': 1},
        'model': {'name': 'bigram'},
        'plugins': [str(tmp_path / 'recorder.py')],
        'schedule': {'name': 'constant'},  # which does not depend on the number of steps
    }
    config.write_text(json.dumps(values | {'data': {'name': 'recorded', **data}}))
    for n_processes, steps in ((1, 2), (2, 4), (4, 6)):
        run_together(config, tmp_path / 'run', steps, n_processes, devices=4, record=tmp_path / f'{n_processes}-of')

    read, reader = {}, {}
    for n_processes in (1, 2, 4):
        for process in range(n_processes):
            for line in Path(f'{tmp_path}/{n_processes}-of-{process}').read_text().splitlines():
                step, first, tokens, mask = json.loads(line)
                for row, pair in enumerate(zip(tokens, mask, strict=True), start=first):
                    assert reader.setdefault((step, row), (n_processes, process)) == (n_processes, process)
                    assert read.setdefault((step, row), pair) == pair
    source = open_text(DataRequest(0, 16, tmp_path / 'alone', lambda _: None), options=data_options(data))
    batches = [source.batch(step, slice(None), 8) for step in range(6)]
    expected = {
        (step, row): (batch.tokens[row].tolist(), batch.mask[row].tolist())
        for step, batch in enumerate(batches)
        for row in range(8)
    }
    assert read == expected

    alone = {'run_dir': str(tmp_path / 'straight'), 'mesh': {'r': 8, 'd': 1, 't': 1}, 'model': BIGRAM, 'data': data}
    pretrain(config_from_values(values | alone), progress=Quiet())
    straight, resumed = (read_metrics(tmp_path / run / 'metrics.jsonl') for run in ('straight', 'run'))
    assert [line['step'] for line in resumed] == list(range(1, 7))
    np.testing.assert_allclose([x['loss'] for x in resumed], [x['loss'] for x in straight], rtol=1e-5)


def run_together(config, run_dir, steps, n_processes, devices, *options, record=None):
    shared = QUIET | {
        'JAX_COORDINATOR_ADDRESS': coordinator_address(), 'JAX_NUM_PROCESSES': str(n_processes),
        'JAX_NUM_CPU_DEVICES': str(devices // n_processes), 'PYTHONPATH': str(Path(__file__).parents[1]),
    }  # fmt: skip
    own = [{'JAX_PROCESS_ID': str(i), 'RECORD': f'{record}-{i}'} for i in range(n_processes)]
    command = ['pretrax', 'train', str(config), f'run_dir={run_dir}', f'steps={steps}', *options]
    together = run_side_by_side([command] * n_processes, [shared | variables for variables in own])
    assert not any(process.returncode for process in together), '\n'.join(process.stderr for process in together)
    return [process.stdout for process in together]


@pytest.mark.parametrize(
    'variables', [{}, {'SLURM_NTASKS': '8'}, {'OMPI_COMM_WORLD_SIZE': '2'}, {'KUBERNETES_SERVICE_HOST': '10.0.0.1'}]
)
def test_what_is_installed_and_what_a_shell_inherits_make_no_cluster(variables, monkeypatch, tmp_path):
    """As after `pip install pretrax[tpu]` on any machine, and in a shell inside a job. JAX is in use here."""
    (tmp_path / 'libtpu').mkdir()
    (tmp_path / 'libtpu' / '__init__.py').write_text('')
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    jax.devices()
    config = config_from_values(VALUES)
    join_processes(config.processes, config.run_dir, config.faults.heartbeat_seconds)
    assert not jax.distributed.is_initialized()
    assert identity(config.processes) == Identity()


def test_a_program_that_used_jax_is_told_that_it_cannot_join(monkeypatch, tmp_path):
    jax.devices()
    for name, value in {'NUM_PROCESSES': '2', 'PROCESS_ID': '1', 'COORDINATOR_ADDRESS': 'localhost:1'}.items():
        monkeypatch.setenv(f'JAX_{name}', value)
    monkeypatch.setattr(
        'pretrax.run.processes._end_well_when_aborted', lambda *_: None
    )  # it would stay for other tests
    with pytest.raises(UserError, match='has used JAX before'):
        join_processes(config_from_values(VALUES).processes, tmp_path, 100)


@pytest.mark.slow
def test_the_process_that_is_missing_is_named_and_one_that_ends_ends_the_wait(values, tmp_path):
    config = tmp_path / 'run.yaml'
    config.write_text(json.dumps(values))
    identity = {
        'JAX_COORDINATOR_ADDRESS': coordinator_address(), 'JAX_NUM_PROCESSES': '3',
        'PRETRAX_HOSTS': 'node-a,node-b,node-c'
    }  # fmt: skip
    there = [
        subprocess.Popen(
            [programs() / 'pretrax', 'train', str(config), f'run_dir={tmp_path / "run"}', 'steps=6'],
            env=QUIET | identity | {'JAX_PROCESS_ID': index}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in '02'
    ]  # fmt: skip
    try:
        awaited = 'process 0 of 3 waits for process 1 (node-b)\n'
        assert awaited in iter(there[0].stderr.readline, '')
        there[1].kill()
        said = there[0].communicate(timeout=300)[1]
    finally:
        for process in there:
            process.kill()
            process.communicate()
    assert there[0].returncode == 75
    assert 'process 0 of 3: process 2 (node-c) has ended\n' in said
    assert 'Traceback' not in said


def test_processes_of_a_launcher_that_is_not_joined_are_refused(monkeypatch):
    for name, value in {'PMI_SIZE': '2', 'PMI_RANK': '1'}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match='PMI_SIZE=2: '):
        identity(config_from_values(VALUES).processes)
    monkeypatch.setenv('JAX_NUM_PROCESSES', '2')
    monkeypatch.setenv('JAX_PROCESS_ID', '1')
    monkeypatch.setenv('JAX_COORDINATOR_ADDRESS', 'node7:1234')
    assert identity(config_from_values(VALUES).processes) == Identity(2, 1, 'node7:1234')


def test_the_address_alone_completes_what_others_number(monkeypatch):
    monkeypatch.setenv('JAX_COORDINATOR_ADDRESS', 'node7:1234')
    for name, value in {'SIZE': '4', 'RANK': '3', 'LOCAL_RANK': '1', 'LOCAL_SIZE': '2'}.items():
        monkeypatch.setenv(f'OMPI_COMM_WORLD_{name}', value)
    assert identity(config_from_values(VALUES).processes) == Identity(4, 3, 'node7:1234', 1)
