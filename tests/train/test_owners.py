"""Whole matrices on their owners: the results, and what is sent, on meshes that shard, repeat and stack matrices."""

import math
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.hlo.parse import collectives
from pretrax.model.base import weight_shardings
from pretrax.model.weights import MATRICES, matrix_dimensions
from pretrax.train import optimizer, owners
from pretrax.train.groups import DEFAULT_NO_DECAY, Group, settings_of, without_frozen
from pretrax.train.owners import layout_of, on_owners
from pretrax.train.state import abstract_state, by_weight, init_state
from pretrax.train.step import Recipe, make_step
from pretrax.train.update_cost import update_cost
from small import GPT2, LATENT, LLAMA, MIXTURE, assert_same, mesh_of, random_batch, random_weights, transformer

SECTION = SimpleNamespace(name='muon', options=SimpleNamespace(iterations=5, precision='f32'))
MESHES = {
    'd': (LLAMA, {'d': 8}),
    'd t, three layers': (LLAMA | {'n_layers': 3}, {'d': 4, 't': 2}),
    'd e': (MIXTURE, {'d': 2, 'e': 4}),
    'd p': (LLAMA, {'d': 4, 'p': 2}),
    'r d': (LLAMA, {'r': 2, 'd': 4}),
    'r': (LLAMA, {'r': 8}),
    'd c t, latent': (LATENT, {'d': 2, 'c': 2, 't': 2}),
}


def of_matrices(tree, tables=False):
    """The weights that hold matrices, by name, with their dimensions."""
    dims = jax.tree.structure(tree).flatten_up_to(matrix_dimensions(tree, tables))
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {path: (w, each) for (path, w), each in zip(named, dims, strict=True) if each is not None}


@pytest.mark.parametrize('name', MESHES)
@pytest.mark.parametrize('chunk', [1, owners.CHUNK])
def test_each_matrix_is_whole_where_the_work_is(name, chunk, monkeypatch):
    """x -> x x^T x with NumPy's products: it commutes with permutations, and needs the whole matrix."""
    monkeypatch.setattr(owners, 'CHUNK', chunk)
    options, sizes = MESHES[name]
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        model = transformer(options, mesh, micro_batches=sizes.get('p', 1))
        weights = random_weights(transformer(options))
        known = dict(jax.tree_util.tree_leaves_with_path(weight_shardings(model, weights)))
        found = of_matrices(weights)
        layouts = [layout_of(w, dims, known[path]) for path, (w, dims) in found.items()]
        work = lambda x, _: (x @ x.mT @ x, None)  # noqa: E731
        run = jax.jit(lambda ws: on_owners(work, ws, layouts)[0])
        results = run([w for w, _ in found.values()])
    for result, (w, (inputs, outputs)) in zip(results, found.values(), strict=True):
        inputs, outputs = (d if isinstance(d, tuple) else (d,) for d in (inputs, outputs))
        batch = [i for i in range(w.ndim) if i not in (*inputs, *outputs)]
        order = [*batch, *inputs, *outputs]
        x = w.transpose(order).reshape(
            -1, math.prod(w.shape[i] for i in inputs), math.prod(w.shape[i] for i in outputs)
        )
        expected = (x @ x.swapaxes(1, 2) @ x).reshape([w.shape[i] for i in order]).transpose(np.argsort(order))
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', MESHES)
def test_an_update_of_muon_sends_each_matrix_there_and_back_and_nothing_else(name):
    """Bytes by the sizes of the arrays: 2 exchanges of the slices of a device, and a gather along idle axes."""
    options, sizes = MESHES[name]
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        recipe = Recipe(
            transformer(options, mesh, micro_batches=sizes.get('p', 1)),
            optimizer.muon(),
            jnp.float32,
            0.1,
            DEFAULT_NO_DECAY,
            1.0,
            1,
        )
        state = abstract_state(recipe)
        shardings = weight_shardings(recipe.model, state.weights)
        program = jax.jit(
            lambda g, s: recipe.optimizer.update(g, s, g, shardings=shardings),
            out_shardings=(shardings, jax.tree.map(lambda x: x.sharding, state.optimizer)),
        ).lower(state.weights, state.optimizer).compile()  # fmt: skip
    sent = Counter()
    for one in collectives(program.as_text(), dict(mesh.shape)):
        sent[one.kind, one.axes] += one.bytes * one.times
    assert sent == exchanged(state.weights, shardings, mesh)
    cost = update_cost(recipe._replace(section=SECTION), state)
    assert Counter({(one.kind, one.axes): one.bytes for one in cost.exchanges}) == sent


