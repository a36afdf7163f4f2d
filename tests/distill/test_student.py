"""Distillation: losses and gradients equal plain jax.numpy, on any mesh,
with masks and accumulation; logits are never whole.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from decoders import decoder_options
from pretrax.distill.student import Distillation, DistilledTransformer, Teacher, in_compute_dtype
from pretrax.errors import UserError
from pretrax.model.loss import means
from pretrax.model.request import ModelRequest
from pretrax.train.step import make_gradients
from pretrax.train.validation import make_evaluate
from small import GPT2, LENGTH, LLAMA, VOCAB, assert_same, mesh_of, random_batch, random_weights, transformer

ROWS = 8
WIDE = LLAMA | {'n_layers': 3, 'd_model': 48, 'n_heads': 4, 'n_kv_heads': 4, 'd_ff': 64}


def distilled(
    student=LLAMA, teacher=WIDE, mesh=None, *, weight=0.7, temperature=2.0, direction='forward', chunks=4,
    dtype=jnp.float32,
    length=LENGTH, vocab_size=VOCAB,
):  # fmt: skip
    request = ModelRequest(vocab_size, length, None, dtype, 'cpu', dict((mesh or mesh_of()).shape))
    how = Distillation(weight, temperature, direction, chunks)
    return DistilledTransformer(
        request, options=decoder_options(**student), teacher=decoder_options(**teacher), how=how
    )


def expected_gradient(model, weights, teacher, batch):
    """Gradient and losses in plain jax.numpy: Hinton et al. 2015, section 2;
    the mean over target tokens by their weight.
    """
    how = model.how

    def log_probabilities(w, arch, temperature):
        logits = reference.logits(w, batch.tokens, batch.segments, batch.positions, arch)[..., : arch.vocab_size]
        return jax.nn.log_softmax(logits / temperature, axis=-1)

    def loss(w):
        usual = log_probabilities(w, model.arch, 1.0)
        nll = -jnp.take_along_axis(usual, batch.targets[..., None], axis=-1)[..., 0]
        q = log_probabilities(w, model.arch, how.temperature)
        p = log_probabilities(teacher, model.teacher.arch, how.temperature)
        a, b = (p, q) if how.direction == 'forward' else (q, p)
        kl = how.temperature**2 * jnp.sum(jnp.exp(a) * (a - b), axis=-1)
        mean = lambda each: jnp.sum(each * batch.mask) / jnp.sum(batch.mask)  # noqa: E731
        losses = {'nll': mean(nll), 'distillation': mean(kl)}
        return (1 - how.weight) * losses['nll'] + how.weight * losses['distillation'], losses

    return jax.jit(jax.grad(loss, has_aux=True))(weights)


def found_gradient(model, weights, teacher, batch, mesh=None, accumulation=1):
    with jax.set_mesh(mesh or mesh_of()):
        order = model.column_order
        batch = batch if order is None else jax.tree.map(lambda x: x[:, order], batch)
        gradients = jax.jit(make_gradients(model, accumulation))
        gradient, terms, tables = gradients(weights, batch, constants=Teacher(teacher))
        return jax.device_get((gradient, means(terms), model.summarize(tables)))


@pytest.mark.parametrize(
    ('mesh', 'accumulation', 'direction', 'student'),
    [
        ({}, 1, 'forward', LLAMA),
        pytest.param({'r': 2, 'c': 2, 't': 2}, 2, 'reverse', LLAMA, marks=pytest.mark.slow),
        pytest.param({}, 2, 'forward', LLAMA, marks=pytest.mark.nightly),
        pytest.param({'d': 4, 't': 2}, 1, 'reverse', LLAMA, marks=pytest.mark.slow),
        pytest.param({'d': 2, 'c': 2, 't': 2}, 2, 'reverse', GPT2, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_plain_jax(mesh, accumulation, direction, student):
    sizes, batch = mesh_of(**mesh), random_batch(ROWS)
    model = distilled(student, mesh=sizes, direction=direction)
    weights, teacher = random_weights(model), random_weights(model.teacher, seed=1)
    expected, losses = expected_gradient(model, weights, teacher, batch)
    gradient, terms, metrics = found_gradient(model, weights, teacher, batch, sizes, accumulation)
    assert_same({name: metrics[name] for name in losses}, losses, rtol=2e-5)
    np.testing.assert_allclose(terms['nll'], 0.3 * losses['nll'], rtol=2e-5)
    np.testing.assert_allclose(terms['distillation'], 0.7 * losses['distillation'], rtol=2e-5)
    assert_same(gradient, expected, rtol=5e-5, floor=1e-6)


@pytest.mark.parametrize(('direction', 'dtype'), [('forward', jnp.bfloat16), ('reverse', jnp.float32)])
def test_a_student_that_equals_its_teacher_has_no_loss_and_no_gradient(direction, dtype):
    model = distilled(LLAMA, LLAMA, weight=1.0, direction=direction, dtype=dtype)
    weights = jax.tree.map(jnp.asarray, random_weights(model))
    teacher = in_compute_dtype(weights, dtype)
    assert teacher.layers.attention.q.dtype == teacher.embed.dtype == dtype
    gradient, terms, metrics = found_gradient(model, weights, teacher, random_batch(4))
    assert terms['nll'] == 0
    assert abs(metrics['distillation']) < 1e-6
    assert metrics['nll'] > 1
    tolerance = 1e-6 if dtype == jnp.float32 else 1e-3
    assert max(np.abs(g).max() for g in jax.tree.leaves(gradient)) < tolerance


def test_an_evaluation_is_that_of_the_student_alone():
    model, plain, batch = distilled(), transformer(LLAMA), random_batch(4)
    weights = random_weights(model)
    with jax.set_mesh(mesh_of()):
        found, expected = (make_evaluate(one)(weights, batch) for one in (model, plain))
    assert found.keys() == expected.keys() == {'nll'}
    np.testing.assert_allclose(found['nll'], expected['nll'], rtol=1e-6)  # summed over chunks


def test_no_array_of_the_program_is_as_large_as_all_logits():
    rows, length, vocab = 4, 128, 2048
    model = distilled(length=length, vocab_size=vocab, chunks=8)
    with jax.set_mesh(mesh_of()):
        batch = random_batch(rows, length=length, vocab_size=vocab)
        lowered = jax.jit(make_gradients(model, 1)).lower(model.abstract(), batch, constants=model.abstract_constants())
        text = lowered.compile().as_text()
    sizes = [[int(n) for n in dims.split(',')] for dims in re.findall(r'= f32\[([\d,]+)\]', text)]
    of_logits = [math.prod(dims) // vocab for dims in sizes if vocab in dims and WIDE['d_model'] not in dims]
    assert max(n for n in of_logits if n not in (LLAMA['d_model'], 1)) == rows * length // 8


def test_a_pipeline_and_sizes_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match=r'mesh.p = 2: distill does not support pipeline'):
        distilled(mesh=mesh_of(p=2))
    with pytest.raises(UserError, match=r'distill.teacher: '):
        distilled(teacher=WIDE | {'n_heads': 3, 'n_kv_heads': 3}, mesh=mesh_of(t=2))


def test_the_seeds_of_dropout_are_the_students_alone():
    """With dropout, the distillation loss of a student that drops nothing here equals the one without."""
    model, with_dropout = distilled(), distilled(LLAMA, WIDE | {'dropout': 0.5})
    weights, teacher, batch = random_weights(model), random_weights(model.teacher, seed=1), random_batch(4)
    one, other = (found_gradient(m, weights, teacher, batch)[2]['distillation'] for m in (model, with_dropout))
    assert one == other
    assert not with_dropout.teacher.arch.drops
    assert model.teacher.arch == with_dropout.teacher.arch
