"""The declared costs of updates against programs that XLA compiled, and against states that runs make."""

import jax
import jax.numpy as jnp
import optax
import pytest

from pretrax.config import from_values
from pretrax.cost.topology import parse_topology
from pretrax.model.base import weight_shardings
from pretrax.plan.plan import Planner
from pretrax.run.setup import prepare, step_facts
from pretrax.train.average import gradient_point, next_average, next_weights
from pretrax.train.groups import settings_of, trained
from pretrax.train.state import init_state

VALUES = {
    'name': 'updates', 'steps': 3, 'data': {'name': 'synthetic', 'vocab_size': 256},
    'model': {'family': 'llama', 'n_layers': 2, 'd_model': 256, 'attention': {'n_heads': 4},
              'feed_forward': {'d_ff': 512}},
    'batch': {'tokens': 512, 'sequence_length': 32}, 'schedule': {'name': 'constant'}, 'mesh': {'d': 4, 't': 2},
}  # fmt: skip


def config(mesh=None, **optimizer):
    return from_values(VALUES | {'optimizer': {'learning_rate': 1e-3} | optimizer, 'mesh': mesh or VALUES['mesh']})


@pytest.mark.parametrize(
    'optimizer',
    [
        {'name': 'lion'},
        {'name': 'adafactor'},
        {'name': 'muon', 'neuron_b2': 0.9},
        {'name': 'adamw', 'ema_decay': 0.99, 'freeze': ['layers.q']},
    ],
    ids=lambda options: options['name'],
)
def test_the_state_is_that_of_a_run_and_a_plan_without_devices_says_the_same(optimizer):
    run = prepare(config(**optimizer), lambda text: None, jax.devices()[:8])
    with jax.set_mesh(run.mesh):
        state = init_state(run.recipe, 0)
    arrays = jax.tree.leaves((state.optimizer, state.ema))
    cost = step_facts(run).update
    assert cost.state == sum(array.addressable_shards[0].data.nbytes for array in arrays)
    planner = Planner(config(**optimizer), parse_topology('v5e-8'), lambda text: None)
    assert planner.update_cost(planner.as_configured().mesh) == cost


def count_of_xla(run, what):
    """A number of XLA's cost analysis of an update, given a gradient."""

    def update(gradient, state):
        recipe, before = run.recipe, state.weights
        settings = settings_of(recipe, before)
        point = jax.lax.optimization_barrier(gradient_point(recipe.optimizer, before, state.optimizer))
        clip = jnp.minimum(1.0, 1.0 / optax.tree.norm(gradient))
        clipped = jax.tree.map(lambda g: g * clip, trained(gradient, settings))
        apply = optax.with_extra_args_support(recipe.optimizer).update
        shardings = weight_shardings(recipe.model, before)
        found = apply(clipped, state.optimizer, trained(point, settings), shardings=shardings)
        weights, optimizer = next_weights(recipe.optimizer, before, point, found, jnp.asarray(1e-3), settings)
        return (
            weights,
            optimizer,
            next_average(state.ema, weights, recipe.ema_decay, state.step),
            optax.tree.norm(weights),
        )

    with jax.set_mesh(run.mesh):
        counts = jax.jit(update).lower(run.like.weights, run.like).compile().cost_analysis()
    assert counts is not None
    return counts[what]


@pytest.mark.parametrize('mesh', [{'d': 1}, {'d': 4}], ids=str)
def test_flops_of_newton_schulz_are_those_that_xla_counts(mesh):
    run = prepare(config(mesh, name='muon', iterations=4), lambda text: None, jax.devices()[: mesh['d']])
    assert step_facts(run).update.flops == pytest.approx(count_of_xla(run, 'flops'), rel=0.03)


@pytest.mark.parametrize(
    'optimizer',
    [{'name': 'adamw'}, {'name': 'lion'}, {'name': 'schedule_free'}, {'name': 'adamw', 'ema_decay': 0.99}],
    ids=str,
)
def test_traffic_is_about_the_bytes_that_xla_counts(optimizer):
    """XLA counts a few passes less, since it does not know of the rest of the step."""
    run = prepare(config({'d': 1}, **optimizer), lambda text: None, jax.devices()[:1])
    counted = count_of_xla(run, 'bytes accessed')
    assert 0.7 < counted / step_facts(run).update.traffic < 1.05


def test_four_passes_of_rotations_and_a_tenth_of_an_improvement_are_the_work_of_soap():
    """Vyas et al. 2024, arXiv:2409.11321, algorithm 3: lines 4, 9 and 12 rotate on both sides, 13 and 14 multiply."""
    run = prepare(config({'d': 1}, name='soap'), lambda text: None, jax.devices()[:1])
    shapes = [(256, 256)] * 8 + [(256, 512)] * 6 + [(256, 256)] * 2  # q, k, v, o; gate, up, down; tables
    each = sum(4 * 2 * m * n * (m + n) + (2 + 8 / 3) * (m**3 + n**3) / 10 for m, n in shapes)
    assert step_facts(run).update.flops == pytest.approx(each)
