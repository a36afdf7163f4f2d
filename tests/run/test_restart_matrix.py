"""A state written on so many devices goes on, on so many others, as it would have on the first ones.

The same for processes: `test_processes.py::test_one_stream_of_tokens_whatever_number_of_processes_resumes`.
"""

import jax
import numpy as np
import pytest

from checkpoint.test_store import DESCRIPTION, recipe
from pretrax.checkpoint import Checkpoints, restore
from pretrax.train.state import abstract_state, init_state
from pretrax.train.step import make_step
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
