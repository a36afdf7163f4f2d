"""What `pretrax bench` measures of a row: the steps that training takes, timed, and nothing else."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from pretrax import config_from_values, pretrain
from pretrax.run import measure
from runs import BIGRAM, Quiet


@pytest.fixture
def small(values):
    return values | {'model': BIGRAM, 'data': {'name': 'synthetic', 'vocab_size': 96}}


def test_measured_steps_compute_what_training_computes(small):
    """The loss of the last of 2 + 3 steps is that of a run of 5, to the last bit; and only its data is left behind."""
    config = config_from_values(small)
    found = measure.measure(config, 3, 2)
    assert not config.run_dir.exists()
    result = pretrain(config_from_values(small | {'steps': 6}), progress=Quiet())
    losses = [
        json.loads(line)['loss'] for line in (result.run.config.run_dir / 'metrics.jsonl').read_text().splitlines()
    ]
    assert (found['status'], found['loss']) == ('done', losses[4])
    assert found['tokens_per_second'] == pytest.approx(128 / found['step_seconds'])
    assert 0 < found['step_seconds'] <= found['slowest_step_seconds']
    assert (found['devices'], found['batch_tokens'], found['n_params']) == (8, 128, 97 * 96)
    assert found['memory'] > 1e8, 'a process with JAX'


def test_steps_that_end_before_anybody_looks_are_measured(small, monkeypatch):
    """The next step, too, has ended when the host learns that one has: on a fast device the rule, on others a race."""

    def ended(metrics):
        jax.block_until_ready(metrics)
        return True

    monkeypatch.setattr(measure, 'is_done', ended)
    for steps, warmup in ((1, 1), (2, 1), (3, 2)):
        found = measure.measure(config_from_values(small), steps, warmup)
        assert 0 < found['step_seconds'] <= found['slowest_step_seconds']


def test_a_run_that_cannot_fit_is_not_tried(small, capsys):
    """A model of a hundred terabytes, of which nothing is made."""
    model = {'n_layers': 1000, 'd_model': 2**15, 'attention': {'n_heads': 64}, 'feed_forward': {'d_ff': 2**17}}
    found = measure.measure(config_from_values(small | {'model': model}), 3, 2)
    assert found['status'] == 'too large'
    assert found['expected_memory'] > 1e12
    assert 'TB per device, which has ' in found['why']
    assert 'compiled' not in capsys.readouterr().out


def test_the_process_writes_the_reason_of_a_failure(small, tmp_path, monkeypatch, capsys):
    def run(values):
        (tmp_path / 'a.yaml').write_text(json.dumps(values))
        monkeypatch.setattr(sys, 'argv', ['-c', str(tmp_path / 'a.yaml'), str(tmp_path / 'result.json'), '3', '2'])
        measure.main()
        return json.loads((tmp_path / 'result.json').read_text())

    refused = run(small | {'batch': {'tokens': 48, 'sequence_length': 16}})
    assert refused['status'] == 'refused'
    assert refused['why'].startswith('batch: 3 sequences per step cannot be sharded evenly over mesh')

    def fails(config, steps, warmup):
        raise ValueError('of our own\nmaking')

    def exhausts(config, steps, warmup):
        jnp.zeros(2**55, jnp.uint8)

    monkeypatch.setattr(measure, 'measure', exhausts)
    assert run(small)['status'] == 'out of memory'
    monkeypatch.setattr(measure, 'measure', fails)
    assert run(small) == {'status': 'failed', 'why': 'ValueError: of our own'}
    assert 'Traceback' in capsys.readouterr().err
