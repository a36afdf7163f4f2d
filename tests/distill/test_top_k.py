"""Offline distillation: KL over the k most likely tokens and the tail equals plain jax.numpy,
and with all tokens the online one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from decoders import decoder_options
from pretrax.distill.student import Distillation, DistilledTransformer, Teacher
from pretrax.distill.top_k import TopK
from pretrax.model.loss import Batch, means
from pretrax.model.request import ModelRequest
from pretrax.shardlib import typed_shard_map
from pretrax.train.step import make_gradients
from small import LENGTH, LLAMA, VOCAB, assert_same, mesh_of, random_batch, random_weights

ROWS = 8
WIDE = LLAMA | {'n_layers': 3, 'd_model': 48, 'n_heads': 4, 'n_kv_heads': 4, 'd_ff': 64}


def distilled(mesh, direction, teacher=WIDE):
    """A student with a teacher; `teacher=None`: with what the batches have of one."""
    request = ModelRequest(VOCAB, LENGTH, None, jnp.float32, 'cpu', dict(mesh.shape))
    how = Distillation(weight=0.7, temperature=2.0, direction=direction, chunks=4)
    options = None if teacher is None else decoder_options(**teacher)
    return DistilledTransformer(request, options=decoder_options(**LLAMA), teacher=options, how=how)


def found_gradient(model, weights, batch, mesh, accumulation=1, **teacher):
    with jax.set_mesh(mesh):
        order = np.arange(LENGTH) if model.column_order is None else model.column_order
        ordered = jax.tree.map(lambda x: x[:, order], batch)
        gradient, terms, tables = jax.jit(make_gradients(model, accumulation))(weights, ordered, **teacher)
        return jax.device_get((gradient, means(terms), model.summarize(tables)))


def kept(model, teacher, batch, k, mesh):
    """What is kept of the teacher, as host arrays with their columns in the order of the tokens."""
    with jax.set_mesh(mesh):
        order = np.arange(LENGTH) if model.column_order is None else model.column_order

        @typed_shard_map
        def find(weights: Teacher, batch: Batch) -> TopK:
            return model.top_k(weights, batch, k)

        ordered = jax.tree.map(lambda x: x[:, order], batch)
        top = jax.device_get(jax.jit(find)(Teacher(teacher), ordered))
    return jax.tree.map(lambda x: x[:, np.argsort(order)], top)


def outcomes(logits, ids, temperature):
    """Log probabilities of the tokens `ids`, and of all others together; Hinton et al. 2015, section 2."""
    log = jax.nn.log_softmax(logits / temperature, axis=-1)
    is_top = jnp.sum(jax.nn.one_hot(ids, logits.shape[-1]), axis=-2) > 0
    tail = jax.nn.logsumexp(jnp.where(is_top, -jnp.inf, log), axis=-1)
    return jnp.concatenate([jnp.take_along_axis(log, ids, axis=-1), tail[..., None]], axis=-1)


def expected(model, weights, teacher, batch, k):
    """The gradient, the losses and what is kept, in plain jax.numpy."""
    how = model.how

    def logits_of(w, arch):
        logits = reference.logits(w, batch.tokens, batch.segments, batch.positions, arch)
        return logits[..., :VOCAB]

    of_teacher = jax.jit(logits_of, static_argnums=1)(teacher, model.teacher.arch)
    ids = jnp.argsort(-of_teacher, axis=-1)[..., :k]
    p = outcomes(of_teacher, ids, how.temperature)

    def loss(w):
        logits = logits_of(w, model.arch)
        q = outcomes(logits, ids, how.temperature)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], axis=-1)[..., 0]
        a, b = (p, q) if how.direction == 'forward' else (q, p)
        kl = how.temperature**2 * jnp.sum(jnp.exp(a) * (a - b), axis=-1)
        mean = lambda each: jnp.sum(each * batch.mask) / jnp.sum(batch.mask)  # noqa: E731
        losses = {'nll': mean(nll), 'distillation': mean(kl)}
        return (1 - how.weight) * losses['nll'] + how.weight * losses['distillation'], losses

    gradient, losses = jax.jit(jax.grad(loss, has_aux=True))(weights)
    return gradient, losses, TopK(ids, p[..., :-1], p[..., -1])


@pytest.mark.parametrize(
    ('mesh', 'accumulation', 'direction', 'k'),
    [
        pytest.param({'d': 2, 't': 2, 'c': 2}, 2, 'forward', 5, marks=pytest.mark.slow),
        pytest.param({}, 1, 'reverse', 5, marks=pytest.mark.nightly),
        pytest.param({'r': 8}, 1, 'forward', 1, marks=pytest.mark.slow),
        pytest.param({'d': 4, 't': 2}, 2, 'reverse', 70, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_k_tokens_and_the_tail_are_those_of_plain_jax(mesh, accumulation, direction, k):
    sizes, batch = mesh_of(**mesh), random_batch(ROWS)
    model = distilled(sizes, direction)
    weights, teacher = random_weights(model), random_weights(model.teacher, seed=1)
    gradient, losses, top = expected(model, weights, teacher, batch, k)
    found = kept(model, teacher, batch, k, sizes)
    np.testing.assert_array_equal(found.top_ids, top.top_ids)
    assert_same((found.top_log_probs, found.log_tail), (top.top_log_probs, top.log_tail), rtol=1e-5)
    offline, known = distilled(sizes, direction, teacher=None), dataclasses.replace(batch, **vars(found))
    ours, terms, metrics = found_gradient(offline, weights, known, sizes, accumulation)
    assert_same({name: metrics[name] for name in losses}, losses, rtol=2e-5)
    np.testing.assert_allclose(terms['distillation'], 0.7 * losses['distillation'], rtol=2e-5)
    assert_same(ours, gradient, rtol=5e-5, floor=1e-6)


@pytest.mark.parametrize(
    ('mesh', 'direction'), [({'t': 2}, 'forward'), pytest.param({'r': 2}, 'reverse', marks=pytest.mark.slow)]
)
def test_all_tokens_offline_are_the_teacher_online(mesh, direction):
    sizes, batch = mesh_of(**mesh), random_batch(ROWS)
    model = distilled(sizes, direction)
    weights, teacher = random_weights(model), random_weights(model.teacher, seed=1)
    top = kept(model, teacher, batch, VOCAB, sizes)
    assert np.all(top.log_tail == -np.inf)
    offline = found_gradient(distilled(sizes, direction, None), weights, dataclasses.replace(batch, **vars(top)), sizes)
    online = found_gradient(model, weights, batch, sizes, constants=Teacher(teacher))
    assert_same(offline, online, rtol=1e-5, floor=1e-7)
