"""Hidden states of a teacher: the loss and its gradient equal plain jax.numpy on any mesh,
and only what is asked for is kept.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from decoders import decoder_options
from pretrax.distill.hidden_states import HiddenMatch, init_projection
from pretrax.distill.student import Distillation, DistilledTransformer, Teacher
from pretrax.errors import UserError
from pretrax.model.loss import means
from pretrax.model.request import ModelRequest
from pretrax.train.step import make_gradients
from small import GPT2, LENGTH, LLAMA, LLAMA4, MIXTURE, VOCAB, assert_same, mesh_of, random_batch, random_weights

DEEP = LLAMA | {'n_layers': 4}
WIDE = DEEP | {'d_model': 48, 'n_kv_heads': 4, 'd_ff': 64}
EXPERTS = MIXTURE | {'balance_loss': 0.0}
PAIRS = ((0, 1), (1, 3))


def distilled(student=LLAMA, teacher=WIDE, mesh=None, *, pairs=PAIRS, weight=0.6, length=LENGTH, dtype=jnp.float32):
    request = ModelRequest(VOCAB, length, None, dtype, 'cpu', dict((mesh or mesh_of()).shape))
    how = Distillation(0.0, 1.0, 'forward', 2, HiddenMatch(pairs, weight) if pairs else None)
    return DistilledTransformer(
        request, options=decoder_options(**student), teacher=decoder_options(**teacher), how=how
    )


def expected_gradient(model, weights, teacher, batch):
    """FitNets, eq. 3, and TinyBERT, eq. 8, in plain jax.numpy:
    relative to the teacher, the mean over pairs and targets.
    """
    seen = batch.tokens, batch.segments, batch.positions

    def loss(w):
        log_p = jax.nn.log_softmax(reference.logits(w, *seen, model.arch)[..., :VOCAB])
        nll = -jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1)[..., 0]
        ours = reference.hidden_states(w, *seen, model.arch)
        theirs = reference.hidden_states(teacher, *seen, model.teacher.arch)
        errors = []
        for i, (a, b) in enumerate(model.how.hidden.layers):
            s, t = ours[:, a], theirs[:, b]
            s = s if w.hidden_projection is None else s @ w.hidden_projection[i]
            errors.append(((s - t) ** 2).mean(-1) / (t**2).mean(-1))
        mse, nll = (jnp.sum(each * batch.mask) / jnp.sum(batch.mask) for each in (sum(errors) / len(errors), nll))
        return nll + model.how.hidden.weight * mse, mse

    return jax.jit(jax.grad(loss, has_aux=True))(weights)


def found_gradient(model, weights, teacher, batch, mesh=None, accumulation=1):
    with jax.set_mesh(mesh or mesh_of()):
        order = model.column_order
        batch = batch if order is None else jax.tree.map(lambda x: x[:, order], batch)
        gradients = jax.jit(make_gradients(model, accumulation))
        gradient, terms, tables = gradients(weights, batch, constants=Teacher(teacher))
        return jax.device_get((gradient, means(terms), model.summarize(tables)))


@pytest.mark.parametrize(
    ('mesh', 'accumulation', 'student', 'teacher', 'pairs'),
    [
        ({'d': 2, 't': 2}, 1, LLAMA | {'n_layers': 1}, WIDE | {'n_layers': 2}, ((0, 1),)),
        pytest.param({}, 1, LLAMA, WIDE, PAIRS, marks=pytest.mark.nightly),
        pytest.param({'r': 2, 'd': 2, 't': 2}, 2, LLAMA, WIDE, PAIRS, marks=pytest.mark.slow),
        pytest.param({'d': 2, 'c': 2, 't': 2}, 1, LLAMA, WIDE, ((1, 2), (0, 2), (1, 0)), marks=pytest.mark.nightly),
        pytest.param({'d': 4, 't': 2}, 2, LLAMA | {'save': 'none'}, DEEP, ((0, 0),), marks=pytest.mark.slow),
        pytest.param({'r': 2, 'c': 4}, 1, GPT2, GPT2 | {'n_layers': 3}, PAIRS[:1], marks=pytest.mark.nightly),
        pytest.param({'d': 2, 'e': 2}, 2, EXPERTS, EXPERTS | {'n_layers': 4}, PAIRS, marks=pytest.mark.slow),
        pytest.param({'d': 2}, 1, LLAMA, LLAMA4, ((0, 2), (1, 1)), marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_loss_and_gradient_are_those_of_plain_jax(mesh, accumulation, student, teacher, pairs):
    sizes, batch = mesh_of(**mesh), random_batch(8)
    model = distilled(student, teacher, sizes, pairs=pairs)
    weights, of_teacher = random_weights(model), random_weights(model.teacher, seed=1)
    assert (weights.hidden_projection is None) == (model.arch.d_model == model.teacher.arch.d_model)
    expected, mse = expected_gradient(model, weights, of_teacher, batch)
    gradient, terms, metrics = found_gradient(model, weights, of_teacher, batch, sizes, accumulation)
    np.testing.assert_allclose(metrics['hidden_mse'], mse, rtol=2e-5)
    np.testing.assert_allclose(terms['hidden_mse'], 0.6 * mse, rtol=2e-5)
    assert_same(gradient, expected, rtol=5e-5, floor=1e-6)


@pytest.mark.slow
def test_a_copy_of_the_teacher_has_no_error_and_zeros_have_one():
    model = distilled(LLAMA, LLAMA, pairs=((0, 0), (1, 1)))
    weights, batch = random_weights(model), random_batch(4)
    assert found_gradient(model, weights, weights, batch)[2]['hidden_mse'] == 0
    nothing = jax.tree.map(np.zeros_like, weights)
    np.testing.assert_allclose(found_gradient(model, nothing, weights, batch)[2]['hidden_mse'], 1, rtol=1e-6)


@pytest.mark.slow
def test_targets_that_do_not_count_change_nothing():
    """The tokens after the last target that counts may be any: here the second half of each row."""
    model, batch = distilled(), random_batch(4)
    mask = batch.mask * (np.arange(LENGTH) < LENGTH // 2)
    weights, teacher = random_weights(model), random_weights(model.teacher, seed=1)
    one, other = (
        found_gradient(model, weights, teacher, dataclasses.replace(b, mask=mask)) for b in (batch, changed(batch))
    )
    assert one[2]['hidden_mse'] == other[2]['hidden_mse']
    assert_same(one[0].hidden_projection, other[0].hidden_projection, rtol=1e-6)


def changed(batch):
    tokens = np.where(np.arange(LENGTH) < LENGTH // 2, batch.tokens, (batch.tokens + 1) % VOCAB)
    return dataclasses.replace(batch, tokens=tokens.astype(np.int32))


@pytest.mark.slow
def test_the_states_of_other_layers_are_not_kept():
    """Of a teacher of 4 layers in a loop, no array has the states of more than the two layers that are asked for."""
    rows, length = 4, 128
    model = distilled(LLAMA, WIDE | {'layers': 'scan'}, mesh_of(d=2), length=length)
    with jax.set_mesh(mesh_of(d=2)):
        batch = random_batch(rows, length=length)
        lowered = jax.jit(make_gradients(model, 1)).lower(model.abstract(), batch, constants=model.abstract_constants())
        text = lowered.compile().as_text()
    sizes = [[int(n) for n in dims.split(',')] for dims in re.findall(r'= f32\[([\d,]+)\]', text)]
    of_states = [math.prod(dims) for dims in sizes if dims[-3:] == [rows // 2, length, WIDE['d_model']]]
    assert max(of_states) <= 2 * rows // 2 * length * WIDE['d_model']


def test_the_first_projections_keep_the_size_of_the_states():
    like = jax.ShapeDtypeStruct((2, 256, 512), jnp.float32)
    x = np.random.default_rng(0).standard_normal((64, 256))
    y = x @ np.asarray(init_projection(jax.random.key(0), like)[1])
    np.testing.assert_allclose((y**2).mean(), 1, rtol=0.05)


@pytest.mark.parametrize(
    ('pairs', 'said'),
    [(((2, 1),), 'the student has no layer 2; its layers are 0 to 1'), (((0, 4),), 'the teacher has no layer 4')],
)
def test_layers_that_are_not_there_are_refused(pairs, said):
    with pytest.raises(UserError, match=f'distill.hidden.layers: {said}'):
        distilled(pairs=pairs)
