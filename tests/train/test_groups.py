"""Learning rates and decays by pattern, and frozen weights: which weights, and how they move, compared with Optax."""

import fnmatch

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pretrax.errors import UserError
from pretrax.train import optimizer
from pretrax.train.groups import Group, weight_settings
from pretrax.train.state import abstract_state, init_state
from pretrax.train.step import Recipe, make_gradients, make_step
from small import LLAMA, assert_same, mesh_of, random_batch, random_weights, transformer

MODEL = LLAMA | {'n_layers': 4, 'd_model': 16, 'd_ff': 24, 'n_heads': 4, 'n_kv_heads': 4, 'layers': 'scan'}
RATE, STEPS = 0.02, 3
FREEZE = Group(('embed', 'layers.q*'), 0.0, key='optimizer.freeze')
SLOWER = Group(('layers.norm*', 'layers.[kv]'), 0.1, 0.3)


def settings_by_name(*groups, weight_decay=0.2, no_decay=('*norm*',)):
    with jax.set_mesh(mesh_of()):
        model = transformer(MODEL)
        weights = model.abstract()
    settings = weight_settings(weights, weight_decay, no_decay, groups, arch=model.arch)
    return {
        jax.tree_util.keystr(path, simple=True, separator='.'): setting
        for (path, _), setting in zip(
            jax.tree_util.tree_leaves_with_path(weights),
            jax.tree.leaves(settings, is_leaf=lambda x: hasattr(x, 'is_frozen')),
            strict=True,
        )
    }


def test_the_first_group_that_matches_counts():
    found = settings_by_name(FREEZE, Group(('*',), 0.5), Group(('norm',), 7.0, 9.0))
    assert {name for name, one in found.items() if one.is_frozen} == {'embed', 'layers.q'}
    assert {one.scale for one in found.values() if not one.is_frozen} == {0.5}
    assert found['norm'].decay == 0.0  # as no_decay says
    assert found['layers.o'].decay == 0.2
    assert settings_by_name(SLOWER)['layers.norm1'][:2] == (0.1, 0.3)


@pytest.mark.parametrize(
    ('pattern', 'layers'),
    [
        ('layers[1:3].*', [1, 2]), ('layers[:2].*', [0, 1]), ('layers[-1].*', [3]), ('layers[2:].*', [2, 3]),
        ('layers[0].*', [0]), ('layers[:-1].*', [0, 1, 2]),
    ],
)  # fmt: skip
def test_layers_are_chosen_as_python_slices_a_list(pattern, layers):
    found = settings_by_name(Group((pattern,), 0.0, 0.7))
    for name, one in found.items():
        if name.startswith('layers.'):
            assert np.flatnonzero(one.scale.ravel() == 0).tolist() == layers
            assert one.scale.shape == (4, *(1,) * (one.scale.ndim - 1))
            assert not one.is_frozen
        else:
            assert one.scale == 1.0
    matrix = found['layers.q'].decay
    assert [matrix[i].item() == pytest.approx(0.7) for i in range(4)] == [i in layers for i in range(4)]


def test_layers_are_those_of_the_decoder_where_only_some_have_a_weight():
    """Layer 0 is dense: row i of an expert's weight belongs to layer i + 1."""
    mixed = LLAMA | {
        'n_layers': 4,
        'd_ff': 16,
        'd_ff_dense': 32,
        'n_experts': 4,
        'experts_per_token': 2,
        'dense_layers': (0,),
    }
    with jax.set_mesh(mesh_of()):
        model = transformer(mixed)
        weights = model.abstract()
    layers = weight_settings(weights, 0.0, (), [Group(('layers[:2].*',), 0.0)], arch=model.arch).layers
    assert np.ravel(layers.attention.q.scale).tolist() == [0, 0, 1, 1]
    assert np.ravel(layers.experts.expert_up.scale).tolist() == [0, 1, 1]
    assert layers.feed_forward.up.is_frozen  # it has layer 0 alone


