"""Attention over sequences that four devices share out is that of one device, in value and gradient."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.errors import UserError
from pretrax.model.attention import context_parallel_attention, dot_product_attention
from pretrax.model.attention_kernels import Kernel
from pretrax.model.context import column_order
from pretrax.model.scores import Scores
from pretrax.shardlib import f32, i32, typed_shard_map
from pretrax.train.step import make_gradients
from small import LLAMA, mesh_of, random_batch, random_weights, transformer

LENGTH, KERNEL = 32, Kernel('blockwise', 'test', None)
PLAIN, CAPPED = Scores(2.0, 0.0, 0), Scores(1.5, 0.8, 11)  # the second with a window, longer than a chunk


@functools.cache
def case(scores):
    """Queries, keys, values, packed documents, a cotangent; and the result of one device on plain arrays."""
    random = np.random.default_rng(0)
    q, d_out = random.normal(size=(2, 2, LENGTH, 8, 4)).astype(np.float32)
    k, v = random.normal(size=(2, 2, LENGTH, 4, 4)).astype(np.float32)
    segments = np.sort(random.integers(1, 4, (2, LENGTH)), axis=1).astype(np.int32)
    behind = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    visible = scores.sees(behind) & (segments[:, :, None] == segments[:, None, :])

    def attend(q, k, v):
        grouped = jnp.moveaxis(q.reshape(2, LENGTH, 4, 2, 4), 1, 3)
        out = dot_product_attention(grouped, jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2), visible, scores)
        return jnp.moveaxis(out, 3, 1).reshape(q.shape)

    out, pullback = jax.jit(lambda *qkv: jax.vjp(attend, *qkv))(q, k, v)
    return (q, k, v, segments, d_out), (out, *pullback(d_out))


@functools.cache
def case_with_sinks(scores):
    """The same, and sinks of each head: a key that every query sees,
    with this score and the value zero, a head at a time.
    """
    (q, k, v, segments, d_out), _ = case(scores)
    sinks = np.random.default_rng(1).normal(size=8).astype(np.float32)
    behind = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    visible = scores.sees(behind) & (segments[:, :, None] == segments[:, None, :])

    def attend(q, k, v, sinks):
        heads = []
        for head in range(8):
            score = jnp.einsum('bld,bsd->bls', q[:, :, head], k[:, :, head // 2]) / scores.divisor
            if scores.softcap:
                score = scores.softcap * jnp.tanh(score / scores.softcap)
            weight = jnp.where(visible, jnp.exp(score), 0)
            total = weight.sum(-1, keepdims=True) + jnp.exp(sinks[head])
            heads.append(jnp.einsum('bls,bsd->bld', weight / total, v[:, :, head // 2]))
        return jnp.stack(heads, axis=2)

    out, pullback = jax.vjp(attend, q, k, v, sinks)
    return (q, k, v, segments, d_out), sinks, (out, *pullback(d_out))


@pytest.mark.parametrize(
    ('context', 'scores', 'c', 't'),
    [('ring', PLAIN, 4, 1), ('ring', CAPPED, 4, 2), ('ring', CAPPED, 2, 1), ('all_to_all', CAPPED, 4, 1)],
)
def test_a_sharded_sequence_gives_the_result_of_a_whole_one(context, scores, c, t, monkeypatch):
    monkeypatch.setattr('pretrax.model.context.BLOCK', 2)  # chunks of 4 and 8 queries are several blocks
    given, expected = case(scores)
    order = column_order(context, LENGTH, c)
    order = np.arange(LENGTH) if order is None else order

    @typed_shard_map
    def run(
        q: f32['B/r/d/e L/c H/t D'], k: f32['B/r/d/e L/c K/t D'], v: f32['B/r/d/e L/c K/t D'],
        segments: i32['B/r/d/e L/c'], d_out: f32['B/r/d/e L/c H/t D'],
    ) -> tuple[
        f32['B/r/d/e L/c H/t D'], f32['B/r/d/e L/c H/t D'], f32['B/r/d/e L/c K/t D'], f32['B/r/d/e L/c K/t D']
    ]:  # fmt: skip
        across = lambda *qkv: context_parallel_attention(*qkv, segments, KERNEL, scores, context)  # noqa: E731
        out, pullback = jax.vjp(across, q, k, v)
        return out, *pullback(d_out)

    with jax.set_mesh(mesh_of(c=c, t=t)):
        results = jax.jit(run)(*(x[:, order] for x in given))
    for name, ours, plain in zip(('out', 'dq', 'dk', 'dv'), results, expected, strict=True):
        np.testing.assert_allclose(ours, plain[:, order], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ('context', 'scores', 'c', 't'),
    [('ring', CAPPED, 4, 2), ('all_to_all', CAPPED, 2, 2), ('all_to_all', PLAIN, 1, 1)],
)
def test_attention_sinks_in_value_and_gradient(context, scores, c, t, monkeypatch):
    monkeypatch.setattr('pretrax.model.context.BLOCK', 2)
    monkeypatch.setattr('pretrax.model.attention.SHORT', 12)
    monkeypatch.setattr('pretrax.model.attention.BLOCK', 12 if scores is CAPPED else 512)
    monkeypatch.setattr('pretrax.model.long_attention.MOST', 12)
    given, sinks, expected = case_with_sinks(scores)
    order = column_order(context, LENGTH, c)
    order = np.arange(LENGTH) if order is None else order

    @typed_shard_map
    def run(
        q: f32['B/r/d/e L/c H/t D'], k: f32['B/r/d/e L/c K/t D'], v: f32['B/r/d/e L/c K/t D'],
        segments: i32['B/r/d/e L/c'], sinks: f32['H/t'],
    ) -> f32['B/r/d/e L/c H/t D']:  # fmt: skip
        return context_parallel_attention(q, k, v, segments, KERNEL, scores, context, sinks)

    *qkv, segments, d_out = (x[:, order] for x in given)

    def loss(q, k, v, sinks):
        out = run(q, k, v, segments, sinks)
        return jnp.sum(out * d_out), out

    with jax.set_mesh(mesh_of(c=c, t=t, d=2 if c < 4 else 1)):
        (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(*qkv, sinks)
    results, plain = (out, *gradients), (*(x[:, order] for x in expected[:-1]), expected[-1])
    for name, ours, theirs in zip(('out', 'dq', 'dk', 'dv', 'dsinks'), results, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_the_backward_pass_does_not_repeat_the_ring_of_the_forward_pass():
    """Keys travel once in the backward pass, with their gradients, if the result and its sums were kept."""

    def sent(save):
        model = transformer(LLAMA | {'n_layers': 1, 'context': 'ring', 'save': save}, mesh_of(c=4))
        with jax.set_mesh(mesh_of(c=4)):
            program = jax.jit(make_gradients(model, 1)).lower(random_weights(model), random_batch(2)).compile()
        return program.as_text().count(' collective-permute(')

    assert sent('attention') == sent('all') < sent('none')


def test_masks_of_a_ring_exist_one_block_at_a_time():
    """They depend on no layer: JAX would compute those of all hops before the loop over the layers, and keep them."""
    mesh = mesh_of(c=4)
    model = transformer(LLAMA | {'layers': 'scan', 'save': 'none', 'context': 'ring'}, mesh)
    batch = random_batch(4)
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(make_gradients(model, 1))(random_weights(model), batch, jax.random.key(0))
    rows, length = batch.tokens.shape
    chunk = length // (2 * 4)
    masks = [x.aval.shape for x in values(jaxpr) if x.aval.dtype == bool and x.aval.ndim > 3]
    assert masks
    assert max(math.prod(shape) for shape in masks) <= rows * model.arch.attention.n_heads * chunk**2


def values(jaxpr):
    """The results of all equations of a program, those inside others too."""
    for equation in jaxpr.eqns:
        yield from equation.outvars
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')):
            if hasattr(inner, 'eqns'):
                yield from values(inner)


def test_every_device_of_a_ring_does_the_same_work():
    """Counts the visible pairs of a query and a key for each device and each hop of the ring."""
    c, order = 4, column_order('ring', 64, 4).reshape(4, -1)
    work = np.array([[np.sum(order[i][:, None] > order[j]) for j in range(c)] for i in range(c)])
    assert len(set(work[~np.eye(c, dtype=bool)])) == 1
    assert len(set(np.diag(work))) == 1


@pytest.mark.parametrize(
    ('options', 'length', 'mesh', 'message'),
    [
        ({'context': 'all_to_all'}, 16, {'c': 4}, r'n_kv_heads = 2 is not divisible by mesh.t x mesh.c = 1 x 4'),
        ({'context': 'ring'}, 20, {'c': 4}, r'batch.sequence_length = 20 is not divisible by 8 .*\nuse mesh.c=2'),
        ({'context': 'ring', 'attention': 'cudnn'}, 16, {'c': 2}, r'use model.attention.kernel=auto'),
        ({}, 18, {'c': 2, 't': 2}, r'batch.sequence_length = 18 is not divisible by'),
    ],
)
def test_a_sequence_that_cannot_be_sharded_is_refused(options, length, mesh, message):
    with pytest.raises(UserError, match=message):
        transformer(LLAMA | options, mesh_of(**mesh), length=length)


def test_the_report_has_the_choice():
    assert 'all_to_all (any kernel' in transformer(LLAMA, mesh_of(c=2)).choices['context']
    assert 'ring (2 key/value heads do not divide' in transformer(LLAMA, mesh_of(c=4)).choices['context']
    assert 'context' not in transformer(LLAMA, mesh_of(d=4)).choices
    assert jnp.array_equal(transformer(LLAMA, mesh_of(c=4)).column_order[:4], jnp.array([0, 1, 14, 15]))
