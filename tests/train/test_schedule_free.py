"""Schedule-Free against the equations of its paper in plain NumPy, against Optax's own, and what a run does with it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bigram import Bigram
from pretrax import config_from_values, pretrain
from pretrax.errors import UserError
from pretrax.train import optimizer, schedule
from pretrax.train.groups import Group
from pretrax.train.state import init_state
from pretrax.train.step import Recipe, make_gradients, make_step
from pretrax.weights.trained import open_trained
from runs import Quiet, StoppedAt, lines_of
from small import LLAMA, mesh_of, random_batch, transformer

RATE, DECAY, B1, B2, EPS, WARMUP = 0.1, 0.2, 0.8, 0.9, 1e-8, 4


def recipe(model=None, **changes):
    warm = schedule.constant(100, warmup=WARMUP)
    rule = Recipe(
        model or Bigram(), optimizer.schedule_free(b1=B1, b2=B2, eps=EPS), lambda step: RATE * warm(step), DECAY, (),
        None, 1
    )  # fmt: skip
    return rule._replace(**changes)


def trees(history, field):
    return [jax.tree.map(np.float64, jax.device_get(getattr(state, field))) for state in history]


def trained(rule, batches, mesh=None):
    with jax.set_mesh(mesh or mesh_of()):
        state, step = init_state(rule, 0), make_step(rule)
        yield jax.device_get(state)
        for batch in batches:
            state, _ = step(state, batch)
            yield jax.device_get(state)


def test_weights_are_x_of_the_papers_algorithm():
    """Algorithm 1 in double precision, with a warm-up, decay at y,
    and a step that is skipped because its loss is not finite.
    """
    batches = [random_batch(8, number) for number in range(9)]
    batches[5] = dataclasses.replace(batches[5], mask=batches[5].mask * np.nan)
    history = list(trained(recipe(), batches))
    x = jax.tree.map(np.float64, history[0].weights)
    z, v = x, jax.tree.map(np.zeros_like, x)
    squares, t = 0.0, 0
    with jax.set_mesh(mesh_of()):
        gradient_at = jax.jit(lambda y, batch: make_gradients(Bigram(), 1)(y, batch)[0])
        for number, (batch, after) in enumerate(zip(batches, history[1:], strict=True)):
            if number != 5:
                t += 1
                y = jax.tree.map(lambda z, x: (1 - B1) * z + B1 * x, z, x)
                g = jax.tree.map(np.float64, gradient_at(jax.tree.map(np.float32, y), batch))
                v = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g**2, v, g)
                rate = RATE * min(1, (number + 1) / WARMUP)
                z = jax.tree.map(
                    lambda z, g, v, y, r=rate, t=t: z - r * g / (np.sqrt(v / (1 - B2**t)) + EPS) - r * DECAY * y,
                    z,
                    g,
                    v,
                    y,
                )
                squares += rate**2
                x = jax.tree.map(lambda x, z, c=rate**2 / squares: (1 - c) * x + c * z, x, z)
            for ours, theirs in zip(jax.tree.leaves(after.weights), jax.tree.leaves(x), strict=True):
                np.testing.assert_allclose(ours, theirs, atol=2e-5)
            np.testing.assert_allclose(after.optimizer.z.table, z.table, atol=2e-5)
    assert np.abs(x.table - z.table).max() > 0.05  # they are not the same


def test_it_agrees_with_optax():
    """Optax keeps y, and finds x when it is evaluated."""
    batches = [random_batch(8, number) for number in range(6)]
    rate = optax.constant_schedule(RATE)
    rule = optax.contrib.schedule_free_adamw(rate, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)
    *_, last = trained(recipe(rate=lambda step: jnp.float32(RATE)), batches)
    with jax.set_mesh(mesh_of()):
        y = init_state(recipe(), 0).weights
        state = rule.init(y)

        @jax.jit
        def step(y, state, batch):
            updates, state = rule.update(make_gradients(Bigram(), 1)(y, batch)[0], state, y)
            return optax.apply_updates(y, updates), state

        for batch in batches:
            y, state = step(y, state, batch)
    np.testing.assert_allclose(last.weights.table, optax.contrib.schedule_free_eval_params(state, y).table, atol=1e-5)


def test_frozen_weights_and_layers_keep_every_bit():
    groups = (Group(('embed', 'layers[0].*'), learning_rate_scale=0.0),)
    first, *_, last = trained(recipe(transformer(LLAMA), groups=groups), [random_batch(8, n) for n in range(3)])
    assert last.optimizer.z.embed is None
    assert np.array_equal(first.weights.embed, last.weights.embed)
    assert np.array_equal(first.weights.layers.attention.q[0], last.weights.layers.attention.q[0])
    assert not np.array_equal(first.weights.layers.attention.q[1], last.weights.layers.attention.q[1])


@pytest.mark.slow
def test_a_run_evaluates_samples_resumes_and_keeps_x(values, tmp_path):
    settings = values | {
        'optimizer': {'name': 'schedule_free', 'learning_rate': 1e-2}, 'schedule': {'name': 'constant', 'warmup': 2},
        'eval': {'every': 3, 'batches': 1}, 'checkpoint': {'every': 3},
    }  # fmt: skip
    whole = pretrain(config_from_values(settings), progress=Quiet())
    resumed = settings | {'run_dir': str(tmp_path / 'resumed')}
    pretrain(config_from_values(resumed), progress=StoppedAt(4))
    again = pretrain(config_from_values(resumed), progress=Quiet())
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(again.state), strict=True):
        assert np.array_equal(a, b)
    assert [line['step'] for line in lines_of(settings, 'val_loss')] == [3, 6]
    opened = open_trained(settings['run_dir'])
    for a, b in zip(jax.tree.leaves(opened.weights()), jax.tree.leaves(whole.state.weights), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'schedule': {'name': 'cosine'}}, 'schedule.name is cosine, .* optimizer.name=schedule_free'),
        (
            {'optimizer': {'name': 'schedule_free', 'learning_rate': 0.1, 'ema_decay': 0.9}},
            'optimizer.ema_decay is 0.9',
        ),
    ],
)
def test_what_makes_no_sense_with_an_average_is_refused(values, change, message):
    base = {'optimizer': {'name': 'schedule_free', 'learning_rate': 0.1}, 'schedule': {'name': 'constant'}}
    config_from_values(values | base)
    with pytest.raises(UserError, match=message):
        config_from_values(values | base | change)
