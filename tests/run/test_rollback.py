"""Rollbacks: return to a good checkpoint, skip the data, and fail with a report at last."""

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pretrax import config_from_values, pretrain, register
from pretrax.checkpoint import Checkpoints, read_description, steps_in
from pretrax.checkpoint.directory import Directory
from pretrax.data.batches.source import Source
from pretrax.errors import UserError
from pretrax.observe.metrics import read_metrics
from pretrax.run import saving
from runs import BIGRAM, At, Quiet, StoppedAt
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


class Overflow:
    step = -1  # the second moments become infinite at this step


@register('optimizer', 'overflow')
def overflow():
    adam = optax.scale_by_adam()

    def update(gradient, state, weights):
        direction, state = adam.update(gradient, state, weights)
        return direction, state._replace(
            nu=jax.tree.map(lambda x: jnp.where(state.count == Overflow.step, jnp.inf, x), state.nu)
        )

    return optax.GradientTransformation(adam.init, update)


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


@pytest.mark.slow
def test_a_run_that_stops_when_a_rollback_is_due_makes_it_when_it_resumes(faulty, monkeypatch):
    monkeypatch.setattr(Poisoned, 'bad', range(8, 11))  # step 12 would be a good one
    straight = pretrain(config_from_values(faulty), progress=Quiet())
    stopped = faulty | {'run_dir': faulty['run_dir'] + '-stopped'}
    first, second = StoppedAt(10), Quiet()
    pretrain(config_from_values(stopped), progress=first)
    assert read_description(Path(stopped['run_dir']) / 'checkpoints', 11)['skipped_in_a_row'] == 3
    result = pretrain(config_from_values(stopped), progress=second)
    assert not [line for line in first.said if 'rolling back' in line]
    assert [line for line in second.said if 'rolling back to step 6, continuing with batch 12' in line]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(result.state), jax.device_get(straight.state))


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
    assert '4 steps in a row were skipped (the last with batch 15) after 1 rollbacks' in str(stopped.value)
    assert 'table: NOT finite' in str(stopped.value)
    report = (Path(faulty['run_dir']) / 'failure.txt').read_text()
    assert 'nll of batch 15: nan' in report
    assert steps_in(Path(faulty['run_dir']) / 'checkpoints')


def test_the_failure_names_the_skipped_batch_also_if_the_next_step_is_trained(faulty, monkeypatch):
    monkeypatch.setattr(Poisoned, 'bad', range(8, 9))
    with pytest.raises(UserError, match=r'^1 steps in a row were skipped \(the last with batch 8\) after 0 rollbacks'):
        pretrain(config_from_values(faulty | {'faults': {'rollback_after': 1, 'rollbacks': 0}}), progress=Quiet())


def test_checkpoints_of_skipped_steps_evict_no_good_one(faulty, monkeypatch):
    """Also when the streak covers several checkpoints, and only one is kept; then the next start goes on."""
    monkeypatch.setattr(Poisoned, 'bad', range(6, 12))
    values = faulty | {'checkpoint': {'every': 1, 'keep': 1}, 'faults': {'rollback_after': 5}}
    progress = Quiet()
    pretrain(config_from_values(values), progress=progress)
    assert any('rolling back to step 6, continuing with batch 12' in line for line in progress.said), progress.said
    directory = Path(faulty['run_dir']) / 'checkpoints'
    assert steps_in(directory) == [14]
    again = Quiet()
    pretrain(config_from_values(values), progress=again)
    assert any('resuming from step 14' in line for line in again.said)


def test_a_rollback_waits_for_the_checkpoint_that_is_being_written(faulty, monkeypatch):
    """The first checkpoint is not written before somebody waits for it."""
    waited = threading.Event()
    finish, wait = Directory.finish, Checkpoints.wait
    monkeypatch.setattr(Directory, 'finish', lambda *arguments: (waited.wait(60), finish(*arguments))[1])
    monkeypatch.setattr(Checkpoints, 'wait', lambda checkpoints: (waited.set(), wait(checkpoints))[1])
    monkeypatch.setattr(Poisoned, 'bad', range(7, 10))
    progress = Quiet()
    values = faulty | {'checkpoint': {'every': 6}}
    monkeypatch.setattr('pretrax.run.loop.save', lambda *a: (saving.save(*a), waited.clear()))
    pretrain(config_from_values(values), progress=progress)
    assert any('rolling back to step 6, ' in line for line in progress.said), progress.said


def test_a_checkpoint_with_a_non_finite_optimizer_state_is_not_good(faulty, monkeypatch):
    """As when the squares of large finite gradients overflow: the steps are taken, and the state is spoiled."""
    monkeypatch.setattr(Overflow, 'step', 6)
    values = faulty | {
        'optimizer': {'name': 'overflow', 'learning_rate': 1e-2}, 'schedule': {'name': 'constant'},
    }  # fmt: skip
    progress = Quiet()
    pretrain(config_from_values(values | {'steps': 8}), progress=progress)
    assert any('optimizer state of step 6 have non-finite values' in line for line in progress.said), progress.said
    directory = Path(faulty['run_dir']) / 'checkpoints'
    assert [read_description(directory, step)['finite_state'] for step in (3, 8)] == [True, False]

    monkeypatch.setattr(Overflow, 'step', -1)
    again = Quiet()
    pretrain(config_from_values(values), progress=again)
    assert any('the state of step 8 has non-finite values: its checkpoint is not used' in line for line in again.said)
    assert any('resuming from step 3' in line for line in again.said)
    assert any('rolling back to step 6, ' in line for line in again.said), 'step 6 was written again'
    assert {read_description(directory, step)['finite_state'] for step in steps_in(directory)} == {True}


def test_a_rollback_passes_over_a_damaged_checkpoint_and_removes_nothing_before_one_is_restored(faulty):
    directory = Path(faulty['run_dir']) / 'checkpoints'

    def damage(steps):
        for step in steps:
            [array] = (directory / str(step) / 'state').glob('weights.bias/0')
            array.write_bytes(bytes(len(array.read_bytes())))

    progress = At(10, lambda: damage([6]))
    pretrain(config_from_values(faulty), progress=progress)
    assert any(f'WARNING: the checkpoint {directory / "6"} is damaged' in line for line in progress.said)
    assert any('rolling back to step 3, ' in line for line in progress.said), progress.said

    values = faulty | {'run_dir': faulty['run_dir'] + '-2'}
    directory = Path(values['run_dir']) / 'checkpoints'
    with pytest.raises(UserError, match=r'none of the . checkpoints in .* is readable'):
        pretrain(config_from_values(values), progress=At(10, lambda: damage([3, 6])))
    assert {3, 6} <= set(steps_in(directory))


def test_without_a_checkpoint_a_rollback_starts_over(faulty, monkeypatch):
    monkeypatch.setattr(Poisoned, 'bad', range(2))
    values = faulty | {'faults': {'rollback_after': 2}, 'checkpoint': {'every': 100}}
    progress = Quiet()
    result = pretrain(config_from_values(values), progress=progress)
    assert any('rolling back to step 0, continuing with batch 3' in line for line in progress.said)
    assert (int(result.state.step), int(result.state.batch)) == (14, 17)
