"""Which weights optimizers treat as matrices: the model says it, by what each weight does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.errors import UserError
from pretrax.model.base import Model
from pretrax.model.nnx import NnxModel
from pretrax.model.nnx_options import NnxOptions
from pretrax.model.request import ModelRequest
from pretrax.train import optimizer
from pretrax.train.groups import Group
from pretrax.train.optimizer import describe_matrices
from pretrax.train.state import init_state
from pretrax.train.step import Recipe, make_step
from small import LENGTH, LLAMA, VOCAB, mesh_of, random_batch, random_weights, transformer

# Inputs and outputs of the kernels of the module `Layers`, from the documentation of Flax
KERNELS = {
    **{f'attention.{i}.{name}.kernel': ((0,), (1, 2)) for i in range(2) for name in ('query', 'key', 'value')},
    **{f'attention.{i}.out.kernel': ((0, 1), (2,)) for i in range(2)},
    'experts.kernel': ((1,), (0, 2)),  # 'blm,emf->blef'
    'mix.kernel': ((1,), (2,)),  # 'blef,efg->bleg': a matrix for each e
    'merge.kernel': ((0, 1), (2,)),
    'conv.kernel': ((0, 1), (2,)),
    'stacked.kernel': ((1,), (2,)),  # of nnx.vmap: a matrix for each module
}
TABLES = {'embed.embedding': ((0,), (1,)), 'unembed.kernel': ((0,), (1,))}


def layers():
    request = ModelRequest(VOCAB, LENGTH, None, jnp.float32, 'cpu', dict(mesh_of().shape))
    return NnxModel(request, options=NnxOptions(target='nnx_modules:Layers', flops_per_token=None))


def recipe(model, rule: Any, groups=()):
    return Recipe(model, rule, lambda step: jnp.float32(1e-2), 0.1, (), 1.0, 1, groups=groups)


def weights_of(model):
    return jax.eval_shape(model.init, jax.random.key(0))


def dimensions(model, tables):
    weights = weights_of(model)
    dims = jax.tree.structure(weights).flatten_up_to(model.matrix_dimensions(weights, tables=tables))
    named = [jax.tree_util.keystr(path, simple=True, separator='.') for path, _ in jax.tree.leaves_with_path(weights)]
    return {name: one for name, one in zip(named, dims, strict=True) if one is not None}


@pytest.mark.parametrize('tables', [False, True])
def test_modules_of_flax_say_what_their_parameters_are(tables):
    """Parameters of other modules are no matrices, though two of them are square or a table."""
    assert dimensions(layers(), tables) == KERNELS | (TABLES if tables else {})


def test_muon_orthogonalizes_the_kernels_of_an_nnx_module_and_adam_updates_the_rest():
    """The singular values of the first update of a matrix are about equal; Adam's update of others has one size."""
    model = layers()
    with jax.set_mesh(mesh_of()):
        rule = optimizer.muon(model.matrix_dimensions, polynomials='polar_express', iterations=10)
        gradient = jax.tree.map(
            lambda w: jnp.asarray(np.random.default_rng(0).standard_normal(w.shape)), weights_of(model)
        )
        updates, _ = rule.update(gradient, rule.init(gradient), gradient)
    for path, update in jax.tree.leaves_with_path(updates):
        name, update = jax.tree_util.keystr(path, simple=True, separator='.'), np.asarray(update)
        if name not in KERNELS:
            np.testing.assert_allclose(np.abs(update), np.abs(update).flat[0], rtol=1e-4, err_msg=name)
            continue
        inputs, outputs = KERNELS[name]
        batch = [i for i in range(update.ndim) if i not in (*inputs, *outputs)]
        rows, columns = (int(np.prod([update.shape[i] for i in end])) for end in (inputs, outputs))
        for one in update.transpose(*batch, *inputs, *outputs).reshape(-1, rows, columns):
            values = np.linalg.svd(one, compute_uv=False)
            assert values.max() / values.min() < 1.05, name


@pytest.mark.parametrize('name', ['muon', 'soap'])
def test_an_nnx_module_learns(name):
    model = layers()
    with jax.set_mesh(mesh_of()):
        how = recipe(model, getattr(optimizer, name)(model.matrix_dimensions))
        state, step, losses = init_state(how, 0), make_step(how), []
        for _ in range(8):
            state, metrics = step(state, random_batch(4))
            losses.append(float(metrics['loss']))
    assert losses[-1] < losses[1] - 0.1


def test_the_report_counts_the_matrices_that_train():
    model = layers()
    sizes = {jax.tree_util.keystr(path, simple=True, separator='.'): w.size
             for path, w in jax.tree.leaves_with_path(weights_of(model))}  # fmt: skip
    frozen = 'conv.kernel', 'conv.bias'
    matrices = [sizes[name] for name in KERNELS if name not in frozen]
    others = [size for name, size in sizes.items() if name not in (*KERNELS, *frozen)]
    line = describe_matrices('muon', recipe(model, None, (Group(frozen, 0.0),)), weights_of(model))
    assert line.startswith(
        f'muon orthogonalizes {len(matrices)} weights with {sum(matrices):,} parameters; '
        f'AdamW updates {len(others)} weights with {sum(others):,} parameters: attention.*.key.bias, '
    )
    assert 'embed.embedding' in line
    assert describe_matrices('adamw', recipe(model, None), weights_of(model)) == ''


def test_the_names_of_a_decoders_matrices_are_its_own():
    model, weights = transformer(LLAMA), random_weights(transformer(LLAMA))
    assert 'AdamW updates 5 weights' in describe_matrices('muon', recipe(model, None), weights)  # tables and norms
    assert 'AdamW updates 3 weights' in describe_matrices('soap', recipe(model, None), weights)


def test_a_model_without_matrices_is_refused():
    class Own(Model):
        pass

    with pytest.raises(UserError, match=r'define Own.matrix_dimensions .*or use optimizer.name=adamw'):
        describe_matrices('muon', recipe(Own(), None), {'w': jnp.zeros((3, 3))})
