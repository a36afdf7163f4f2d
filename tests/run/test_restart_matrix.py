"""A state written on so many devices goes on, on so many others, as it would have on the first ones.

The same for processes: `test_processes.py::test_one_stream_of_tokens_whatever_number_of_processes_resumes`.
"""

from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoint.test_store import DESCRIPTION, recipe
from pretrax import config_from_values, pretrain
from pretrax.checkpoint import Checkpoints, restore
from pretrax.train.state import abstract_state, init_state
from pretrax.train.step import make_step
from runs import Quiet, StoppedAt, lines_of, small_values
from small import mesh_of, random_batch

MESHES = {1: (1, 1, 1), 2: (1, 2, 1), 4: (2, 2, 1), 8: (2, 2, 2)}
FIRST, LAST = 2, 4


@pytest.fixture(scope='module')
def steps():
    """The compiled step for each number of devices."""
    found = {}
    for n, mesh in MESHES.items():
        with jax.set_mesh(mesh_of(*mesh)):
            found[n] = make_step(recipe()).lower(abstract_state(recipe()), random_batch(8, 0)).compile()
    return found


@pytest.fixture(scope='module')
def written(steps, tmp_path_factory):
    """A checkpoint of step 2 for each number of devices, and the losses of the steps after it there."""
    found = {}
    for n, mesh in MESHES.items():
        directory = tmp_path_factory.mktemp(f'from-{n}')
        with jax.set_mesh(mesh_of(*mesh)):
            state = init_state(recipe(), 0)
            for number in range(FIRST):
                state, _ = steps[n](state, random_batch(8, number))
            checkpoints = Checkpoints(directory, 1)
            checkpoints.save(FIRST, state, DESCRIPTION)
            checkpoints.close()
            found[n] = directory, go_on(steps[n], state)
    return found


def go_on(step, state):
    losses = []
    for number in range(FIRST, LAST):
        state, metrics = step(state, random_batch(8, number))
        losses.append(float(metrics['loss']))
    return losses


@pytest.mark.parametrize('after', MESHES)
@pytest.mark.parametrize('before', MESHES)
def test_a_run_goes_on_with_another_number_of_devices(before, after, steps, written):
    directory, expected = written[before]
    with jax.set_mesh(mesh_of(*MESHES[after])):
        losses = go_on(steps[after], restore(directory, FIRST, abstract_state(recipe())))
    if before == after:
        assert losses == expected  # to the last bit
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses != [losses[0]] * len(losses)


FEATURES = {
    'a delta net, an average of the weights and the usual loss': {
        'model': {'layer_types': ['delta', 'full'], 'linear_heads': 4, 'linear_d_head': 8, 'linear_d_key': 8},
        'optimizer': {'ema_decay': 0.9},
        'faults': {'spike': 6.0},
    },
    'schedule-free and a teacher': {
        'optimizer': {'name': 'schedule_free'},
        'distill': {'teacher': f'hf:{Path(__file__).parents[1] / "goldens" / "llama2"}', 'temperature': 2.0},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize('feature', FEATURES)
def test_what_a_feature_keeps_moves_to_another_mesh(feature, tmp_path):
    more = FEATURES[feature]
    values = small_values('none', tmp_path) | {'data': {'name': 'synthetic', 'vocab_size': 96}} | more
    values['schedule'] = {'name': 'constant', 'warmup': 2}
    values['model'] = {'family': 'llama', 'n_layers': 2, 'd_model': 16, 'n_heads': 2} | more.get('model', {})
    values['optimizer'] = {'learning_rate': 1e-2, 'weight_decay': 0.1} | more['optimizer']
    straight = pretrain(config_from_values(values), progress=Quiet())
    moved = values | {'run_dir': str(tmp_path / 'moved')}
    pretrain(config_from_values(moved | {'mesh': {'d': 8}}), progress=StoppedAt(3))
    resumed = pretrain(config_from_values(moved), progress=Quiet(), allow_changes=True)
    expected, found = lines_of(values), lines_of(moved)
    assert [line['step'] for line in found] == list(range(1, 7))
    for key in ('loss', 'grad_norm', 'weight_norm'):
        np.testing.assert_allclose([line[key] for line in found], [line[key] for line in expected], rtol=1e-5)
    np.testing.assert_allclose(resumed.state.usual_loss, straight.state.usual_loss, rtol=1e-5)
    for name in ('ema', 'optimizer'):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
            *(jax.device_get(getattr(one.state, name)) for one in (resumed, straight)),
        )
