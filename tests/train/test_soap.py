"""SOAP against the authors' algorithm in plain NumPy, in double precision; and how its state is sharded."""

import contextlib
import dataclasses
import math
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.checkpoint import Checkpoints, restore
from pretrax.hlo.parse import collectives
from pretrax.model.base import weight_shardings
from pretrax.model.weights import MATRICES, Layer, matrix_dimensions
from pretrax.train import optimizer, owners
from pretrax.train.soap import SoapState
from pretrax.train.state import abstract_state, at_owners, by_weight, init_state
from pretrax.train.step import Recipe, make_step
from pretrax.train.update_cost import update_cost
from small import LLAMA, MIXTURE, assert_same, mesh_of, random_batch, random_weights, transformer
from train.test_owners import MESHES, exchanged

B1, B2, EPS = 0.9, 0.8, 1e-8
SECTION = SimpleNamespace(name='soap', options=SimpleNamespace(max_precond_dim=10000, precondition_frequency=10))


class Soap:
    """One weight of two dimensions, or of one, which Adam updates. Written from the authors' soap.py, step by step."""

    def __init__(self, gradient, every, widest=10000, bases=None):
        self.every, self.t, self.number = every, 0, 0  # the number of this matrix among those of all weights
        self.m, self.v = np.zeros_like(gradient), np.zeros_like(gradient)
        is_matrix = gradient.ndim == 2
        self.precondition = [is_matrix and n <= widest for n in gradient.shape]
        self.products = [np.zeros((n, n)) for n in gradient.shape]
        self.accumulate(gradient)
        self.bases = [np.linalg.eigh(p)[1][:, ::-1] for p in self.products] if bases is None else bases

    def accumulate(self, g):
        for axis, wanted in enumerate(self.precondition):
            if wanted:
                product = g @ g.T if axis == 0 else g.T @ g
                self.products[axis] = B2 * self.products[axis] + (1 - B2) * product

    def project(self, x, back=False):
        for axis, wanted in enumerate(self.precondition):
            if wanted:
                q = self.bases[axis] if back else self.bases[axis].T
                x = np.moveaxis(np.tensordot(q, x, axes=(1, axis)), 0, axis)
        return x

    def step(self, g):
        self.t += 1
        self.m = B1 * self.m + (1 - B1) * g
        self.v = B2 * self.v + (1 - B2) * self.project(g) ** 2
        step_size = np.sqrt(1 - B2**self.t) / (1 - B1**self.t)
        direction = step_size * self.project(self.project(self.m) / (np.sqrt(self.v) + EPS), back=True)
        self.accumulate(g)
        if (self.t + self.number) % self.every == 0:
            for axis, wanted in enumerate(self.precondition):
                if wanted:
                    q, p = self.bases[axis], self.products[axis]
                    order = np.argsort(-np.diag(q.T @ p @ q))
                    self.v = np.take(self.v, order, axis=axis)
                    self.bases[axis] = np.linalg.qr(p @ q[:, order])[0]
        return direction


def bases_of(state, name, index=()):
    """The first eigenvectors that our code found, which are not unique if the first gradient has no full rank."""
    found = []
    for product, basis in ((state.left, state.left_basis), (state.right, state.right_basis)):
        q = None if basis[name] is None else np.float64(basis[name][index])
        if q is not None:
            values = q.T @ np.float64(product[name][index]) @ q
            np.testing.assert_allclose(q.T @ q, np.eye(len(q)), atol=1e-5)
            np.testing.assert_allclose(values - np.diag(np.diag(values)), 0, atol=1e-5 * values.max())
            assert (np.diff(np.diag(values)) <= 1e-5 * values.max()).all()
        found.append(q)
    return found


