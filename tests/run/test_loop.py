"""Whole runs: the files that they write, and resuming bit for bit."""

import os
import signal
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from preloaded import programs
from pretrax import config_from_values, pretrain
from pretrax.checkpoint import steps_in
from pretrax.errors import UserError
from runs import Quiet, StoppedAt, lines_of, without_clock, write_yaml

PROMISED = {'step', 'loss', 'tokens', 'tokens_per_second', 'mfu', 'grad_norm', 'learning_rate'}


def test_a_run_trains_and_writes_its_files(values, tmp_path):
    values['steps'] = 30
    result = pretrain(config_from_values(values), progress=Quiet())
    lines = lines_of(values)
    assert [line['step'] for line in lines] == list(range(1, 31))
    assert all(line.keys() >= PROMISED for line in lines)
    assert lines[-1]['loss'] < lines[0]['loss'] - 0.5
    assert [line['tokens'] for line in lines] == [128 * step for step in range(1, 31)]
    assert all(line['tokens_per_second'] > 0 for line in lines)
    # Warm-up to the peak in two steps, then a line to 0 at the last step
    rates = [0.005, 0.01, *np.linspace(0.01, 0, 28)]
    np.testing.assert_allclose([line['learning_rate'] for line in lines], rates, rtol=1e-5, atol=1e-8)
    assert result.metrics == {key: value for key, value in lines[-1].items() if key != 'time'}
    assert (int(result.state.step), result.stopped) == (30, None)
    assert steps_in(tmp_path / 'run' / 'checkpoints') == [30]
    assert 'sequence_length: 16' in (tmp_path / 'run' / 'config.yaml').read_text()


def test_a_stopped_run_resumes_bit_for_bit(values, tmp_path):
    values = {**values, 'model': {**values['model'], 'dropout': 0.1}}  # the masks are those of the step
    straight = {**values, 'run_dir': str(tmp_path / 'straight')}
    whole = pretrain(config_from_values(straight), progress=Quiet())

    first = pretrain(config_from_values(values), progress=StoppedAt(2))  # told while step 3 is under way
    assert (first.stopped, int(first.state.step)) == ('signal', 3)
    assert steps_in(tmp_path / 'run' / 'checkpoints') == [3]
    second = Quiet()
    rest = pretrain(config_from_values(values), progress=second)
    assert any('resuming from step 3' in line for line in second.said)

    assert [without_clock(a) for a in lines_of(values)] == [without_clock(b) for b in lines_of(straight)]
    same = jax.tree.map(np.array_equal, jax.device_get(rest.state), jax.device_get(whole.state))
    assert all(jax.tree.leaves(same)), same


def test_a_finished_run_reports_it_and_resumes_with_more_steps(small):
    pretrain(config_from_values({**small, 'steps': 2}), progress=Quiet())
    again = Quiet()
    result = pretrain(config_from_values({**small, 'steps': 2}), progress=again)
    assert any('all 2 steps are done; to train more, use a larger steps=' in line for line in again.said)
    assert int(result.state.step) == 2
    result = pretrain(config_from_values({**small, 'steps': 4}), progress=Quiet())
    assert [line['step'] for line in lines_of(small)] == [1, 2, 3, 4]


def test_metrics_after_the_last_checkpoint_are_written_again(small, tmp_path):
    """A run that died after its last checkpoint trains those steps again, and the file has each step once."""
    small['checkpoint'] = {'every': 2}
    pretrain(config_from_values({**small, 'steps': 4}), progress=Quiet())
    checkpoint = tmp_path / 'run' / 'checkpoints' / '4'
    checkpoint.rename(tmp_path / 'lost')
    before = lines_of(small)
    pretrain(config_from_values({**small, 'steps': 4}), progress=Quiet())
    assert [without_clock(line) for line in lines_of(small)] == [without_clock(line) for line in before]


@pytest.mark.slow
def test_samples_end_where_the_positions_of_the_model_do(values, tmp_path):
    values |= {
        'model': {'family': 'gpt2', 'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 2}},
        'sample': {'every': 5, 'prompts': ['def ' * 16]},
        'mesh': {},
    }
    with pytest.raises(UserError, match=r'sample.prompts: the longest fills the 16 positions of the model'):
        pretrain(config_from_values(values), progress=Quiet())
    assert not (tmp_path / 'run' / 'metrics.jsonl').exists()
    values |= {'sample': {'every': 5}}  # 128 tokens unless fewer fit
    progress = Quiet()
    pretrain(config_from_values(values), progress=progress)
    assert any(line.startswith('sample at step 6: def ') for line in progress.said)


def environment(**more):
    """Of a process of its own, with as many devices as its configuration asks for."""
    return os.environ | {'XLA_FLAGS': '--xla_backend_optimization_level=0'} | more


@pytest.mark.slow
def test_after_ctrl_c_the_same_command_resumes(values, tmp_path):
    values |= {'mesh': {'r': 1, 'd': 1, 't': 1}, 'steps': 120}
    config = write_yaml(values, tmp_path / 'run.yaml')
    straight = subprocess.run(
        [programs() / 'pretrax', 'train', config, f'run_dir={tmp_path}/straight'],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert straight.returncode == 0, straight.stderr

    command = [programs() / 'pretrax', 'train', config]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith('step 5/'):
                process.send_signal(signal.SIGINT)
                break
        output = process.stdout.read()
    assert process.returncode == 0
    (step,) = steps_in(tmp_path / 'run' / 'checkpoints')
    assert 5 < step < 120
    assert f'Stopped at step {step} of 120' in output

    rest = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert rest.returncode == 0, rest.stderr
    assert f'resuming from step {step}' in rest.stdout
    whole = lines_of({'run_dir': tmp_path / 'straight'})
    assert len(whole) == 120
    assert [without_clock(line) for line in lines_of(values)] == [without_clock(line) for line in whole]


def test_every_0_is_never_before_the_end(small):
    """For checkpoints and lines of output as for evaluations and samples."""
    every = {
        'checkpoint': {'every': 0},
        'log': {'every': 0, 'report': False},
        'eval': {'every': 0},
        'sample': {'every': 0},
    }
    pretrain(config_from_values(small | every), progress=Quiet())
    assert [path.name for path in (Path(small['run_dir']) / 'checkpoints').iterdir()] == ['6']
    assert [line['step'] for line in lines_of(small)] == [1, 6]