def test_a_model_without_stacked_layers_has_no_layers_to_slice():
    """A Flax module with a list of layers: rows of its kernels are not layers."""
    weights = {'layers': {'0': {'kernel': np.ones((4, 4))}, '1': {'kernel': np.ones((4, 4))}}}
    with pytest.raises(UserError, match=r'no weight of this model is stacked\n.*layers\.0'):
        weight_settings(weights, 0.1, groups=[Group(('layers[0].*',), 0.0, key='optimizer.freeze')], arch=None)
    settings = weight_settings(weights, 0.1, groups=[Group(('layers.0.*',), 0.0)], arch=None)
    assert [settings['layers'][i]['kernel'].scale for i in '01'] == [0.0, 1.0]


@pytest.mark.parametrize(
    ('group', 'message'),
    [
        (Group(('embde',), 0.0, key='optimizer.freeze'),
        r"optimizer.freeze: 'embde' matches no weight; did you mean embed"),
        (Group(('layers.qq',), key='optimizer.groups[1].match'),
        r"groups\[1\].match: 'layers.qq' .* did you mean layers.q"),
        (Group(('layers[4:].q',)), r"'layers\[4:\].q' matches no weight; did you mean layers.q(.|\n)*in layers 0 to 3"),
        (Group(('layers[0].embed',)), 'matches no weight'),
        (Group(('*',), 0.0), 'every weight is frozen'),
    ],
)  # fmt: skip
def test_mistakes_are_refused_before_training(group, message):
    with jax.set_mesh(mesh_of()), pytest.raises(UserError, match=message) as error:
        abstract_state(recipe(mesh_of(), [group]))
    assert len(str(error.value).splitlines()) <= 2


def recipe(mesh, groups=(), direction=None, *, options=None, clip=None, micro_batches=1, **more):
    model = transformer(MODEL | (options or {}), mesh, micro_batches=micro_batches)
    rule = direction or optimizer.adamw(eps=1e-3)
    return Recipe(model, rule, lambda step: jnp.float32(RATE), 0.1, ('*norm*',), clip, 1, groups=tuple(groups), **more)


def train(recipe, mesh, steps=STEPS):
    """The state after some steps from weights with nothing special about them."""
    weights = random_weights(recipe.model)
    with jax.set_mesh(mesh):
        like = abstract_state(recipe).weights
        placed = jax.tree.map(lambda w, at: jax.device_put(w, at.sharding), weights, like)
        state, step = init_state(recipe, 0, placed), make_step(recipe)
        for number in range(steps):
            state, metrics = step(state, random_batch(8, number))
    return weights, jax.device_get(state), jax.device_get(metrics)


def by_optax(labels, rules, weights, *, clip=None):
    """Weights after the steps on one device, moved by `optax.multi_transform`."""
    mesh = mesh_of()
    rule = recipe(mesh)
    moves = optax.multi_transform(rules, labels)
    if clip:
        frozen = jax.tree.map(lambda label: label == 'frozen', labels)
        moves = optax.chain(optax.masked(optax.set_to_zero(), frozen), optax.clip_by_global_norm(clip), moves)
    with jax.set_mesh(mesh):
        gradients = jax.jit(make_gradients(rule.model, 1))
        state, update, apply = moves.init(weights), jax.jit(moves.update), jax.jit(optax.apply_updates)
        for number in range(STEPS):
            updates, state = update(gradients(weights, random_batch(8, number))[0], state, weights)
            weights = apply(weights, updates)
    return jax.device_get(weights)


def adamw_of_optax(rate, decay):
    """Clipping is ours: Optax's divides by max(norm, 1) without an epsilon."""
    return optax.adamw(rate, 0.9, 0.95, 1e-3, weight_decay=decay)


def labelled(weights, patterns):
    """The first label with a pattern that matches the name of a weight."""

    def label(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator='.')
        return next(found for found, globs in patterns.items() if any(fnmatch.fnmatch(name, glob) for glob in globs))

    return jax.tree_util.tree_map_with_path(label, weights)


