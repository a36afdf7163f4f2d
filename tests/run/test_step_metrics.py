"""Metrics of steps: bits per byte, and losses that are not finite."""

import jax
import numpy as np
import pytest

from pretrax import config_from_values, pretrain, register
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
