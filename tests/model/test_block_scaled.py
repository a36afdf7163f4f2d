"""MXFP8 and NVFP4 against the formats' definitions in NumPy, gradients included; which hardware may use them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.errors import UserError
from pretrax.model.block_scaled import round_in_blocks
from pretrax.model.matmul import product
from pretrax.model.numerics import Format, choose_numerics, fast_path
from pretrax.shardlib import einsum, f32, num, psum, typed_shard_map
from small import mesh_of

# All finite values: e2m1 and e4m3 have 1 and 3 bits after the point, and their exponents start at 0 and -6
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)])
E4M3 = E4M3[E4M3 <= 448]


def nearest(x, table):
    """x rounded to a table of values and their negatives; between two, to the even one; beyond them, to the last."""
    i = np.clip(np.searchsorted(table, np.abs(x)), 1, len(table) - 1)
    below, above, size = table[i - 1], table[i], np.abs(x)
    up = (size - below > above - size) | ((size - below == above - size) & (i % 2 == 0))
    return np.sign(x) * np.where(up, above, below)


def rounded(kind, x):
    """The rows of x [.., K] rounded to a format, in double precision."""
    x = np.asarray(x, np.float64)
    length = {'mxfp8': 32, 'nvfp4': 16}[kind]
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % length))).reshape(len(x), -1, length)
    largest = np.abs(blocks).max(-1, keepdims=True)
    if kind == 'mxfp8':
        scale = 2.0 ** np.ceil(np.log2(np.maximum(largest, 1e-30) / 448))
        values = nearest(blocks / scale, E4M3)
    else:
        whole = 2.0 ** np.ceil(np.log2(np.abs(x).max() / (6 * 448)))
        scale = nearest(largest / whole / 6, E4M3) * whole
        values = nearest(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0), E2M1)
    return (values * scale).reshape(len(x), -1)[:, : x.shape[1]]


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def operands():
    """Rows whose sizes differ by powers of ten. 48 numbers are not a multiple of a block of 32."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 48), (48, 24), (40, 24)))
    return x * 10.0 ** rng.integers(-2, 3, (40, 1)).astype(np.float32), w, dy


def results(kind, seed):
    """y, dx and dw."""

    @typed_shard_map
    def multiply(x: num['B/d M'], w: f32['M F/t'], seed: num['two']) -> num['B/d F/t']:
        return product('B/d M, M F/t -> B/d F/t', x, w, Format(kind, seed))

    x, w, dy = operands()
    with jax.set_mesh(mesh_of()):
        y, pullback = jax.vjp(lambda x, w: jax.jit(multiply)(x, w, seed), jnp.asarray(x), jnp.asarray(w))
        return jax.device_get((y, *pullback(jnp.asarray(dy))))


SEED = np.array([3, 5], np.uint32)


def check_products(kind, inputs, found):
    """The product of operands rounded in blocks; gradients of nvfp4 are rounded stochastically."""
    (x, w, dy), (y, dx, dw) = inputs, found
    close(y, rounded(kind, x) @ rounded(kind, w.T).T)
    if kind == 'mxfp8':
        close(dx, rounded(kind, dy) @ rounded(kind, w).T)
        close(dw, rounded(kind, x.T) @ rounded(kind, dy.T).T)


@pytest.mark.parametrize('kind', ['mxfp8', 'nvfp4'])
def test_products_are_those_of_operands_rounded_in_blocks(kind):
    x, w, dy = operands()
    y, dx, dw = results(kind, SEED)
    check_products(kind, (x, w, dy), (y, dx, dw))


@pytest.mark.parametrize('kind', ['mxfp8', 'nvfp4'])
def test_a_sum_over_a_sharded_dimension_has_the_blocks_and_scales_of_the_whole_array(kind):
    @typed_shard_map
    def multiply(x: num['B/d F/t'], w: f32['F/t M'], seed: num['two']) -> num['B/d M']:
        return psum('t', product('B/d F/t, F/t M -> B/d M', x, w, Format(kind, seed)))

    rng = np.random.default_rng(1)
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 64), (64, 24), (40, 24)))
    with jax.set_mesh(mesh_of(t=2)):
        y, pullback = jax.vjp(lambda x, w: jax.jit(multiply)(x, w, SEED), jnp.asarray(x), jnp.asarray(w))
        dx, dw = pullback(jnp.asarray(dy))
    check_products(kind, (x, w, dy), (y, dx, dw))


@pytest.mark.parametrize('kind', ['mxfp8', 'nvfp4'])
def test_a_product_varies_over_the_mesh_if_only_its_weight_does(kind):
    @typed_shard_map
    def multiply(x: num['B/d M'], w: f32['M F/t'], seed: num['two']) -> num['B/d']:
        return psum('t', einsum('B/d F/t -> B/d', product('B/d M, M F/t -> B/d F/t', x, w, Format(kind, seed))))

    x, w, _ = operands()
    with jax.set_mesh(mesh_of(t=2)):
        y = jax.jit(multiply)(x, w, SEED)
    close(y, (rounded(kind, x) @ rounded(kind, w.T).T).sum(1))


def test_gradients_in_nvfp4_are_fair_on_average():
    x, w, dy = operands()
    draws = [results('nvfp4', np.array([i, 7], np.uint32))[1:] for i in range(60)]
    exact = dy.astype(np.float64) @ rounded('nvfp4', w).T, rounded('nvfp4', x.T) @ dy
    for i in range(2):
        each = [np.abs(draw[i] - exact[i]).mean() for draw in draws]
        mean = np.abs(np.mean([draw[i] for draw in draws], axis=0) - exact[i]).mean()
        assert mean < 2.5 * np.mean(each) / 60**0.5 + 0.15 * np.mean(each)
        assert not np.array_equal(draws[0][i], draws[1][i])


@pytest.mark.parametrize('kind', ['mxfp8', 'nvfp4'])
def test_a_block_that_is_not_finite_is_nan_and_zeros_stay_zeros(kind):
    x = np.zeros((1, 2, 64), np.float32)
    x[0, 0, 3] = np.inf
    values, scales = (np.asarray(a, np.float32) for a in round_in_blocks(kind, jnp.asarray(x), None))
    products = (values.reshape(*scales.shape, -1) * scales[..., None]).reshape(x.shape)
    length = 64 // scales.shape[-1]
    assert np.isnan(products[0, 0, :length]).all()
    assert not products[0, 0, length:].any()
    assert not products[0, 1].any()


@pytest.mark.parametrize('kind', ['mxfp8', 'nvfp4'])
def test_only_hardware_with_units_for_them_may_use_them(kind):
    layers, mesh = [['q', 'up']] * 3, dict(mesh_of().shape)
    numerics, line = choose_numerics(kind, ('head',), layers, '', mesh, 'cuda', 'NVIDIA B200')
    assert numerics.blocks[1] == {'q': kind, 'up': kind}
    assert 'NVIDIA B200 has hardware for it' in line
    assert 'SLOW' in choose_numerics(kind, ('head',), layers, '', mesh, 'cpu', '')[1]
    for platform, device in (('cuda', 'NVIDIA H100 80GB HBM3'), ('tpu', 'TPU v6 lite')):
        assert fast_path(kind, platform, device).startswith('SLOW')
        with pytest.raises(UserError, match=rf'precision.matmul={kind}: NVIDIA GPUs from B200 and GB200 on(.|\n)*use '):
            choose_numerics(kind, ('head',), layers, '', mesh, platform, device)
