"""Rollbacks: return to a good checkpoint, skip the data, and fail with a report at last."""

from pathlib import Path

import numpy as np
import pytest

from pretrax import config_from_values, pretrain, register
from pretrax.checkpoint import read_description, steps_in
from pretrax.data.batches.source import Source
from pretrax.errors import UserError
from pretrax.observe.metrics import read_metrics
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


def test_skipped_steps_in_a_row_roll_back_and_skip_the_data(faulty):
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


def test_too_many_rollbacks_fail_with_a_report(faulty, monkeypatch):
    monkeypatch.setattr(Poisoned, 'bad', range(8, 10_000))
    with pytest.raises(UserError) as stopped:
        pretrain(config_from_values(faulty | {'faults': {'rollback_after': 3, 'rollbacks': 1}}), progress=Quiet())
    assert len(str(stopped.value).splitlines()) <= 10
    assert 'steps in a row were skipped' in str(stopped.value)
    assert 'table: NOT finite' in str(stopped.value)
    report = (Path(faulty['run_dir']) / 'failure.txt').read_text()
    assert 'nll of batch 15: nan' in report
    assert steps_in(Path(faulty['run_dir']) / 'checkpoints')


def test_without_a_checkpoint_a_rollback_starts_over(faulty, monkeypatch):
    monkeypatch.setattr(Poisoned, 'bad', range(2))
    values = faulty | {'faults': {'rollback_after': 2}, 'checkpoint': {'every': 100}}
    progress = Quiet()
    result = pretrain(config_from_values(values), progress=progress)
    assert any('rolling back to step 0, continuing with batch 3' in line for line in progress.said)
    assert (int(result.state.step), int(result.state.batch)) == (14, 17)
