"""Delta nets and state-space models in chunks equal the recurrence, token by token, in plain jax.numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pretrax.model import recurrent as chunks
from pretrax.model.recurrent import by_products, by_substitution, convolution, delta_scan, state_space_scan

B, L, G, R, S, W = 2, 37, 2, 3, 5, 4
SEGMENTS = np.sort(np.random.default_rng(1).integers(1, 5, (B, L)), axis=1).astype(np.int32)


def arrays(length=L):
    rng = np.random.default_rng(0)
    shapes = {'q': (G, S), 'k': (G, S), 'v': (G, R, W), 'decay': (G, R), 'beta': (G, R)}
    found = {name: rng.standard_normal((B, length, *shape)).astype(np.float32) for name, shape in shapes.items()}
    found['decay'], found['beta'] = -np.exp(found['decay']), 1 / (1 + np.exp(-found['beta']))
    return found, rng.standard_normal((B, G, R, S, W)).astype(np.float32)


def recurrence(x, state, segments):
    """One token after the other. Without beta: a state-space model."""
    begins = jnp.asarray(np.diff(segments, axis=1, prepend=segments[:, :1]) != 0)

    def token(state, one):
        s = jnp.where(one['begins'], 0, state) * jnp.exp(one['decay'])
        q, k, v = one['q'], one['k'], one['v']
        if 'beta' in one:
            q, k = (a / jnp.sqrt(a @ a + 1e-6) for a in (q, k))
            q, v = q / np.sqrt(S), one['beta'] * (v - k @ s)
        s = s + jnp.outer(k, v)
        return s, q @ s

    def head(one, state):
        return jax.lax.scan(token, state, one)

    def row(one, state, begins):
        shared = {'q': one.pop('q'), 'k': one.pop('k')}

        def group(shared, own, state):
            return jax.vmap(lambda own, state: head(shared | own | {'begins': begins}, state), (1, 0))(own, state)

        return jax.vmap(group, (1, 1, 0))(shared, one, state)

    last, y = jax.vmap(row)(x, state, begins)
    return jnp.moveaxis(y, 3, 1), last


def in_chunks(x, state, segments):
    ordered = x['q'], x['k'], x['v'], x['decay']
    if 'beta' in x:
        return delta_scan(*ordered, x['beta'], segments, state)
    return state_space_scan(*ordered, segments, state)


@pytest.mark.parametrize('kind', ['delta', 'mamba'])
@pytest.mark.parametrize('size', [8, 64])  # of a chunk: several, the last one not full, and less than one
def test_chunks_equal_the_recurrence(kind, size, monkeypatch):
    monkeypatch.setattr(chunks, 'CHUNK', size)
    x, state = arrays()
    if kind == 'mamba':
        del x['beta']
    weight = [jnp.cos(jnp.arange(n, dtype=jnp.float32)) for n in (B * L * G * R * W, B * G * R * S * W)]

    def total(run):
        def of(x, state):
            return sum(a.ravel() @ w for a, w in zip(run(x, state, SEGMENTS), weight, strict=True))

        return of

    for ours, theirs in zip(in_chunks(x, state, SEGMENTS), recurrence(x, state, SEGMENTS), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    ours = jax.jit(jax.grad(total(in_chunks), (0, 1)))(x, state)
    theirs = jax.jit(jax.grad(total(recurrence), (0, 1)))(x, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), ours, theirs)


def test_a_state_space_model_in_bf16_rounds_operands_only():
    x, state = arrays()
    del x['beta']
    x['q'], x['k'] = (x[name].astype(jnp.bfloat16).astype(np.float32) for name in 'qk')
    rounded = x | {name: x[name].astype(jnp.bfloat16) for name in 'qk'}

    def total(run):
        return lambda x: sum(jnp.vdot(a, jnp.cos(jnp.arange(a.size)).reshape(a.shape)) for a in run(x, state, SEGMENTS))

    ours = *in_chunks(rounded, state, SEGMENTS), jax.grad(total(in_chunks))(rounded)
    theirs = *recurrence(x, state, SEGMENTS), jax.grad(total(recurrence))(x)
    assert {a.dtype for a in ours[:2]} == {np.dtype('float32')}
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b, atol=0.01 * np.abs(b).max())


def test_a_delta_net_is_exact_for_equal_keys():
    """The system of a chunk is then far from diagonal: its inverse as a product of powers loses all digits in f32."""
    x, state = arrays(64)
    x['k'][:], x['beta'][:], x['decay'][:] = 1.0, 0.999, 0.0
    segments = np.ones((B, 64), np.int32)
    for ours, theirs in zip(in_chunks(x, state, segments), recurrence(x, state, segments), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize('solve', [by_products, by_substitution])
@pytest.mark.parametrize('size', [1, 5, 64])
def test_both_ways_to_solve_the_system_of_a_chunk(solve, size):
    rng = np.random.default_rng(3)
    overlap, values = (rng.standard_normal((1, 2, 1, 1, size, n)) for n in (size, 3))
    overlap *= 0.3
    expected = np.linalg.solve(np.eye(size) + np.tril(overlap, -1), values)
    found = solve(overlap.astype(np.float32), values.astype(np.float32))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize('known', [False, True])
def test_the_convolution_sees_its_own_document(known):
    rng = np.random.default_rng(2)
    x, kernel, bias = (rng.standard_normal(s).astype(np.float32) for s in ((B, 9, 2, 3), (2, 3, 4), (2, 3)))
    before = rng.standard_normal((B, 3, 2, 3)).astype(np.float32) if known else None
    segments = SEGMENTS[:, ::4][:, :9]
    found = convolution(x, kernel, bias, segments, before)
    for b in range(B):
        for t in range(9):
            total = bias.copy()
            for back in range(4):
                if t - back >= 0 and segments[b, t - back] == segments[b, t]:
                    total += kernel[..., 3 - back] * x[b, t - back]
                if t - back < 0 and known and segments[b, t] == segments[b, 0]:
                    total += kernel[..., 3 - back] * before[b, 3 + t - back]
            np.testing.assert_allclose(found[b, t], total / (1 + np.exp(-total)), atol=1e-5)


@pytest.mark.parametrize('known', [False, True])
def test_the_gradient_of_the_convolution(known):
    rng = np.random.default_rng(2)
    of_tokens = ((B, 9, 2, 3), *((B, 3, 2, 3),) * known)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 4), (2, 3), *of_tokens)]

    def run(kernel, bias, x, before=None):
        return convolution(x, kernel, bias, SEGMENTS[:, ::4][:, :9], before)

    check_grads(run, arrays, order=1, modes=['rev'], atol=1e-2, rtol=1e-2, eps=1e-2)
