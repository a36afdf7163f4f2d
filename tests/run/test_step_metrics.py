"""Metrics of steps: bits per byte, losses that are not finite, and steps that have none."""

import json
import random
import re

import jax
import numpy as np
import pytest

from pretrax import config_from_values, pretrain, register
from pretrax.cli._summary import summary
from pretrax.data.batches.source import Source
from pretrax.run import run_log
from runs import Quiet, StoppedAt, lines_of, without_clock
from small import VOCAB, random_batch


def test_bits_per_byte_count_bytes_of_text(values):
    """The first loss of small random weights is near log(vocabulary) nats a token."""
    result = pretrain(config_from_values({**values, 'steps': 1, 'schedule': {}}), progress=Quiet())
    nll, bits = result.metrics['nll'], result.metrics['bits_per_byte']
    assert nll == pytest.approx(np.log(300), rel=0.02)
    assert bits == pytest.approx(nll / np.log(2) / result.run.source.bytes_per_token, rel=1e-6)


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


def test_a_loss_that_is_not_finite_is_reported_and_skipped(small):
    small['data'] = {'name': 'poisoned'}
    progress = Quiet()
    result = pretrain(config_from_values(small), progress=progress)
    assert any('step 3: the loss is nan; 1 steps skipped so far' in line for line in progress.said)
    lines = lines_of(small)
    assert [np.isfinite(line['loss']) for line in lines] == [True, True, False, True, True, True]
    assert [line['skipped_steps'] for line in lines] == [0, 0, 1, 1, 1, 1]
    assert all(line['mfu'] is None for line in lines)  # a model that does not tell its architecture
    assert np.isfinite(jax.device_get(result.state.weights.table)).all()


def test_a_run_stopped_after_a_skipped_step_resumes_bit_for_bit(small, tmp_path):
    small |= {'data': {'name': 'poisoned'}}
    straight = small | {'run_dir': str(tmp_path / 'straight')}
    whole = pretrain(config_from_values(straight), progress=Quiet())
    pretrain(config_from_values(small), progress=StoppedAt(3))
    rest = pretrain(config_from_values(small), progress=Quiet())
    assert int(rest.state.skipped) == 1
    lines, expected = lines_of(small), lines_of(straight)
    assert [str(without_clock(a)) for a in lines] == [str(without_clock(b)) for b in expected]  # nan is not nan
    same = jax.tree.map(np.array_equal, jax.device_get(rest.state), jax.device_get(whole.state))
    assert all(jax.tree.leaves(same)), same


def test_trackers_are_flushed_with_each_checkpoint_and_receive_the_configuration(small, monkeypatch):
    class Recorder:
        name, steps, flushed, files = 'recorder', [], [], []

        def resume(self, step):
            return {}

        def log(self, lines):
            self.steps.extend(line.step for line in lines)

        def flush(self):
            self.flushed.append(list(self.steps))

        def file(self, path):
            self.files.append(path.name)

        def close(self, succeeded):
            pass

    recorder = Recorder()
    monkeypatch.setattr(run_log, 'open_trackers', lambda *_, **__: [recorder])
    pretrain(config_from_values(small | {'checkpoint': {'every': 4}}), progress=Quiet())
    assert recorder.flushed == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    assert 'config.yaml' in recorder.files


@pytest.fixture
def long_prompts(small, tmp_path):
    """Conversations whose prompts are longer than a row: most rows have no target, and most batches are a row."""
    draw = random.Random(0)
    rows = [{'q': 'a' * draw.choice([20, 300]), 'a': 'b' * draw.randint(1, 9)} for _ in range(40)]
    path = tmp_path / 'prompts.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    data = {'text': str(path), 'prompt_field': 'q', 'answer_field': 'a', 'tokenizer': 'bytes', 'validation': 0.2}
    return small | {'data': data, 'batch': {'tokens': 16, 'sequence_length': 16}, 'mesh': {'t': 8}, 'steps': 40}


def test_steps_without_targets_are_counted_and_stop_nothing(long_prompts):
    progress = Quiet()
    faults = {'rollback_after': 2}
    config = config_from_values(long_prompts | {'faults': faults, 'eval': {'every': 20, 'batches': 1}})
    result = pretrain(config, progress=progress)
    targets = [result.run.source.batch(i, slice(None), 1).mask.sum() for i in range(40)]
    empty = [count == 0 for count in targets]
    assert 20 < sum(empty) < 40
    assert (int(result.state.skipped), int(result.state.skipped_in_a_row)) == (sum(empty), 0)
    lines = [line for line in lines_of(long_prompts, 'skipped_steps') if line['step'] in (1, 40)]
    assert [line['steps_without_targets'] for line in lines] == [empty[0], sum(empty)]
    assert not any(line['skipped_steps'] for line in lines)
    assert [line.get('loss') is None for line in lines] == [empty[0], empty[-1]]
    shown = sum('had nothing to learn and changed nothing' in text for text in progress.said)
    assert shown == 1
    n, rows = re.search(r'rows without targets: .* \((\d+) of (\d+) rows\)', '\n'.join(progress.said)).groups()
    whole = [result.run.source.train.read(np.array([i]), True).mask.any() for i in range(int(rows))]
    assert int(n) == int(rows) - sum(whole)
    assert summary(result, ['runs.yaml'])[2].startswith(f'WARNING: {sum(empty)} of 40 steps had nothing to learn')


def test_held_out_text_without_targets_has_no_loss_and_that_is_said_once(long_prompts):
    """Not NaN, and not 0: no key. Batches of one row, of which the first has none."""
    progress = Quiet()
    values = long_prompts | {'eval': {'every': 2, 'batches': 1}, 'steps': 4}
    values['optimizer'] = values['optimizer'] | {'ema_decay': 0.9}
    result = pretrain(config_from_values(values), progress=progress)
    assert result.run.source.validation(0, slice(None), 1).mask.sum() == 0
    assert not lines_of(values, 'val_loss')
    assert sum('has no validation loss' in text or 'have no target' in text for text in progress.said) == 1