@pytest.mark.parametrize('shape', [(5, 5), (4, 7), (9, 4), (6,)], ids=str)
@pytest.mark.parametrize('widest', [10000, 6])
def test_directions_are_those_of_the_authors_algorithm(shape, widest):
    """Seven gradients; the eigenvectors improve twice. With `widest` 6, the long sides of two shapes have none."""
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(shape) * np.geomspace(1, 0.1, shape[-1]) for _ in range(7)]
    rule = optimizer.soap(b1=B1, b2=B2, eps=EPS, precondition_frequency=3, max_precond_dim=widest)
    update = jax.jit(rule.update)
    given = [{'w': jnp.float32(g)} for g in gradients]
    first, state = update(given[0], rule.init(given[0]))
    np.testing.assert_array_equal(first['w'], 0)  # it only gives the first eigenvectors
    expected = Soap(gradients[0], 3, widest, bases_of(state, 'w') if len(shape) == 2 else None)
    for ours, theirs in zip(given[1:], gradients[1:], strict=True):
        direction, state = update(ours, state)
        np.testing.assert_allclose(direction['w'], expected.step(theirs), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(('name', 'inputs', 'outputs'), [('k', 32, 16), ('o', 32, 32), ('down', 48, 32)])
def test_each_layer_of_a_stacked_weight_is_a_matrix_of_its_own(name, inputs, outputs):
    """Heads belong to the outputs of k and to the inputs of o."""
    zeros = jax.tree.map(np.zeros_like, random_weights(transformer(LLAMA)))
    size, rng = zeros.layers.named()[name].shape, np.random.default_rng(0)
    rule = optimizer.soap(b1=B1, b2=B2, eps=EPS, precondition_frequency=2)
    update, state, expected = jax.jit(rule.update), rule.init(zeros), None
    for _ in range(4):
        matrices = rng.standard_normal((size[0], inputs, outputs))
        layers = Layer.from_named(zeros.layers.named() | {name: np.float32(matrices).reshape(size)})
        direction, state = update(dataclasses.replace(zeros, layers=layers), state)
        found = np.asarray(direction.layers.named()[name]).reshape(matrices.shape)
        if expected is None:
            each = [{'w': part.layers.named()[name]} for part in state[3:]]
            like = state._replace(**dict(zip(state._fields[3:], each, strict=True)))
            expected = [Soap(g, 2, bases=bases_of(like, 'w', (i,))) for i, g in enumerate(matrices)]
            first = next(number for w, _, number in numbered(zeros) if w is zeros.layers.named()[name])
            for i, one in enumerate(expected):
                one.number = first + i
        else:
            by_layer = [one.step(g) for one, g in zip(expected, matrices, strict=True)]
            np.testing.assert_allclose(found, by_layer, rtol=5e-3, atol=5e-3)


def test_only_matrices_and_tables_have_preconditioners_which_checkpoints_have_by_weight():
    mesh = mesh_of(d=2, t=2, e=2)
    with jax.set_mesh(mesh):
        like = by_weight(abstract_state(recipe(MIXTURE, mesh, optimizer.soap(max_precond_dim=64))).optimizer)
    assert like.left.embed is None  # wider than 64
    assert like.right.embed.shape == (32, 32)
    assert like.right.embed.sharding.shard_shape((32, 32)) == (4, 32)
    expert_up = like.left.layers.experts.expert_up
    assert expert_up.shape == (2, 4, 32, 32)
    assert expert_up.sharding.shard_shape(expert_up.shape) == (2, 2, 8, 32)
    with_one = {path[-1].name for path, _ in jax.tree_util.tree_leaves_with_path((like.left, like.right))}
    assert with_one <= MATRICES.keys() | {'embed', 'unembed'}
    assert 'router' not in with_one


SOME = ('d t, three layers', 'd e', 'd p', 'r')


@pytest.mark.parametrize(
    ('name', 'chunk'),
    [
        (SOME[0], 1),
        *((n, owners.CHUNK) if n in SOME else pytest.param(n, 1, marks=pytest.mark.slow) for n in MESHES),
    ],
)
def test_on_a_mesh_owners_find_the_directions_of_the_authors_algorithm(name, chunk, monkeypatch):
    """Three gradients, with which each matrix improves once or twice. The feed-forward is too wide."""
    monkeypatch.setattr(owners, 'CHUNK', chunk)
    options, sizes = MESHES[name]
    mesh, rng = mesh_of(**sizes), np.random.default_rng(0)
    rule = optimizer.soap(b1=B1, b2=B2, eps=EPS, precondition_frequency=2, max_precond_dim=40)
    weights = random_weights(transformer(options))
    tree, expected = jax.tree.structure(weights), [OfWeight(*each, rng) for each in numbered(weights)]
    with jax.set_mesh(mesh):
        made = recipe(options, mesh, rule, sizes.get('p', 1))
        like, shardings = abstract_state(made).optimizer, weight_shardings(made.model, weights)
        stored = in_checkpoint(expected, tree, 1)
        state = at_owners(jax.device_put(stored, jax.tree.map(lambda x: x.sharding, by_weight(like))), like)
        jax.tree.map(np.testing.assert_array_equal, by_weight(state), stored)
        update = jax.jit(lambda g, s: rule.update(g, s, shardings=shardings))
        for _ in range(3):
            gradients = [[rng.standard_normal(one.m.shape) for one in w.matrices] for w in expected]
            given = [w.whole(some) for w, some in zip(expected, gradients, strict=True)]
            direction, state = update(tree.unflatten(given), state)
            for w, some, found in zip(expected, gradients, jax.tree.leaves(direction), strict=True):
                steps = [one.step(g) for one, g in zip(w.matrices, some, strict=True)]
                np.testing.assert_allclose(found, w.whole(steps), rtol=5e-3, atol=5e-3)
        assert_same(by_weight(state), in_checkpoint(expected, tree, 4), rtol=1e-3)


class OfWeight:
    """A `Soap` for each matrix of a weight, with a random state after one gradient."""

    def __init__(self, w, dims, number, rng):
        inputs, outputs = dims or ((), tuple(range(w.ndim)))
        batch = [i for i in range(w.ndim) if i not in (*inputs, *outputs)]
        self.shape, self.order, self.batch = w.shape, [*batch, *inputs, *outputs], [w.shape[i] for i in batch]
        sizes = [math.prod(w.shape[i] for i in some) for some in (inputs, outputs)]
        self.matrices = []
        for i in range(math.prod(self.batch)):
            one = Soap(np.zeros(sizes if dims else w.size), 2, 40, [np.eye(n) for n in sizes])
            one.number = number + i
            one.m, one.v = rng.standard_normal(one.m.shape), rng.random(one.m.shape) + 0.1
            for axis, n in enumerate(one.m.shape if dims else ()):
                q, one.bases[axis] = (np.linalg.qr(rng.standard_normal((n, n)))[0] for _ in range(2))
                one.products[axis] = q * np.geomspace(1, 10, n) @ q.T
            self.matrices.append(one)

    def whole(self, of_matrices):
        """Arrays like the matrices, as the weight."""
        return np.float32(of_matrices).reshape([self.shape[i] for i in self.order]).transpose(np.argsort(self.order))

    def squares(self, what, axis):
        """[..., n, n]; None if this side has no preconditioner."""
        wanted = self.matrices[0].precondition
        if len(wanted) == 1 or not wanted[axis]:
            return None
        squares = np.float32([getattr(one, what)[axis] for one in self.matrices])
        return squares.reshape(*self.batch, *squares.shape[1:])


def in_checkpoint(weights, tree, gradients):
    moments = ([w.whole([getattr(one, name) for one in w.matrices]) for w in weights] for name in 'mv')
    squares = ([w.squares(name, axis) for w in weights] for name in ('products', 'bases') for axis in (0, 1))
    return SoapState(np.int32(gradients), *map(tree.unflatten, (*moments, *squares)))


def numbered(weights):
    """Each weight, its dimensions, and the number of its first matrix."""
    tree, number = jax.tree.structure(weights), 0
    dims = tree.flatten_up_to(matrix_dimensions(weights, tables=True))
    for w, each in zip(jax.tree.leaves(weights), dims, strict=True):
        yield w, each, number
        number += 0 if each is None else math.prod(n for i, n in enumerate(w.shape) if i not in (*each[0], *each[1]))


def recipe(options, mesh, rule, micro_batches=1):
    model = transformer(options, mesh, micro_batches=micro_batches)
    return Recipe(model, rule, lambda step: jnp.float32(0.01), 0.1, (), 1.0, 1)


@pytest.mark.parametrize('name', [n if n == 'r d' else pytest.param(n, marks=pytest.mark.slow) for n in MESHES])
def test_an_update_sends_gradients_to_owners_and_directions_back_and_nothing_else(name):
    """Bytes by the sizes of the arrays: 2 exchanges of the slices of a device, and a gather along idle axes."""
    options, sizes = MESHES[name]
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        made = recipe(options, mesh, optimizer.soap(), sizes.get('p', 1))
        state = abstract_state(made)
        shardings = weight_shardings(made.model, state.weights)
        after = shardings, jax.tree.map(lambda x: x.sharding, state.optimizer)
        run = jax.jit(lambda g, s: made.optimizer.update(g, s, shardings=shardings), out_shardings=after)
        program = run.lower(state.weights, state.optimizer).compile()
    sent = Counter()
    for one in collectives(program.as_text(), dict(mesh.shape)):
        sent[one.kind, one.axes] += one.bytes * one.times
    assert sent == exchanged(state.weights, shardings, mesh, tables=True)
    cost = update_cost(made._replace(section=SECTION), state)
    assert Counter({(one.kind, one.axes): one.bytes for one in cost.exchanges}) == sent


def test_only_what_a_matrix_needs_is_computed():
    """Decompositions are in branches, which a batched branch would not be."""
    rule = optimizer.soap()
    g = {'w': jnp.ones((4, 3)), 'u': jnp.ones((4, 3))}
    jaxpr = jax.make_jaxpr(rule.update)(g, rule.init(g))
    places = [path for path, name in primitives(jaxpr.jaxpr) if name in ('eigh', 'qr')]
    assert len(places) == 6  # of rows and of columns: QR, and eigenvectors on TPUs and elsewhere
    assert all(path[:2] == ('scan', 'cond') for path in places)


def primitives(jaxpr, path=()):
    for equation in jaxpr.eqns:
        yield path, equation.primitive.name
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')):
            if hasattr(inner, 'eqns') or hasattr(inner, 'jaxpr'):
                yield from primitives(getattr(inner, 'jaxpr', inner), (*path, equation.primitive.name))


def test_a_run_goes_on_from_its_checkpoint_to_the_last_bit_and_on_another_mesh(tmp_path):
    rule = optimizer.soap(eps=1e-3, precondition_frequency=2)  # a smaller eps amplifies rounding errors

    def go_on(step, state):
        losses = []
        for i in range(2, 5):
            state, metrics = step(state, random_batch(8, i))
            losses.append(float(metrics['loss']))
        return losses

    with jax.set_mesh(mesh_of(d=4, t=2)):
        made = recipe(LLAMA | {'n_layers': 3}, mesh_of(d=4, t=2), rule)
        like, state, step = abstract_state(made), init_state(made, 0), make_step(made)
        for i in range(2):
            state, _ = step(state, random_batch(8, i))
        with contextlib.closing(Checkpoints(tmp_path, 1)) as checkpoints:
            checkpoints.save(2, by_weight(state), {})
        expected = go_on(step, state)
        assert go_on(step, at_owners(restore(tmp_path, 2, by_weight(like)), like)) == expected
    with jax.set_mesh(mesh_of(r=2)):
        made = recipe(LLAMA | {'n_layers': 3}, mesh_of(r=2), rule)
        like = abstract_state(made)
        losses = go_on(make_step(made), at_owners(restore(tmp_path, 2, by_weight(like)), like))
    np.testing.assert_allclose(losses[:2], expected[:2], rtol=1e-5)
    np.testing.assert_allclose(losses, expected, rtol=1e-3)  # eigenvectors without a gradient so far are arbitrary
