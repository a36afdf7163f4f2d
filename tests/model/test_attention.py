"""Attention equals the formula in double precision, documents stay apart, and the choice of kernel says why."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.model import attention, long_attention
from pretrax.model.attention import attend
from pretrax.model.attention_kernels import Kernel
from pretrax.model.scores import Scores

B, H, K, D = 2, 4, 2, 8
BLOCKWISE = Kernel('blockwise', 'test', None)
PLAIN = Scores(math.sqrt(D), 0.0, 0)
nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)


def formula(q, k, v, segments, dout, divisor=np.sqrt(D), cap=np.inf, window=10**9):
    """Output and gradients in f64, with the whole L x L matrix, a head at a time."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    order = np.arange(q.shape[1])
    for b, h in np.ndindex(B, H):
        g = h // (H // K)
        visible = (order[:, None] >= order[None, :]) & (segments[b, :, None] == segments[b, None, :])
        visible &= order[:, None] - order[None, :] < window
        slope, scores = 1.0, q[b, :, h] @ k[b, :, g].T / divisor
        if cap < np.inf:
            scores = cap * np.tanh(scores / cap)
            slope = 1 - (scores / cap) ** 2
        scores = np.where(visible, scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        dp = dout[b, :, h] @ v[b, :, g].T
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * slope / divisor
        out[b, :, h] = p @ v[b, :, g]
        dq[b, :, h] = ds @ k[b, :, g]
        dk[b, :, g] += ds.T @ q[b, :, h]
        dv[b, :, g] += p.T @ dout[b, :, h]
    return out, dq, dk, dv


def example(length):
    rng = np.random.default_rng(length)
    q, k, v, dout = (rng.standard_normal((B, length, n, D)).astype(np.float32) for n in (H, K, K, H))
    segments = np.sort(rng.integers(1, 4, (B, length)), axis=1).astype(np.int32)
    return q, k, v, segments, dout


def blockwise(q, k, v, segments, dout, scores):
    """Output and gradients, as `formula` gives them."""

    @jax.jit
    def both(q, k, v):
        out, pullback = jax.vjp(lambda *qkv: attend(*qkv, segments, BLOCKWISE, scores), q, k, v)
        return out, *pullback(dout)

    return both(q, k, v)


def shrink(monkeypatch, which, size):
    """Makes blocks of `size` tokens: those of short sequences, or of long ones, which are then all that are longer."""
    monkeypatch.setattr(attention, which, size)
    monkeypatch.setattr(long_attention, 'MOST', size)


@pytest.mark.parametrize('blocks', ['BLOCK', 'SHORT'])
@pytest.mark.parametrize('length', [7, 8, 9, 16, 21])
def test_blockwise_equals_the_formula(length, blocks, monkeypatch):
    shrink(monkeypatch, blocks, 8)
    arrays = example(length)
    for actual, expected in zip(blockwise(*arrays, PLAIN), formula(*arrays), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('blocks', ['BLOCK', 'SHORT'])
@pytest.mark.parametrize(
    ('window', 'cap'),
    [
        *((3, 0.7), (9, 0.0), (40, 0.7)),
        *(nightly(window, 0.0) for window in (1, 3, 8, 17, 40)),
        *(nightly(window, 0.7) for window in (1, 8, 9, 17)),
    ],
)
def test_windows_and_caps_equal_the_formula(window, cap, blocks, monkeypatch):
    """Windows shorter than a block of queries, as long, over several blocks, and longer than the row."""
    shrink(monkeypatch, blocks, 8)
    arrays = example(21)
    expected = formula(*arrays, 1.7, cap or np.inf, window)
    for actual, exact in zip(blockwise(*arrays, Scores(1.7, cap, window)), expected, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-4, atol=1e-5)


def test_blocks_outside_the_window_are_not_computed(monkeypatch):
    """With a window the products grow with L, not with L^2: XLA counts them."""
    shrink(monkeypatch, 'BLOCK', 32)

    def flops(length, window):
        shape = lambda n: jax.ShapeDtypeStruct((1, length, n, 64), jnp.float32)  # noqa: E731
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
        run = lambda *x: attend(*x, BLOCKWISE, Scores(8.0, 0.0, window))  # noqa: E731
        return jax.jit(run).lower(shape(H), shape(K), shape(K), segments).cost_analysis()['flops']

    assert flops(512, 33) < 1.1 * 2 * flops(256, 33)
    assert flops(512, 33) < 0.3 * flops(512, 0)


def test_blocks_never_hold_a_square_matrix(monkeypatch):
    """Twice the length costs about twice the memory of the forward and backward pass, not four times."""
    shrink(monkeypatch, 'BLOCK', 64)

    def memory(length):
        shape = lambda n: jax.ShapeDtypeStruct((1, length, n, D), jnp.float32)  # noqa: E731
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
        loss = lambda q, k, v, s: jnp.sum(attend(q, k, v, s, BLOCKWISE, PLAIN))  # noqa: E731
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape(H), shape(K), shape(K), segments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory(1024) < 3 * memory(512)


@pytest.mark.parametrize('length', [8, 20])
def test_documents_do_not_see_each_other(length, monkeypatch):
    """Changing one document changes no bit of the outputs and gradients of the others."""
    shrink(monkeypatch, 'BLOCK', 8)
    q, k, v, segments, dout = example(length)
    segments[:] = np.repeat([1, 2, 3], [length // 4, length // 4, length - length // 2])
    call = jax.jit(lambda q, k, v: jax.vjp(lambda *qkv: attend(*qkv, segments, BLOCKWISE, PLAIN), q, k, v)[1](dout))
    forward = jax.jit(lambda q, k, v: attend(q, k, v, segments, BLOCKWISE, PLAIN))
    changed, others = segments[0] == 2, segments[0] != 2
    new = [x.copy() for x in (q, k, v)]
    for x in new:
        x[:, changed] = 100 * x[:, changed] + 1
    before, after = [forward(q, k, v), *call(q, k, v)], [forward(*new), *call(*new)]
    for a, b in zip(before, after, strict=True):
        assert np.array_equal(a[:, others], b[:, others])
    assert not np.array_equal(before[0][:, changed], after[0][:, changed])


def test_bf16_keeps_its_dtype_and_computes_the_softmax_in_f32():
    q, k, v, segments, dout = example(16)
    half = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    out = attend(*half, segments, BLOCKWISE, PLAIN)
    assert out.dtype == jnp.bfloat16
    expected, *_ = formula(*half, segments, dout)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=0.02, atol=0.02)


def test_every_product_of_both_passes_multiplies_in_the_compute_dtype():
    q, k, v, segments, dout = example(300)
    half = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, dout)]
    both = lambda q, k, v, d: jax.vjp(lambda *qkv: attend(*qkv, segments, BLOCKWISE, PLAIN), q, k, v)[1](d)  # noqa: E731
    text = jax.jit(both).lower(*half).as_text()
    products = re.findall(r'dot_general .*: \(tensor<[\dx]*(\w+)>, tensor<[\dx]*(\w+)>\)', text)
    assert products == [('bf16', 'bf16')] * 5 * 3, 'the scores, and four backward, for each block of queries'


def test_blocks_of_a_short_row_skip_keys_that_no_query_sees():
    """Of 4 blocks of queries the products are 1 + 2 + 3 + 4 of 16 squares."""
    shape = lambda n, length: jax.ShapeDtypeStruct((1, length, n, 256), jnp.float32)  # noqa: E731

    def flops(length):
        run = lambda *x: attend(*x, BLOCKWISE, PLAIN)  # noqa: E731
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
        lowered = jax.jit(run).lower(shape(H, length), shape(K, length), shape(K, length), segments)
        return lowered.cost_analysis()['flops']

    assert flops(512) == pytest.approx(10 * flops(128), rel=0.02)
