"""The simulated islands of benchmarks/federation.py compute what the papers say."""

import jax
import numpy as np
import pytest

from benchmark_scripts import benchmark_script


@pytest.fixture(scope='module')
def script():
    module = benchmark_script('federation')
    module.__dict__['MESH'] = ['mesh.r=1', 'mesh.d=8']  # the devices that tests simulate
    return module


def test_islands_that_meet_in_every_step_without_momentum_average_their_weights(script, monkeypatch):
    """With an outer rate of 1, theta is the mean of the weights of the islands."""
    monkeypatch.setattr(script, 'OUTER_RATE', 1.0)
    monkeypatch.setattr(script, 'OUTER_MOMENTUM', 0.0)
    case = script.Case(2, 4, power=-8)
    run = script.Trainer(4)._prepare(case)
    with jax.set_mesh(run.mesh):
        federation = script.Islands(run, case)
        weights, sent, read = federation.train(script.Trainer(4)._step(run))
        alone = [script.numpy_of(state.weights) for state in federation.states]
    for name, theta in script.numpy_of(weights).items():
        np.testing.assert_allclose(theta, (alone[0][name] + alone[1][name]) / 2, rtol=1e-5, atol=1e-6)
        assert not np.array_equal(alone[0][name], alone[1][name])
    assert sent == read == 4 * sum(x.size for x in alone[0].values())


@pytest.mark.parametrize(('encoding', 'bits'), [('bf16', 16), ('int8', 8.25), ('int4', 4.25)])
def test_what_an_island_sends_is_counted(script, encoding, bits):
    case = script.Case(3, 4, encoding, 2, 1, power=-8)
    run = script.Trainer(4)._prepare(case)
    with jax.set_mesh(run.mesh):
        federation = script.Islands(run, case)
        _, sent, read = federation.train(script.Trainer(4)._step(run))
    count = sum(x.size for x in federation.theta.values())
    rounds_of_the_first_fragment = sum(federation.theta[name][rows].size for name, rows in federation._parts(0))
    assert sent == pytest.approx((count + rounds_of_the_first_fragment) * bits / 8, rel=0.01)
    assert read == 2 * sent
