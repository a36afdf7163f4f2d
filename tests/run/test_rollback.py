"""Steps that fail in a row: back to a good checkpoint, past the data, and at last a report that names what failed."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pretrax import config_from_values, pretrain, register
from pretrax.checkpoint import read_description, steps_in
from pretrax.data.batches.source import Source
from pretrax.errors import UserError
from pretrax.observe.metrics import read_metrics
from pretrax.train.spikes import FEWEST_STEPS, is_spike
from runs import BIGRAM, Quiet
from small import VOCAB, random_batch


class Poisoned(Source):
    """Batches whose numbers are in `bad` have a target that weighs not-a-number. Remembers which were asked for."""

    vocab_size = VOCAB
    bad = range(0)
    asked: list[int]

    def __init__(self):
        type(self).asked = []

    def batch(self, step, rows, batch_rows):
        self.asked.append(step)
        batch = random_batch(batch_rows, seed=step)
        if step in self.bad:
            batch.mask[0, 0] = np.nan
        arrays = (batch.tokens, batch.targets, batch.segments, batch.positions, batch.mask)
        return type('Rows', (tuple,), {})(x[rows] for x in arrays)


@register('data', 'poisoned-range')
def poisoned(request):
    return Poisoned()


@pytest.fixture
def faulty(values, monkeypatch):
    monkeypatch.setattr(Poisoned, 'bad', range(8, 12))
    return values | {
        'steps': 14, 'model': BIGRAM, 'data': {'name': 'poisoned-range'},
        'checkpoint': {'every': 3, 'keep': 9}, 'faults': {'rollback_after': 3},
    }  # fmt: skip


def test_after_some_skipped_steps_in_a_row_the_run_goes_back_and_past_the_data(faulty):
    progress = Quiet()
    result = pretrain(config_from_values(faulty), progress=progress)
    # Steps 9, 10, 11 (batches 8, 9, 10) are skipped; the third is known of when step 12 is on its way.
    [line] = [line for line in progress.said if 'rolling back' in line]
    assert 'WARNING: 3 steps in a row were skipped: rolling back to step 6, continuing with batch 12' in line
    assert (int(result.state.step), int(result.state.batch), int(result.state.skipped)) == (14, 20, 0)
    lines = read_metrics(Path(faulty['run_dir']) / 'metrics.jsonl')
    assert [line['step'] for line in lines] == list(range(1, 15))
    assert all(np.isfinite(line['loss']) for line in lines)
    # What a run computes that never had those batches
    straight = faulty | {'run_dir': faulty['run_dir'] + '-straight', 'data': {'name': 'without-them'}}
    other = pretrain(config_from_values(straight), progress=Quiet())
    np.testing.assert_array_equal(result.state.weights.table, other.state.weights.table)
    description = read_description(Path(faulty['run_dir']) / 'checkpoints', 14)
    assert (description['rollbacks'], description['skipped_in_a_row']) == (1, 0)


@register('data', 'without-them')
class Without(Poisoned):
    """Batches 0 to 5, then 12 and on."""

    bad = range(0)

    def __init__(self, request):
        super().__init__()

    def batch(self, step, rows, batch_rows):
        return super().batch(step if step < 6 else step + 6, rows, batch_rows)


def test_a_run_that_goes_back_too_often_stops_with_a_report(faulty, monkeypatch):
    monkeypatch.setattr(Poisoned, 'bad', range(8, 10_000))
    with pytest.raises(UserError) as stopped:
        pretrain(config_from_values(faulty | {'faults': {'rollback_after': 3, 'rollbacks': 1}}), progress=Quiet())
    assert len(str(stopped.value).splitlines()) <= 10
    assert 'steps in a row were skipped' in str(stopped.value)
    assert 'table: NOT finite' in str(stopped.value)
    report = (Path(faulty['run_dir']) / 'failure.txt').read_text()
    assert 'nll of batch 15: nan' in report
    assert steps_in(Path(faulty['run_dir']) / 'checkpoints')


def test_without_a_checkpoint_it_goes_back_to_the_beginning(faulty, monkeypatch):
    monkeypatch.setattr(Poisoned, 'bad', range(2))
    values = faulty | {'faults': {'rollback_after': 2}, 'checkpoint': {'every': 100}}
    progress = Quiet()
    result = pretrain(config_from_values(values), progress=progress)
    assert any('rolling back to step 0, continuing with batch 3' in line for line in progress.said)
    assert (int(result.state.step), int(result.state.batch)) == (14, 17)


@pytest.mark.parametrize(
    ('loss', 'skipped'), [(2.0 + 3.9 * 0.5, False), (2.0 + 4.1 * 0.5, True), (-9.0, False), (np.inf, True)]
)
def test_a_spike_is_so_many_deviations_above_the_usual_loss(loss, skipped):
    """A usual loss of 2 with a standard deviation of 0.5."""
    count = 40.0
    usual = jnp.array([count, 2.0 * count, (4.0 + 0.25) * count])
    assert bool(is_spike(jnp.float32(loss), usual, 4.0)) == skipped
    assert not is_spike(jnp.float32(loss), usual, None)
    assert not is_spike(jnp.float32(loss), usual * (FEWEST_STEPS - 1) / count, 4.0)


def test_a_spike_changes_no_weight(values):
    """After 60 usual batches comes one with unlikely targets; with faults.spike the step is counted as skipped."""
    settings = values | {
        'steps': 62, 'model': BIGRAM, 'data': {'name': 'one-odd-batch'}, 'faults': {'spike': 6.0}, 'optimizer': {'learning_rate': 1e-4},
        'schedule': {'name': 'constant'}, 'log': {'every': 1},
    }  # fmt: skip
    result = pretrain(config_from_values(settings), progress=Quiet())
    lines = read_metrics(Path(values['run_dir']) / 'metrics.jsonl')
    assert [line['step'] for line in lines if line['skipped_in_a_row']] == [61]
    assert lines[60]['weight_norm'] == lines[59]['weight_norm'] != lines[61]['weight_norm']
    assert int(result.state.skipped) == 1


@register('data', 'one-odd-batch')
class OneOdd(Poisoned):
    """The same batch always, but for number 60, whose targets are others."""

    bad = range(0)

    def __init__(self, request):
        super().__init__()

    def batch(self, step, rows, batch_rows):
        batch = random_batch(batch_rows, seed=0)
        targets = batch.targets if step != 60 else batch.targets * 0  # which the biases make the least likely
        arrays = (batch.tokens, targets, batch.segments, batch.positions, batch.mask)
        return type('Rows', (tuple,), {})(x[rows] for x in arrays)
