"""Whole runs: what they write, that they go on exactly where they stopped, and what they refuse."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import reference
from pretrax import config_from_values, pretrain, register
from pretrax.checkpoint import steps_in
from pretrax.cli import main
from pretrax.data.batches.source import Source
from pretrax.errors import UserError
from pretrax.observe.metrics import read_metrics
from pretrax.run import watch
from runs import BIGRAM, Quiet
from small import VOCAB, random_batch


@pytest.fixture
def small_values(values):
    """A run whose model compiles in a second, for what does not depend on the model."""
    return values | {'model': BIGRAM}


PROMISED = {'step', 'loss', 'tokens', 'tokens_per_second', 'mfu', 'grad_norm', 'learning_rate'}


class StoppedAt(Quiet):
    """Asks the run to stop, as Ctrl-C does, when the metrics of a step are reported."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def update(self, metrics):
        if metrics['step'] == self.step:
            signal.raise_signal(signal.SIGINT)


def lines_of(values, key='loss'):
    return [line for line in read_metrics(Path(values['run_dir']) / 'metrics.jsonl') if key in line]


def without_clock(line):
    return {key: value for key, value in line.items() if key not in ('tokens_per_second', 'mfu', 'mfu_full', 'goodput')}


def test_a_run_trains_and_writes_what_is_promised(values, tmp_path):
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
    assert result.metrics == {**lines[-1]}
    assert (int(result.state.step), result.stopped) == (30, None)
    assert steps_in(tmp_path / 'run' / 'checkpoints') == [30]
    assert 'sequence_length: 16' in (tmp_path / 'run' / 'config.yaml').read_text()


def test_bits_per_byte_count_bytes_of_text(values):
    """The first loss of small random weights is near log(vocabulary) nats a token."""
    result = pretrain(config_from_values({**values, 'steps': 1, 'schedule': {}}), progress=Quiet())
    nll, bits = result.metrics['nll'], result.metrics['bits_per_byte']
    assert nll == pytest.approx(np.log(300), rel=0.02)
    assert bits == pytest.approx(nll / np.log(2) / result.run.source.bytes_per_token, rel=1e-6)


def test_a_stopped_run_goes_on_bit_by_bit(values, tmp_path):
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


def test_a_finished_run_says_so_and_goes_on_with_more_steps(small_values):
    pretrain(config_from_values({**small_values, 'steps': 2}), progress=Quiet())
    again = Quiet()
    result = pretrain(config_from_values({**small_values, 'steps': 2}), progress=again)
    assert any('all 2 steps are done; to train more, use a larger steps=' in line for line in again.said)
    assert int(result.state.step) == 2
    result = pretrain(config_from_values({**small_values, 'steps': 4}), progress=Quiet())
    assert [line['step'] for line in lines_of(small_values)] == [1, 2, 3, 4]


def test_lines_after_the_checkpoint_are_written_again(small_values, tmp_path):
    """A run that died after its last checkpoint trains those steps again, and the file has each step once."""
    small_values['checkpoint'] = {'every': 2}
    pretrain(config_from_values({**small_values, 'steps': 4}), progress=Quiet())
    checkpoint = tmp_path / 'run' / 'checkpoints' / '4'
    checkpoint.rename(tmp_path / 'lost')
    before = lines_of(small_values)
    pretrain(config_from_values({**small_values, 'steps': 4}), progress=Quiet())
    assert [without_clock(line) for line in lines_of(small_values)] == [without_clock(line) for line in before]


def write_yaml(values, path):
    path.write_text(json.dumps(values))
    return str(path)


def test_a_changed_configuration_is_refused_with_a_diff(small_values, tmp_path, capsys):
    config = write_yaml(small_values, tmp_path / 'run.yaml')
    pretrain(config_from_values(small_values), progress=StoppedAt(1))
    metrics = (tmp_path / 'run' / 'metrics.jsonl').read_bytes()
    resolved = (tmp_path / 'run' / 'config.yaml').read_bytes()
    with pytest.raises(SystemExit) as stopped:
        main(['train', config, 'optimizer.learning_rate=0.5', 'batch.tokens=256'])
    assert stopped.value.code == 2
    complaint = capsys.readouterr().err
    assert 'trained with another configuration' in complaint
    assert 'optimizer.learning_rate: 0.01 -> 0.5' in complaint
    assert 'batch.tokens: 128 -> 256' in complaint
    assert '--allow-changes' in complaint
    assert len(complaint.splitlines()) <= 10
    assert (tmp_path / 'run' / 'metrics.jsonl').read_bytes() == metrics
    assert (tmp_path / 'run' / 'config.yaml').read_bytes() == resolved


