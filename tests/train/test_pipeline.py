"""Stages of layers over the mesh axis p: one device's loss, gradients, weights and curve; what is sent; what is refused."""

import functools

import jax
import numpy as np
import pytest

import reference
from pretrax.train import optimizer, schedule
from pretrax.train.step import DEFAULT_NO_DECAY, Recipe, make_step
from small import GPT2, LLAMA, MIXTURE, assert_same, mesh_of, random_batch, random_weights, transformer
from train.test_equivalence import ADAM, fresh_state

ROWS = 16
BALANCED = {'balance_loss': 0.3, 'router_z_loss': 0.02, 'z_loss': 0.02}
FAMILIES = {
    'llama': LLAMA | {'n_layers': 4, 'z_loss': 0.02},
    'gpt2': GPT2,  # tied, with biases and learned positions
    'experts': MIXTURE | BALANCED | {'n_layers': 4},
    'experts by batch': MIXTURE | BALANCED | {'balance_over': 'batch', 'capacity': 0.75},
}


@functools.cache
def ground_truth(family):
    """The loss terms, the gradient of the first batch and the weights after one step, in plain JAX."""
    model = transformer(FAMILIES[family])
    before = random_weights(model)

    def loss(w, batch):
        terms = reference.terms(w, batch, model.arch)
        return sum(terms.values()), terms

    gradient, terms = jax.jit(jax.grad(loss, has_aux=True))(before, random_batch(ROWS))
    after = reference.AdamW(before, [0.05], weight_decay=0.1, clip_norm=0.5, **ADAM).step(before, gradient)
    return jax.device_get((terms, gradient, after))


def recipe_of(model):
    rate = schedule.constant(100)
    return Recipe(model, optimizer.adamw(**ADAM), lambda step: 0.05 * rate(step), 0.1, DEFAULT_NO_DECAY, 0.5, 1)


def staged(family, mesh, micro_batches, **more):
    return transformer(FAMILIES[family] | more, mesh, micro_batches=micro_batches)


def one_step(model, mesh):
    """The terms, the gradient and the weights after a step."""
    with jax.set_mesh(mesh):
        recipe = recipe_of(model)
        state, metrics = make_step(recipe)(fresh_state(recipe, random_weights(model)), random_batch(ROWS))
        metrics = jax.device_get(metrics)
        scale = metrics['grad_norm'] / metrics['clipped_grad_norm'] / (1 - ADAM['b1'])
        return metrics, jax.tree.map(lambda m: np.asarray(m) * scale, state.optimizer.mu), jax.device_get(state.weights)


@pytest.mark.parametrize(
    ('family', 'mesh', 'micro_batches', 'choices'),
    [
        ('llama', {'p': 2}, 4, {'save': {'q': 'keep', 'attention': 'keep'}}),
        ('llama', {'r': 2, 'p': 4}, 8, {'save': 'none'}),
        ('gpt2', {'d': 2, 'p': 2}, 2, {'layers': 'unroll'}),
        ('experts', {'d': 2, 't': 2, 'p': 2}, 4, {'pipeline_rounds': 2, 'save': 'none'}),
        ('experts by batch', {'t': 2, 'p': 2}, 2, {}),
    ],
)
def test_equals_the_reference(family, mesh, micro_batches, choices):
    terms, gradient, after = ground_truth(family)
    mesh = mesh_of(**mesh)
    metrics, own_gradient, weights = one_step(staged(family, mesh, micro_batches, **choices), mesh)
    for name, value in terms.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-6, err_msg=name)
    length = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient)))
    assert_same(own_gradient, gradient, rtol=1e-5, floor=1e-6 * length)
    assert_same(weights, after, rtol=1e-5)
