"""Loss, every gradient and two AdamW steps equal the plain reference, however the work is laid out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from pretrax.train import optimizer, schedule
from pretrax.train.groups import DEFAULT_NO_DECAY
from pretrax.train.state import abstract_state
from pretrax.train.step import Recipe, make_step
from small import GPT2, LLAMA, LLAMA4, MIXTURE, assert_same, mesh_of, random_batch, random_weights, transformer

slow, nightly = (functools.partial(pytest.param, marks=mark) for mark in (pytest.mark.slow, pytest.mark.nightly))

ROWS = 32
# A large eps: Adam divides each gradient by its size, and would turn rounding noise around a zero into a full step.
ADAM = {'b1': 0.8, 'b2': 0.9, 'eps': 1e-3}
DECAY, CLIP, RATE, STEPS = 0.1, 0.5, 0.05, 10
EVERY_TERM = {'z_loss': 0.02}
BY_NAME = {'q': 'keep', 'attention': 'keep', 'up': 'keep', 'k': 'recompute'}
BALANCED = {'balance_loss': 0.3, 'router_z_loss': 0.02, **EVERY_TERM}
FAMILIES = {
    'llama': LLAMA | EVERY_TERM,
    'gpt2': GPT2 | EVERY_TERM,
    'experts': MIXTURE | BALANCED,
    'experts by batch': MIXTURE | BALANCED | {'balance_over': 'batch', 'normalize_router': False},
    'llama4': LLAMA4 | EVERY_TERM | {'balance_loss': 0.0},
    'experts with capacity': MIXTURE | BALANCED | {'capacity': 0.75, 'shared_gate': False},
}


@functools.cache
def ground_truth(family):
    """The loss terms and gradient of the first batch, and the weights after two steps."""
    model = transformer(FAMILIES[family])
    before = random_weights(model)
    gradient_of = reference.gradient_of(model.arch)
    rule = reference.AdamW(before, [RATE / 2, RATE], weight_decay=DECAY, clip_norm=CLIP, **ADAM)
    gradient, terms = gradient_of(before, random_batch(ROWS, seed=1))
    after_one = rule.step(before, gradient)
    after_two = rule.step(after_one, gradient_of(after_one, random_batch(ROWS, seed=2))[0])
    return jax.device_get((terms, gradient, after_two))


@pytest.mark.parametrize(
    ('family', 'r', 'd', 't', 'accumulation', 'layers', 'save'),
    [
        nightly('llama', 1, 1, 1, 1, 'unroll', 'all'),
        nightly('llama', 1, 1, 1, 4, 'scan', 'none'),
        nightly('llama', 1, 1, 2, 2, 'scan', 'all'),
        nightly('llama', 1, 8, 1, 2, 'scan', 'all'),
        nightly('llama', 8, 1, 1, 4, 'unroll', 'none'),
        nightly('llama', 1, 4, 2, 1, 'unroll', 'none'),
        ('llama', 2, 2, 2, 2, 'scan', BY_NAME),
        nightly('llama', 2, 2, 2, 4, 'unroll', 'all'),
        nightly('gpt2', 1, 1, 1, 2, 'scan', BY_NAME),
        nightly('gpt2', 1, 8, 1, 1, 'unroll', BY_NAME),
        nightly('gpt2', 8, 1, 1, 1, 'scan', 'all'),
        nightly('gpt2', 1, 4, 2, 4, 'scan', 'all'),
        nightly('gpt2', 2, 2, 2, 1, 'scan', 'none'),
        nightly('experts', 1, 1, 1, 1, 'unroll', 'all'),
        nightly('experts', 1, 4, 1, 2, 'scan', 'all'),
        nightly('experts', 1, 1, 2, 2, 'scan', 'none'),
        slow('experts', 2, 2, 2, 4, 'scan', BY_NAME),
        nightly('llama4', 1, 1, 1, 2, 'unroll', 'all'),
        slow('llama4', 2, 2, 2, 2, 'scan', 'none'),
        nightly('experts by batch', 1, 2, 2, 1, 'scan', 'none'),
        nightly('experts by batch', 2, 2, 2, 4, 'scan', 'all'),
        slow('experts with capacity', 2, 2, 2, 4, 'scan', 'all'),
    ],
)
def test_equals_the_reference(family, r, d, t, accumulation, layers, save):
    terms, gradient, after_two = ground_truth(family)
    mesh = mesh_of(r, d, t)
    model = transformer(FAMILIES[family] | {'layers': layers, 'save': save}, mesh)
    rate = schedule.constant(STEPS, warmup=2)
    recipe = Recipe(
        model, optimizer.adamw(**ADAM), lambda step: RATE * rate(step), DECAY, DEFAULT_NO_DECAY, CLIP, accumulation
    )
    with jax.set_mesh(mesh):
        state = fresh_state(recipe, random_weights(model))
        step = make_step(recipe)
        first, second = random_batch(ROWS, seed=1), random_batch(ROWS, seed=2)
        state, metrics = step(state, first)
        metrics = jax.device_get(metrics)
        # After one step from zero Adam's first moment is (1 - b1) times the clipped gradient.
        scale = metrics['grad_norm'] / metrics['clipped_grad_norm'] / (1 - ADAM['b1'])
        own_gradient = jax.tree.map(lambda m: np.asarray(m) * scale, state.optimizer.mu)
        state, _ = step(state, second)

    for name, value in terms.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(metrics['loss'], sum(terms.values()), rtol=1e-6)
    length = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics['grad_norm'], length, rtol=1e-5)
    assert length > 2 * CLIP  # or clipping would go untested
    # The gradient of GPT-2's key biases is zero by softmax's invariance, hence the floor.
    assert_same(own_gradient, gradient, rtol=1e-5, floor=1e-6 * length)
    assert_same(state.weights, after_two, rtol=1e-5)


@pytest.mark.parametrize(('family', 'r', 'd', 't'), [('llama', 2, 2, 2), slow('gpt2', 1, 1, 1)])
def test_bf16_stays_near_the_reference(family, r, d, t):
    """Products in bf16, everything else in f32: the loss to three digits, gradients to a few roundings of 2^-8."""
    terms, gradient, _ = ground_truth(family)
    mesh = mesh_of(r, d, t)
    model = transformer(FAMILIES[family], mesh, dtype=jnp.bfloat16)
    recipe = Recipe(model, optimizer.sgd(), lambda step: 1.0, 0.0, DEFAULT_NO_DECAY, None, 1)
    before = random_weights(model)
    with jax.set_mesh(mesh):
        state, metrics = make_step(recipe)(fresh_state(recipe, before), random_batch(ROWS, seed=1))
    assert all(w.dtype == jnp.float32 for w in jax.tree.leaves(state.weights))
    np.testing.assert_allclose(metrics['loss'], sum(terms.values()), rtol=1e-3)
    length = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient)))
    moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before, state.weights)
    assert_same(moved, gradient, rtol=0.03, floor=1e-3 * length)


def fresh_state(recipe, weights):
    """The state before the first step, from given weights."""
    like = abstract_state(recipe)
    zeros = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), like)
    return zeros._replace(weights=jax.tree.map(lambda w, x: jax.device_put(w, x.sharding), weights, like.weights))
