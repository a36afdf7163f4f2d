"""Cross-entropy over a sharded vocabulary equals the textbook's, in value and gradient, and keeps no f32 copy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.model.axes import TOKENS
from pretrax.model.loss import Batch, cross_entropy, loss_terms
from pretrax.shardlib import f32, i32, num, psum, typed_shard_map
from small import mesh_of, random_batch

B, L, V, PADDED = 4, 6, 100, 128


@typed_shard_map
def sharded(
    logits: num['B/r/d/e L/c V/t'], targets: i32['B/r/d/e L/c']
) -> tuple[f32['B/r/d/e L/c'], f32['B/r/d/e L/c']]:
    return cross_entropy(logits, targets, V)


def textbook(logits, targets):
    """Without the padding columns."""
    real = jnp.asarray(logits, jnp.float32)[..., :V]
    picked = jnp.take_along_axis(jax.nn.log_softmax(real), targets[..., None], axis=-1)[..., 0]
    return -picked, jax.nn.logsumexp(real, axis=-1)


def examples(scale, padding):
    """Logits of which the largest of some rows, and the target of some, lie in each shard;
    and `padding` where none is.
    """
    rng = np.random.default_rng(0)
    logits = np.full((B, L, PADDED), padding, np.float32)
    logits[..., :V] = scale * rng.standard_normal((B, L, V))
    targets = rng.integers(0, V, (B, L)).astype(np.int32)
    targets[0] = [0, 31, 32, 64, 96, 99]
    return logits, targets, rng.standard_normal((2, B, L)).astype(np.float32)


def weighted(function):
    """A scalar that depends on both results with different weights, for gradients."""
    return lambda logits, targets, by: sum(jnp.sum(w * y) for w, y in zip(by, function(logits, targets), strict=True))


@pytest.mark.parametrize('t', [1, 2, 4])
@pytest.mark.parametrize(('scale', 'padding'), [(1, 0.0), (1, 1e30), (1e4, -5.0), (1e-3, jnp.inf)])
def test_equals_log_softmax(t, scale, padding):
    logits, targets, by = examples(scale, padding)
    expected = textbook(logits, targets)
    d_expected = jax.grad(weighted(textbook))(jnp.asarray(logits), targets, by)
    with jax.set_mesh(mesh_of(1, 2, t)):
        actual = jax.jit(sharded)(logits, targets)
        d_actual = jax.jit(jax.grad(weighted(sharded)))(logits, targets, by)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(d_actual, d_expected, rtol=1e-5, atol=1e-6)
    assert not np.any(d_actual[..., V:])


def test_bf16_logits_are_only_rounded_once():
    logits, targets, by = examples(3, 7.0)
    logits = jnp.asarray(logits, jnp.bfloat16)
    with jax.set_mesh(mesh_of(1, 1, 2)):
        actual = jax.jit(sharded)(logits, targets)
        d_actual = jax.jit(jax.grad(weighted(sharded)))(logits, targets, by)
    assert all(x.dtype == jnp.float32 for x in actual)
    np.testing.assert_allclose(actual, textbook(logits, targets), rtol=1e-6, atol=1e-6)
    assert d_actual.dtype == jnp.bfloat16
    d_expected = jax.grad(weighted(textbook))(logits.astype(jnp.float32), targets, by)
    np.testing.assert_allclose(d_actual.astype(jnp.float32), d_expected, rtol=2**-8, atol=1e-30)


def test_the_backward_pass_keeps_no_f32_copy_of_the_logits():
    """Between forward and backward there is no f32 copy of bf16 logits. (Inside each pass it is the compiler's fusion
    that avoids one; tests/deviceless reads the compiled program.)"""
    logits, targets, by = examples(3, 7.0)
    with jax.set_mesh(mesh_of(1, 1, 2)):
        _, pullback = jax.vjp(lambda x: weighted(sharded)(x, targets, by), jnp.asarray(logits, jnp.bfloat16))
    kept = [x.dtype for x in jax.tree.leaves(pullback) if x.size >= logits.size]
    assert kept == [jnp.bfloat16]


def test_terms_are_weighted_sums_and_their_denominators():
    """Two devices' terms, added up, are those of the whole batch: numerators and denominators, not quotients."""
    batch = random_batch(B, length=L)
    logits, _, _ = examples(1, 3.0)

    @typed_shard_map
    def terms(logits: f32['B/r/d/e L/c V/t'], batch: Batch) -> dict[str, tuple[f32[''], f32['']]]:
        return psum(TOKENS, loss_terms(logits, batch, V, 0.5))

    with jax.set_mesh(mesh_of(2, 2, 2)):
        found = jax.jit(terms)(logits, batch)
    nll, log_z = textbook(logits, batch.targets)
    count = batch.mask.sum()
    assert found.keys() == {'nll', 'z_loss'}
    np.testing.assert_allclose(found['nll'], ((nll * batch.mask).sum(), count), rtol=1e-6)
    np.testing.assert_allclose(found['z_loss'], (0.5 * (log_z**2 * batch.mask).sum(), count), rtol=1e-6)


def test_without_weight_there_is_no_z_loss():
    with jax.set_mesh(mesh_of()):

        @typed_shard_map
        def names(logits: f32['B/r/d/e L/c V/t'], batch: Batch) -> f32['']:
            assert loss_terms(logits, batch, V, 0.0).keys() == {'nll'}
            return psum(TOKENS, jnp.sum(batch.mask))

        names(examples(1, 0.0)[0], random_batch(B, length=L))