def exchanged(weights, shardings, mesh, tables=False):
    """{(kind, axes): bytes} of all matrices to their owners and back."""
    expected = Counter()
    for stack, n in stacks(weights, shardings, mesh, tables).items():
        taken, rows, columns = stack
        size = dict(mesh.shape)
        idle = [axis for axis in size if size[axis] > 1 and axis not in taken]
        moved = [axis for axis in size if size[axis] > 1 and axis in (*rows[1], *columns[1])]
        split = math.prod(size[axis] for axis in moved)
        sharers = math.prod(size[axis] for axis in idle)
        share = -(-n // sharers)  # matrices of a device along the idle axes
        of_slice = rows[0] * columns[0] // split * 4
        if moved:
            expected['all-to-all', tuple(moved)] += 2 * -(-share // split) * split * of_slice
        if idle:
            expected['all-gather', tuple(idle)] += share * sharers * of_slice
    return expected


def stacks(weights, shardings, mesh, tables=False):
    """{(all axes, (rows, their axes), (columns, their axes)): matrices on a device}, of matrices that go together."""
    known, found = dict(jax.tree_util.tree_leaves_with_path(shardings)), Counter()
    for path, (w, dims) in of_matrices(weights, tables).items():
        spec = [(a,) if isinstance(a, str) else tuple(a or ()) for a in known[path].spec]
        ends = []
        for axes in dims:
            axes = axes if isinstance(axes, tuple) else (axes,)
            ends.append((math.prod(w.shape[i] for i in axes), tuple(a for i in axes for a in spec[i])))
        ends.sort(key=lambda end: end[1])
        taken = tuple(sorted(a for axes in spec for a in axes))
        n = w.size // (ends[0][0] * ends[1][0])
        of_batch = math.prod(mesh.shape[a] for a in taken if a not in (*ends[0][1], *ends[1][1]))
        found[taken, *ends] += n // of_batch
    return found


def test_names_of_matrices_are_those_of_the_decoder():
    assert {path[-1].name for path in of_matrices(random_weights(transformer(LLAMA)))} <= set(MATRICES)


FROZEN = 'layers.q', 'layers[0].up', 'embed'


@pytest.mark.parametrize('rule', ['muon', pytest.param('soap', marks=pytest.mark.slow)])
def test_frozen_and_tied_weights_and_states_in_host_memory_train_alike_on_any_mesh(rule):
    """GPT-2 has one table for the embedding and the logits. A part of a stack is frozen too."""

    def train(mesh, **options):
        with jax.set_mesh(mesh):
            recipe = recipe_of(transformer(GPT2, mesh), getattr(optimizer, rule)(**OPTIONS[rule]), **options)
            state, step = init_state(recipe, 0), make_step(recipe)
            first = jax.device_get(state.weights)
            for number in range(2):
                state, metrics = step(state, random_batch(8, number))
            kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.optimizer) if x.ndim}
            return first, jax.device_get(by_weight(state)), kinds, float(metrics['loss'])

    _, one, kinds, loss = train(mesh_of())
    first, many, host_kinds, same_loss = train(mesh_of(d=4, t=2), offload=('optimizer',))
    assert (kinds, host_kinds) == ({'device'}, {'pinned_host'})
    assert same_loss == pytest.approx(loss, rel=1e-5)
    pairs = zip(comparable(rule, many), comparable(rule, one), strict=True)
    for floor, (actual, expected) in zip((2e-4, 1e-6), pairs, strict=True):  # rounding alone moves the biases of keys
        assert_same(actual, expected, rtol=2e-3, floor=floor)
    for name, moved in (('q', [False, False]), ('k', [True, True]), ('up', [False, True])):
        before, after = (weights.layers.named()[name] for weights in (first, many.weights))
        assert [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)] == moved, name
    np.testing.assert_array_equal(many.weights.embed, first.embed)


def comparable(rule, state):
    """The weights and the states that are alike. A matrix has arbitrary eigenvectors where it had no gradient so far.

    So SOAP's first update of the positions, and of the wider side of up and down, is arbitrary too.
    """
    if rule == 'muon':
        return state.weights, state.optimizer
    weights = {name: state.weights.layers.named()[name] for name in ('q', 'k', 'v', 'o')}
    return weights, (state.optimizer.m, state.optimizer.left, state.optimizer.right)


OPTIONS = {'muon': {}, 'soap': {'eps': 1e-3}}


def recipe_of(model, rule, **options):
    frozen = (Group(FROZEN, 0.0),)
    return Recipe(model, rule, lambda step: jnp.float32(1e-2), 0.1, DEFAULT_NO_DECAY, 1.0, 1, groups=frozen, **options)


def test_frozen_weights_are_not_exchanged():
    """Bytes of all exchanges of an update with q frozen: those of all weights, less those of q."""
    mesh, sent = mesh_of(d=4, t=2), {}
    with jax.set_mesh(mesh):
        for freeze in (False, True):
            recipe = recipe_of(transformer(GPT2 | {'n_layers': 8}, mesh), optimizer.muon())
            recipe = recipe._replace(groups=(Group(('layers.q',), 0.0),) if freeze else ())
            state = abstract_state(recipe)
            weights = without_frozen(state.weights, settings_of(recipe, state.weights))
            shardings = weight_shardings(recipe.model, state.weights)
            run = jax.jit(lambda g, s, r=recipe, k=shardings: r.optimizer.update(g, s, g, shardings=k))
            program = run.lower(weights, state.optimizer).compile().as_text()
            sent[freeze] = sum(
                x.bytes * x.times for x in collectives(program, dict(mesh.shape)) if 'all-to-all' in x.kind
            )
    assert sent[False] - sent[True] == 2 * 4 * state.weights.layers.attention.q.size // mesh.size
