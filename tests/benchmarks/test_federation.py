"""The simulated islands of benchmarks/federation.py compute what the papers say."""

import jax
import numpy as np
import pytest

from benchmark_scripts import benchmark_script
from pretrax.train.state import init_state


@pytest.fixture(scope='module')
def script():
    module = benchmark_script('federation')
    module.__dict__['MESH'] = ['mesh.r=1', 'mesh.d=8']  # the devices that tests simulate
    return module


def trained(script, case):
    """The islands after training, and what `train` returned."""
    run = script.prepared(case)
    with jax.set_mesh(run.mesh):
        islands = script.Islands(run, case, init_state(run.recipe, case.seed))
        return islands, islands.train()


def test_islands_that_meet_in_every_step_without_momentum_average_their_weights(script):
    """With an outer rate of 1, theta is the mean of the weights of the islands."""
    case = script.Case(2, 4, power=-8, steps=4, outer_rate=1.0, outer_momentum=0.0)
    islands, (weights, sent, read) = trained(script, case)
    alone = [script.numpy_of(state.weights) for state in islands.states]
    for name, theta in script.numpy_of(weights).items():
        np.testing.assert_allclose(theta, (alone[0][name] + alone[1][name]) / 2, rtol=1e-5, atol=1e-6)
        assert not np.array_equal(alone[0][name], alone[1][name])
    assert sent == read == 4 * sum(x.size for x in alone[0].values())


@pytest.mark.parametrize(('encoding', 'bits'), [('bf16', 16), ('int8', 8.25), ('int4', 4.25)])
def test_what_an_island_sends_is_counted(script, encoding, bits):
    islands, (_, sent, read) = trained(script, script.Case(3, 4, encoding, 2, 1, power=-8, steps=4))
    count = sum(x.size for x in islands.theta.values())
    rounds_of_the_first_fragment = sum(islands.theta[name][rows].size for name, rows in islands._parts(0))
    assert sent == pytest.approx((count + rounds_of_the_first_fragment) * bits / 8, rel=0.01)
    assert read == 2 * sent


def test_a_federation_of_trained_weights_begins_with_those_of_the_earlier_run(script, monkeypatch):
    case = script.Case(2, 4, power=-8, steps=4, start=3)
    begun = []
    monkeypatch.setattr(
        script.Islands, 'train', lambda self: begun.append(self.theta) or (self.states[0].weights, 0, 0)
    )
    script.train(case)
    monkeypatch.undo()
    earlier = script.prepared(script.Case(1, 0, power=script.START_POWER, seed=1000, steps=3), 'constant')
    with jax.set_mesh(earlier.mesh):
        first = init_state(earlier.recipe, 0)
        begin, end = script.numpy_of(first.weights), script.numpy_of(script.trained_alone(earlier, first))
    for name, theta in begun[0].items():
        np.testing.assert_array_equal(theta, end[name])
        assert not np.array_equal(theta, begin[name]), name