@pytest.mark.parametrize('clip', [None, pytest.param(0.5, marks=pytest.mark.slow)])
def test_groups_and_frozen_weights_move_as_with_optax(clip):
    mesh = mesh_of()
    before, state, metrics = train(recipe(mesh, [FREEZE, SLOWER], clip=clip), mesh)
    labels = labelled(
        before, {'frozen': FREEZE.match, 'slower': SLOWER.match, 'undecayed': ['*norm*'], 'others': ['*']}
    )
    rules = {
        'frozen': optax.set_to_zero(),
        'slower': adamw_of_optax(RATE * 0.1, 0.3),
        'undecayed': adamw_of_optax(RATE, 0.0),
        'others': adamw_of_optax(RATE, 0.1),
    }
    assert_same(state.weights, by_optax(labels, rules, before, clip=clip), rtol=1e-4)
    assert np.array_equal(state.weights.embed, before.embed)
    assert np.array_equal(state.weights.layers.attention.q, before.layers.attention.q)
    if clip:
        assert metrics['grad_norm'] > clip  # that of the weights that are trained


def test_frozen_weights_have_no_optimizer_state():
    with jax.set_mesh(mesh_of()):
        every, fewer = (abstract_state(recipe(mesh_of(), groups)) for groups in ([], [FREEZE]))
    assert fewer.optimizer.mu.embed is fewer.optimizer.nu.layers.attention.q is None
    saved = every.weights.embed.size + every.weights.layers.attention.q.size
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(state.optimizer)) for state in (every, fewer)]
    assert sizes[0] - sizes[1] == 2 * saved


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=pytest.mark.slow) for name in ('adafactor', 'sgd', 'muon')] + ['lion']
)
def test_every_optimizer_leaves_frozen_weights_alone(name):
    mesh = mesh_of()
    first_half = Group(('layers[:2].*',), 0.0)
    before, state, _ = train(recipe(mesh, [FREEZE, first_half], getattr(optimizer, name)()), mesh, 2)
    assert np.array_equal(state.weights.embed, before.embed)
    for name, w in state.weights.layers.named().items():
        same = w == before.layers.named()[name]
        assert same[:2].all()
        assert same.all() == (name == 'q')


@pytest.mark.parametrize(
    ('sizes', 'options'),
    [
        pytest.param({'d': 2, 't': 2, 'r': 2}, {}, marks=pytest.mark.slow),
        pytest.param({'p': 2, 'd': 2}, {}, marks=pytest.mark.slow),
        pytest.param({'p': 2, 'd': 2}, {'pipeline_schedule': '1f1b'}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_mesh_does_not_change_what_is_frozen(sizes, options):
    groups = [Group(('embed', 'layers[:1].*', 'layers[2].q'), 0.0), Group(('layers[3].*',), 0.3)]
    _, expected, _ = train(recipe(mesh_of(), groups), mesh_of())
    mesh = mesh_of(**sizes)
    before, state, _ = train(recipe(mesh, groups, options=options, micro_batches=sizes.get('p', 1)), mesh)
    assert_same(state.weights, expected.weights, rtol=1e-3)
    assert np.array_equal(state.weights.embed, before.embed)
    assert np.array_equal(state.weights.layers.feed_forward.up[:1], before.layers.feed_forward.up[:1])
    assert not np.array_equal(state.weights.layers.feed_forward.up[1:2], before.layers.feed_forward.up[1:2])


def test_gradients_of_frozen_weights_are_not_computed():
    """Without those of the layers' matrices, the backward pass has half the products."""

    def products(groups):
        rule = recipe(mesh_of(), groups, options={'layers': 'unroll'})
        with jax.set_mesh(mesh_of()):
            lowered = make_step(rule).lower(abstract_state(rule), random_batch(8))
        return lowered.cost_analysis()['flops']

    all_trained, none_trained = products([]), products([Group(('layers.*', 'embed'), 0.0)])
    assert none_trained < 0.75 * all_trained