def test_changes_can_be_allowed_and_harmless_ones_need_not_be(small_values):
    pretrain(config_from_values(small_values), progress=StoppedAt(1))
    small_values['log'], small_values['checkpoint'], small_values['name'] = {'every': 2}, {'every': 50}, 'renamed'
    harmless = StoppedAt(4)
    pretrain(config_from_values(small_values), progress=harmless)
    assert not any('changed since' in line for line in harmless.said)

    small_values['optimizer']['learning_rate'] = 0.5
    changed = Quiet()
    result = pretrain(config_from_values(small_values), allow_changes=True, progress=changed)
    assert any('changed since the run began: optimizer.learning_rate: 0.01 -> 0.5' in line for line in changed.said)
    assert result.metrics['step'] == 6


def test_validation_loss_is_the_mean_over_held_out_tokens(values):
    """Of two batches, the second of which is not full, computed again by the reference from the final weights."""
    values['batch'] = {'tokens': 1024, 'sequence_length': 16}
    values['eval'] = {'every': 2, 'batches': 2}
    result = pretrain(config_from_values({**values, 'steps': 2}), progress=Quiet())
    source, arch = result.run.source, result.run.recipe.model.arch
    weights = jax.device_get(result.state.weights)
    total = count = 0.0
    for index in range(2):
        batch = source.validation(index, slice(0, 64), 64)
        assert np.any(batch.mask.sum(axis=1) == 0) == (index == 1)
        total += float(reference.nll(weights, batch, arch)) * batch.mask.sum()
        count += batch.mask.sum()
    (line,) = lines_of(values, 'val_loss')
    np.testing.assert_allclose(line['val_loss'], total / count, rtol=1e-5)
    bits = total / count / np.log(2) / source.validation_bytes_per_token
    np.testing.assert_allclose(line['val_bits_per_byte'], bits, rtol=1e-5)
    assert result.validation == line


def test_the_loss_of_each_source_of_a_mixture_is_told(small_values, documents):
    """Against the same run with one source at a time held out; the whole is their mean by weight."""
    shared = {'tokenizer': 'bytes', 'validation': 0.2}
    half = documents.with_name('half.jsonl')
    half.write_text(''.join(documents.read_text().splitlines(keepends=True)[:30]))
    sources = [
        {'name': 'all', 'weight': 3, 'text': str(documents)},
        {'name': 'half', 'weight': 1, 'text': str(half)},
    ]
    small_values |= {'eval': {'every': 2, 'batches': 2}, 'steps': 2, 'data': {**shared, 'mixture': sources}}
    small_values['mesh'] = {'r': 8, 'd': 1, 't': 1}  # the vocabulary of bytes is no multiple of d
    progress = Quiet()
    result = pretrain(config_from_values(small_values), progress=progress)
    (line,) = lines_of(small_values, 'val_loss')
    mean = 0.75 * line['val_loss/all'] + 0.25 * line['val_loss/half']
    assert line['val_loss'] == pytest.approx(mean, rel=1e-12)
    assert any('mixture: all: 75.0% of the rows' in said for said in progress.said)

    table, bias = jax.device_get((result.state.weights.table, result.state.weights.bias))
    for name, (_, held_out) in result.run.source.validation_parts.items():
        top = bottom = 0.0
        for index in range(2):
            batch = held_out(index, slice(0, 8), 8)
            logits = table[batch.tokens] + bias
            chosen = np.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
            top += ((np.log(np.exp(logits).sum(axis=-1)) - chosen) * batch.mask).sum()
            bottom += batch.mask.sum()
        np.testing.assert_allclose(line[f'val_loss/{name}'], top / bottom, rtol=1e-5)


class PoisonedSource(Source):
    """Batches for the bigram model; that of step 2 has a target that weighs not-a-number."""

    vocab_size = VOCAB

    def batch(self, step, rows, batch_rows):
        batch = random_batch(batch_rows, seed=step)
        if step == 2:
            batch.mask[0, 0] = np.nan
        return type('Rows', (tuple,), {})(
            x[rows] for x in (batch.tokens, batch.targets, batch.segments, batch.positions, batch.mask)
        )


