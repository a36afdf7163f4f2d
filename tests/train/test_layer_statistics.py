"""Norms, RMS and maxima by layer and by weight, in plain numpy; and the update is the one that the step applies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bigram import Bigram
from pretrax.train import optimizer
from pretrax.train.layer_statistics import make_layer_statistics, weight_statistics
from pretrax.train.state import init_state
from pretrax.train.step import make_step
from small import LLAMA, MIXTURE, mesh_of, random_batch, transformer
from train.test_step import ROWS, recipe


def tree(seed):
    rng = np.random.default_rng(seed)
    shapes = {'embed': (5, 4), 'layers': {'q': (3, 4, 2), 'norm1': (3, 4)}}
    return jax.tree.map(lambda s: rng.normal(size=s).astype(np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))


@pytest.mark.parametrize('axes', [{}, {'d': 2, 'p': 3}], ids=['one device', 'd=2 p=3'])
def test_norms_are_those_of_all_weights_of_a_layer_and_of_each_kind(axes):
    before, gradient, after = map(tree, range(3))
    mesh = mesh_of(**axes)
    specs = {'embed': P(None, 'd'), 'layers': {'q': P('p', 'd'), 'norm1': P('p')}}  # copies count once
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    with jax.set_mesh(mesh):
        arch = transformer(LLAMA | {'n_layers': 3}).arch
        found = weight_statistics(before, gradient, after, shardings, arch)
    update = jax.tree.map(lambda a, b: a - b, after, before)
    for name, values in {'gradient': gradient, 'update': update, 'weight': before}.items():
        layers = np.concatenate([values['layers'][kind].reshape(3, -1) for kind in ('q', 'norm1')], axis=1)
        np.testing.assert_allclose(found[f'{name}_norm'], np.linalg.norm(layers, axis=1), rtol=1e-5)
        np.testing.assert_allclose(found[f'{name}_rms'], np.sqrt((layers**2).mean(axis=1)), rtol=1e-5)
        np.testing.assert_allclose(found[f'{name}_max'], np.abs(layers).max(axis=1), rtol=1e-6)
        np.testing.assert_allclose(
            found[f'{name}_norm/q'], np.linalg.norm(values['layers']['q'].reshape(3, -1), axis=1), rtol=1e-5
        )
        np.testing.assert_allclose(found[f'{name}_norm/embed'], np.linalg.norm(values['embed']), rtol=1e-5)
    ratio = np.linalg.norm(update['embed']) / np.linalg.norm(before['embed'])
    np.testing.assert_allclose(found['update_ratio/embed'], ratio, rtol=1e-5)
    np.testing.assert_allclose(found['update_ratio'], found['update_norm'] / found['weight_norm'], rtol=1e-6)


def test_a_list_of_layers_in_a_model_of_another_kind_is_not_stacked():
    tree = {'layers': {'0': np.ones((2, 3), np.float32), '1': np.ones((5, 3), np.float32)}}
    found = statistics_of(tree, tree, tree)
    assert {name for name in found if name.startswith('weight')} == {'weight_norm/layers.0', 'weight_norm/layers.1'}
    np.testing.assert_allclose(found['weight_norm/layers.1'], np.sqrt(15), rtol=1e-6)


def statistics_of(before, gradient, after, arch=None):
    """`weight_statistics` on one device."""
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        return weight_statistics(
            before, gradient, after, jax.tree.map(lambda _: NamedSharding(mesh, P()), before), arch
        )


def statistics_and_step(rule, batch, mesh):
    with jax.set_mesh(mesh):
        state = init_state(rule, 0)
        before = jax.device_get(state.weights)
        statistics = jax.device_get(make_layer_statistics(rule, 0)(state, batch, jnp.zeros(ROWS, jnp.int32)))
        state, metrics = make_step(rule)(state, batch)
        return before, statistics, *jax.device_get((state.weights, metrics))


def test_a_model_without_layers_has_norms_by_weight_and_the_update_is_that_of_the_step():
    rule = recipe(Bigram(), optimizer.adamw(), decay=0.1, clip=0.01)
    before, found, after, metrics = statistics_and_step(rule, random_batch(ROWS), mesh_of(d=2))
    assert {name.partition('/')[0] for name in found} == {'gradient_norm', 'update_norm', 'weight_norm', 'update_ratio'}
    assert {name.partition('/')[2] for name in found} == {'table', 'bias'}
    for kind in ('table', 'bias'):
        moved = np.linalg.norm(getattr(after, kind) - getattr(before, kind))
        np.testing.assert_allclose(found[f'update_norm/{kind}'], moved, rtol=1e-4)
    norm = np.hypot(found['gradient_norm/table'], found['gradient_norm/bias'])
    np.testing.assert_allclose(norm, metrics['grad_norm'], rtol=1e-5)
    assert metrics['grad_norm'] > 2 * metrics['clipped_grad_norm']  # so the statistics are those before clipping


def test_layers_that_differ_count_the_weights_that_they_have():
    """Layers 0 and 2 have an `up`, layer 1 a `router`; in plain numpy, layer by layer."""
    arch = transformer(MIXTURE | {'n_layers': 3, 'dense_layers': (0, 2)}).arch
    rng = np.random.default_rng(0)
    before, gradient, after = (
        {
            'layers': {
                name: rng.normal(size=(n, 4)).astype(np.float32) for name, n in (('q', 3), ('up', 2), ('router', 1))
            }
        }
        for _ in range(3)
    )
    found = statistics_of(before, gradient, after, arch)
    for name, tree in (('gradient', gradient), ('weight', before)):
        q, up, router = (tree['layers'][weight] for weight in ('q', 'up', 'router'))
        layers = [np.concatenate(parts) for parts in ((q[0], up[0]), (q[1], router[0]), (q[2], up[1]))]
        norms = np.array([np.linalg.norm(layer) for layer in layers])
        np.testing.assert_allclose(found[f'{name}_norm'], norms, rtol=1e-5)
        rms = np.array([np.sqrt(np.mean(layer**2)) for layer in layers])
        np.testing.assert_allclose(found[f'{name}_rms'], rms, rtol=1e-5)
        np.testing.assert_allclose(found[f'{name}_max'], [np.abs(layer).max() for layer in layers], rtol=1e-5)
        router_norm = np.array([np.nan, np.linalg.norm(router), np.nan])
        np.testing.assert_allclose(found[f'{name}_norm/router'], router_norm, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('axes', [{}, {'d': 2, 't': 2, 'p': 2}], ids=['alone', 'd2 t2 p2'])
def test_the_gradient_of_a_decoder_by_layer_adds_up_to_that_of_the_step(axes):
    model = transformer(LLAMA, mesh_of(**axes), micro_batches=axes.get('p', 1))
    rule = recipe(model, optimizer.adamw(), decay=0.1, clip=1.0)
    before, found, after, metrics = statistics_and_step(rule, random_batch(ROWS), mesh_of(**axes))
    whole = [found[f'gradient_norm/{name}'] for name in ('embed', 'norm', 'unembed')] + list(found['gradient_norm'])
    np.testing.assert_allclose(np.linalg.norm(whole), metrics['grad_norm'], rtol=1e-5)
    moved = (after.layers.attention.q - before.layers.attention.q).reshape(2, -1)
    np.testing.assert_allclose(found['update_norm/q'], np.linalg.norm(moved, axis=1), rtol=1e-3)
