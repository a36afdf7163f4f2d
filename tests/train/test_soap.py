"""SOAP against the authors' algorithm in plain NumPy, in double precision; and how its state is sharded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.model.weights import MATRICES, Layer
from pretrax.train import optimizer
from pretrax.train.state import abstract_state
from pretrax.train.step import Recipe
from small import LLAMA, MIXTURE, mesh_of, random_weights, transformer

B1, B2, EPS = 0.9, 0.8, 1e-8


class Soap:
    """One weight of two dimensions, or of one, which Adam updates. Written from the authors' soap.py, step by step."""

    def __init__(self, gradient, every, widest=10000, bases=None):
        self.every, self.t = every, 0
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
        if self.t % self.every == 0:
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
        else:
            by_layer = [one.step(g) for one, g in zip(expected, matrices, strict=True)]
            np.testing.assert_allclose(found, by_layer, rtol=5e-3, atol=5e-3)


def test_preconditioners_are_sharded_and_only_matrices_and_tables_have_them():
    mesh = mesh_of(d=2, t=2, e=2)
    with jax.set_mesh(mesh):
        rule = optimizer.soap(max_precond_dim=64)  # less than the vocabulary
        recipe = Recipe(transformer(MIXTURE, mesh), rule, lambda step: jnp.float32(0), 0.0, (), None, 1)
        like = abstract_state(recipe).optimizer
    assert like.left.embed is None
    assert like.right.embed.shape == (32, 32)
    assert tuple(like.right.embed.sharding.spec) == ('d', 't')
    assert like.left.layers.experts.expert_up.shape == (2, 4, 32, 32)
    assert tuple(like.left.layers.experts.expert_up.sharding.spec) == ('p', 'e', 'd', 't')
    with_one = {path[-1].name for path, _ in jax.tree_util.tree_leaves_with_path((like.left, like.right))}
    assert with_one <= MATRICES.keys() | {'embed', 'unembed'}
    assert 'router' not in with_one