@register('data', 'poisoned')
def poisoned(request):
    return PoisonedSource()


def test_a_loss_that_is_no_number_is_told_and_skipped(small_values):
    small_values['data'] = {'name': 'poisoned'}
    progress = Quiet()
    result = pretrain(config_from_values(small_values), progress=progress)
    assert any('step 3: the loss is nan; 1 steps skipped so far' in line for line in progress.said)
    lines = lines_of(small_values)
    assert [np.isfinite(line['loss']) for line in lines] == [True, True, False, True, True, True]
    assert [line['skipped_steps'] for line in lines] == [0, 0, 1, 1, 1, 1]
    assert all(line['mfu'] is None for line in lines)  # a model that does not tell its architecture
    assert np.isfinite(jax.device_get(result.state.weights.table)).all()


def test_a_run_stopped_after_a_skipped_step_goes_on_bit_by_bit(small_values, tmp_path):
    small_values |= {'data': {'name': 'poisoned'}}
    straight = small_values | {'run_dir': str(tmp_path / 'straight')}
    whole = pretrain(config_from_values(straight), progress=Quiet())
    pretrain(config_from_values(small_values), progress=StoppedAt(3))
    rest = pretrain(config_from_values(small_values), progress=Quiet())
    assert int(rest.state.skipped) == 1
    lines, expected = lines_of(small_values), lines_of(straight)
    assert [str(without_clock(a)) for a in lines] == [str(without_clock(b)) for b in expected]  # nan is not nan
    same = jax.tree.map(np.array_equal, jax.device_get(rest.state), jax.device_get(whole.state))
    assert all(jax.tree.leaves(same)), same


def test_a_signal_that_comes_twice_at_once_counts_once(capfd, monkeypatch):
    """`uv run` passes on what its process group got as well; a second one that is meant comes later."""
    ended = []
    monkeypatch.setattr(watch.os, '_exit', ended.append)
    with watch.Requests(None).listening() as requests:
        assert not requests.stop(1)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert (requests.stop(2), requests.why, ended) == (True, 'signal', [])
        assert capfd.readouterr().err.count('stopping after this step, and saving the state') == 1
        later = time.monotonic() + 1.5
        monkeypatch.setattr(watch.time, 'monotonic', lambda: later)
        signal.raise_signal(signal.SIGINT)
        assert ended == [130]


@pytest.mark.parametrize('place', ['file', 'file/below', '/dev/null'])
def test_a_run_directory_that_cannot_be_written_is_told_before_anything_is_read(place, values, tmp_path):
    (tmp_path / 'file').write_text('')
    values |= {'run_dir': str(tmp_path / place), 'data': {'text': 'nothing/here'}}
    with pytest.raises(UserError, match=r'run_dir: .* cannot be written: (Not a directory|File exists)'):
        pretrain(config_from_values(values), progress=Quiet())


def test_samples_longer_than_the_positions_are_refused_before_the_first_step(values, tmp_path):
    values |= {'model': {'family': 'gpt2', 'n_layers': 1, 'd_model': 16, 'n_heads': 2}, 'sample': {'every': 5}}
    with pytest.raises(UserError, match=r'sample.tokens is 128, but the 16 positions .* leave (\d+) after') as error:
        pretrain(config_from_values(values), progress=Quiet())
    assert not (tmp_path / 'run' / 'metrics.jsonl').exists()
    room = int(str(error.value).split('leave ')[1].split()[0])
    assert f'set sample.tokens={room}' in str(error.value)
    values |= {'sample': {'every': 5, 'tokens': room}, 'mesh': {}}
    progress = Quiet()
    pretrain(config_from_values(values), progress=progress)
    assert any(line.startswith('sample at step 6: def ') for line in progress.said)


PRETRAX = str(Path(sys.executable).with_name('pretrax'))


def environment(**more):
    """Of a process of its own, with as many devices as its configuration asks for."""
    return {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'} | more


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_from_which_the_same_command_goes_on(values, tmp_path):
    values |= {'mesh': {'r': 1, 'd': 1, 't': 1}, 'steps': 120}
    config = write_yaml(values, tmp_path / 'run.yaml')
    straight = subprocess.run(
        [PRETRAX, 'train', config, f'run_dir={tmp_path}/straight'], env=environment(), capture_output=True, text=True
    )
    assert straight.returncode == 0, straight.stderr

    command = [PRETRAX, 'train', config]
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
