"""`init_from: {path, optimizer, step, partial}`, and restoring the newest readable checkpoint."""

from pathlib import Path

import jax
import numpy as np
import pytest

from pretrax import config_from_values, pretrain
from pretrax.checkpoint import steps_in, verify
from pretrax.errors import UserError
from pretrax.observe.metrics import read_metrics
from pretrax.run.setup import prepare
from pretrax.weights.warm_start import warm_state
from runs import BIGRAM, Quiet, small_values, write_documents


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A run of three steps of the bigram model, and its configuration."""
    directory = tmp_path_factory.mktemp('trained')
    values = small_values(write_documents(directory), directory)
    values |= {'model': BIGRAM, 'schedule': {'name': 'constant'}, 'mesh': {'r': 2, 'd': 2, 't': 2}}
    tokens = directory / 'run' / 'data'
    pretrain(config_from_values(values | {'steps': 3}), progress=Quiet())
    return directory / 'run', values | {'data': {'tokens': str(next(tokens.glob('tokens-*')))}}


def losses(directory):
    return {line['step']: line['loss'] for line in read_metrics(Path(directory) / 'metrics.jsonl')}


def test_with_optimizer_and_step_a_run_continues_like_the_other_run(trained, tmp_path):
    """Bit by bit, and with the batches after those of the other; with weights alone it does not."""
    run, values = trained
    pretrain(config_from_values(values | {'run_dir': str(tmp_path / 'straight')}), progress=Quiet())
    straight = losses(tmp_path / 'straight')
    start = {'path': str(run), 'optimizer': True, 'step': True}
    progress = Quiet()
    again = values | {'run_dir': str(tmp_path / 'again'), 'init_from': start}
    result = pretrain(config_from_values(again), progress=progress)
    assert losses(tmp_path / 'again') == {step: straight[step] for step in (4, 5, 6)}
    assert int(result.state.step) == 6
    assert any('the optimizer is restored; the next step is 4' in line for line in progress.said)

    start_of_weights = {'path': str(run), 'step': True}
    weights_alone = values | {'run_dir': str(tmp_path / 'weights'), 'init_from': start_of_weights}
    pretrain(config_from_values(weights_alone), progress=Quiet())
    found = losses(tmp_path / 'weights')
    assert found[4] == straight[4]
    assert found[5] != straight[5]  # the moments were not there for step 4

    with pytest.raises(UserError, match='is at step 3, and steps = 3 counts'):
        pretrain(config_from_values(again | {'run_dir': str(tmp_path / 'short'), 'steps': 3}), progress=Quiet())
    with pytest.raises(UserError, match='does not match the model or optimizer') as refusal:
        other = again | {'run_dir': str(tmp_path / 'lion'), 'optimizer': {'name': 'sgd', 'learning_rate': 1e-2}}
        pretrain(config_from_values(other), progress=Quiet())
    assert 'optimizer' in str(refusal.value)


def test_a_partial_start_takes_the_weights_that_fit_and_reports_them(trained, tmp_path):
    """A bigram model of one token more: the table has another shape, the bias has not."""
    run, values = trained
    changes = {'run_dir': str(tmp_path / 'other'), 'model': {'name': 'bigram-of-another-table'}}
    changes |= {'init_from': {'path': str(run), 'partial': True}}
    prepared = prepare(config_from_values(values | changes), lambda text: None)
    said = []
    with jax.set_mesh(prepared.mesh):
        state = jax.device_get(warm_state(prepared.config.init_from, prepared, said.append))
        fresh = jax.device_get(prepared.recipe.model.init(jax.random.fold_in(jax.random.key(0), 0)))
    theirs = prepare(config_from_values(values | {'init_from': str(run)}), lambda text: None)
    with jax.set_mesh(theirs.mesh):
        whole = jax.device_get(warm_state(str(run), theirs, lambda text: None))
    np.testing.assert_array_equal(state.weights.bias, whole.weights.bias)
    np.testing.assert_array_equal(state.weights.table, fresh.table)
    assert any('1 of 2 weights' in line for line in said), said
    assert any('table is drawn: ' in line for line in said), said


@pytest.mark.parametrize(
    ('start', 'message'),
    [
        ({'path': 'hf:somewhere', 'optimizer': True}, 'has only weights\nleave out init_from.optimizer'),
        ({'optimizer': True}, 'init_from.path'),
        ({'path': 'runs/a', 'optimiser': True}, 'init_from.optimiser is not a key that exists'),
        ({'path': 'runs/a', 'step': 3}, 'init_from.step is 3'),
    ],
)
def test_wrong_options_of_init_from_are_refused(trained, start, message):
    _, values = trained
    with pytest.raises(UserError, match=message):
        config = config_from_values(values | {'init_from': start})
        warm_state(config.init_from, prepare(config, lambda text: None), print)


def test_an_unreadable_checkpoint_is_reported_and_the_previous_one_restored(small):
    values = small | {'checkpoint': {'every': 2}}
    pretrain(config_from_values(values), progress=Quiet())
    directory = Path(small['run_dir']) / 'checkpoints'
    before = read_metrics(directory.parent / 'metrics.jsonl')
    [array] = (directory / '6' / 'state').glob('weights.bias/0')
    array.write_bytes(array.read_bytes()[:-1])
    progress = Quiet()
    pretrain(config_from_values(values), progress=progress)
    assert any(line.startswith(f'WARNING: the checkpoint {directory / "6"} is damaged') for line in progress.said)
    assert any('resuming from step 4' in line for line in progress.said)
    after = read_metrics(directory.parent / 'metrics.jsonl')
    assert [line['loss'] for line in after] == [line['loss'] for line in before]

    verify(directory, 6)  # it was written again
    for step in steps_in(directory):
        (directory / str(step) / 'manifest.json').unlink()
    with pytest.raises(UserError, match=r'none of the 3 checkpoints in .* is readable'):
        pretrain(config_from_values(values), progress=Quiet())
