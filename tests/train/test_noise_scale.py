"""The noise of the gradient: exact on average over all batches,
and that of the gradients of single sequences in a decoder.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigram import Bigram
from pretrax.train import optimizer
from pretrax.train.groups import Group
from pretrax.train.noise_scale import make_noise
from pretrax.train.state import init_state
from pretrax.train.step import make_gradients
from small import LLAMA, mesh_of, random_batch, transformer
from train.test_step import by_hand, recipe


def counted(batch):
    """All targets count, so that the gradient of a batch is the mean of those of its sequences."""
    return dataclasses.replace(batch, mask=np.ones_like(batch.mask))


def rows_of(batch, rows):
    return jax.tree.map(lambda x: x[np.array(rows)], batch)


def flat(gradient):
    return np.concatenate([np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(gradient)])


@pytest.mark.parametrize('size', [2, 3])
def test_the_mean_over_all_batches_is_the_covariance_and_the_gradient_of_the_population(size):
    """The population is three sequences; every batch of two or three of them, with replacement, is equally likely."""
    population, rule = counted(random_batch(3)), recipe(Bigram(), optimizer.sgd(momentum=0.9))
    with jax.set_mesh(mesh_of()):
        state, noise = init_state(rule, 0), make_noise(rule)
        batches = [rows_of(population, rows) for rows in itertools.product(range(3), repeat=size)]
        found = np.mean([noise(state, batch) for batch in batches], axis=0)
        weights = jax.device_get(state.weights)
    gradients = np.array([flat(by_hand(weights, rows_of(population, [i]))[1]) for i in range(3)])
    expected = gradients.mean(axis=0)
    np.testing.assert_allclose(found[0], np.sum((gradients - expected) ** 2) / 3, rtol=1e-4)  # tr(Sigma)
    np.testing.assert_allclose(found[1], np.sum(expected**2), rtol=1e-4)


MESHES = [
    {},
    pytest.param({'d': 2, 't': 2}, marks=pytest.mark.slow),
    pytest.param({'p': 2, 'c': 2, 'r': 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize('axes', MESHES, ids=str)
def test_it_follows_equations_a2_and_a3_on_any_mesh(axes):
    """From the gradients of single sequences; the batch sizes of the paper are the halves and the whole."""
    batch, mesh = counted(random_batch(8)), mesh_of(**axes)
    groups = (Group(('unembed',), learning_rate_scale=0.0),)  # frozen: its gradient does not count
    with jax.set_mesh(mesh):
        rule = recipe(transformer(LLAMA, mesh, micro_batches=2 * axes.get('p', 0) or 1), optimizer.adamw())
        rule = rule._replace(groups=groups, accumulation=1 if 'p' in axes else 2)
        state = init_state(rule, 0)
        found = jax.device_get(make_noise(rule)(state, batch))
        weights = jax.device_get(state.weights)
    with jax.set_mesh(mesh_of()):
        gradient_of = jax.jit(make_gradients(transformer(LLAMA), 1))
        single = [gradient_of(weights, rows_of(batch, [i]))[0] for i in range(8)]
    single = np.array([flat(dataclasses.replace(one, unembed=None)) for one in single])
    small = np.mean([np.sum(single[half::2].mean(axis=0) ** 2) for half in range(2)])
    big = np.sum(single.mean(axis=0) ** 2)
    np.testing.assert_allclose(found.square, (8 * big - 4 * small) / (8 - 4), rtol=1e-3)
    np.testing.assert_allclose(found.trace, (small - big) / (1 / 4 - 1 / 8), rtol=1e-3)


def test_schedule_free_measures_where_its_gradient_is_taken():
    batch, rule = counted(random_batch(2)), recipe(Bigram(), optimizer.schedule_free(b1=0.5))
    with jax.set_mesh(mesh_of()):
        state, noise = init_state(rule, 0), make_noise(rule)
        z = dataclasses.replace(
            state.weights, table=state.weights.table + 1.0, bias=jnp.arange(state.weights.bias.size) * 1.0
        )
        found = noise(state._replace(optimizer=state.optimizer._replace(z=z)), batch)
        y = jax.tree.map(lambda x, z: (x + z) / 2, jax.device_get(state.weights), jax.device_get(z))
    a, b = (flat(by_hand(y, rows_of(batch, [i]))[1]) for i in range(2))
    np.testing.assert_allclose(found.square, a @ b, rtol=1e-4)
