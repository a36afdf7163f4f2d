"""Products with int8 weights have the error of the weights alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.model import weight_only
from pretrax.model.weight_only import grouped_product, quantize, scaled_product
from pretrax.shardlib import f32, i8, i32, num, typed_shard_map
from small import mesh_of

RNG = np.random.default_rng(0)


@typed_shard_map
def queries(x: num['B L M'], w: i8['M H D'], scale: f32['H D']) -> num['B L H D']:
    return scaled_product('B L M, M H D -> B L H D', x, w, scale, x.dtype)


@typed_shard_map
def output(x: num['B L H D'], w: i8['H D M'], scale: f32['M']) -> num['B L M']:
    return scaled_product('B L H D, H D M -> B L M', x, w, scale, x.dtype)


@typed_shard_map
def head(x: num['B L M'], w: i8['V M'], scale: f32['V']) -> f32['B L V']:
    return scaled_product('B L M, V M -> B L V', x, w, scale, jnp.float32)


PRODUCTS = {
    'queries': (queries, 'blm,mhd->blhd', (64, 4, 8), (0,)),
    'output': (output, 'blhd,hdm->blm', (4, 16, 48), (0, 1)),
    'head': (head, 'blm,vm->blv', (100, 64), (1,)),
}


@pytest.mark.parametrize('name', PRODUCTS)
def test_a_product_equals_that_of_the_dequantized_weights(name):
    """Tokens differ a thousandfold in size, and an activation may be a thousand times smaller than its token's
    largest.
    """
    function, equation, shape, inputs = PRODUCTS[name]
    w = RNG.standard_normal(shape).astype(np.float32) * 0.02
    values, scale = quantize(jnp.asarray(w), inputs)
    width = tuple(shape[i] for i in inputs)
    x = RNG.standard_normal((2, 3, *width)).astype(np.float32)
    x *= 10.0 ** RNG.uniform(-3, 3, (2, 3, *(1,) * len(width)))
    x[..., 0] *= 1000
    dequantized = np.asarray(values, np.float64) * np.expand_dims(np.asarray(scale, np.float64), inputs)
    assert np.all(np.abs(dequantized - w) <= np.expand_dims(np.asarray(scale), inputs) * 0.5001)
    with jax.set_mesh(mesh_of()):
        y = np.asarray(jax.jit(function)(x, values, scale))
    expected = np.einsum(equation, np.asarray(x, np.float64), dequantized)
    # An activation is wrong by at most half of 2^-15 of its token's largest, so a sum by that times its weights.
    largest = np.max(np.abs(x), axis=tuple(range(2, x.ndim)))
    total = np.sum(np.abs(dequantized), axis=inputs)
    allowed = 2.0**-16 * largest.reshape(2, 3, *(1,) * total.ndim) * total + 1e-6 * np.abs(expected)
    assert np.all(np.abs(y - expected) <= allowed)


def test_zeros_stay_zeros_and_nan_stays_nan():
    values, scale = quantize(jnp.zeros((64, 4, 8)), (0,))
    assert not np.any(values)
    x = np.zeros((1, 2, 64), np.float32)
    x[0, 1, 3] = np.nan
    with jax.set_mesh(mesh_of()):
        y = np.asarray(queries(x, values, scale))
    assert not np.any(y[0, 0])
    assert np.all(np.isnan(y[0, 1]))


def test_a_token_alone_gives_the_same_bits_as_in_a_batch():
    values, scale = quantize(jnp.asarray(RNG.standard_normal((100, 64)).astype(np.float32)), (1,))
    x = RNG.standard_normal((1, 5, 64)).astype(np.float32)
    with jax.set_mesh(mesh_of()):
        together = np.asarray(jax.jit(head)(x, values, scale))
        apart = [np.asarray(jax.jit(head)(x[:, i : i + 1], values, scale)) for i in range(5)]
    np.testing.assert_array_equal(together, np.concatenate(apart, axis=1))


@pytest.mark.parametrize('outputs', [96, 97])
@pytest.mark.parametrize('rows', [1, 16, 17])
def test_sums_of_a_large_matrix_are_rounded_once(outputs, rows, monkeypatch):
    """It is multiplied in blocks if their number divides its outputs and there are few rows."""
    monkeypatch.setattr(weight_only, '_BLOCK', 1024)
    halves, w = (RNG.integers(-127, 128, (*n, 64), np.int8) for n in ((2, rows), (outputs,)))
    found = jax.jit(weight_only._sums)(halves, w)
    np.testing.assert_allclose(found, (256 * halves[0].astype(float) + halves[1]) @ w.T.astype(float), rtol=2**-24)


@pytest.mark.parametrize('method', ['blocks', 'runs', 'ragged'])
def test_each_row_meets_the_matrix_of_its_group(method):
    w = RNG.standard_normal((3, 64, 8)).astype(np.float32)
    values, scale = quantize(jnp.asarray(w), (1,))
    x = RNG.standard_normal((8, 64)).astype(np.float32)
    of_rows = np.array([0, 0, 0, 0, 2, 2, 2, 2])

    @typed_shard_map
    def multiply(x: num['N M'], w: i8['E M F'], scale: f32['E F'], groups: i32['G']) -> num['N F']:
        return grouped_product('N M, E M F -> N F', x, w, scale, groups, method)

    groups = np.array([4, 0, 4] if method == 'ragged' else [0, 0, 2, 2], np.int32)
    with jax.set_mesh(mesh_of()):
        y = np.asarray(jax.jit(multiply)(x, values, scale, groups))
    matrices = (np.asarray(values, np.float64) * np.asarray(scale, np.float64)[:, None])[of_rows]
    allowed = 2.0**-16 * np.max(np.abs(x), axis=1, keepdims=True) * np.sum(np.abs(matrices), axis=1) + 1e-4
    assert np.all(np.abs(y - np.einsum('nm,nmf->nf', x, matrices)) <= allowed)


def test_a_cpu_multiplies_int8_and_other_hardware_the_compute_dtype():
    """Converting the weights first would make a CPU write four times what it reads."""
    arguments = jnp.zeros((1, 1, 64), jnp.bfloat16), jnp.zeros((100, 64), jnp.int8), jnp.zeros(100)
    dots = {}
    with jax.set_mesh(mesh_of()):
        for platform in ('cpu', 'cuda'):
            text = jax.jit(head).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
            dots[platform] = [line for line in text.splitlines() if 'dot_general' in line]
    assert ['tensor<1x100x64xi8>, tensor<1x2x64xi8>' in line for line in dots['cpu']] == [True]
    assert ['xbf16>, tensor<100x64xbf16>' in line for line in dots['cuda']] == [True]
