"""The hook of matrix products: which dtypes go into and come out of the three products, and that they are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.model.matmul import product
from pretrax.model.numerics import Format
from pretrax.shardlib import f32, num, psum, typed_shard_map
from small import mesh_of

SPEC = 'B/d L M, M H D -> B/d L H D'


def test_operands_have_the_compute_dtype_and_the_weight_gradient_is_f32():
    with jax.set_mesh(mesh_of()):
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*operands(jnp.bfloat16))
    products = [([str(v.aval.dtype) for v in e.invars], str(e.outvars[0].aval.dtype)) for e in dots(jaxpr)]
    forward, *backward = products
    assert forward == (['bfloat16', 'bfloat16'], 'bfloat16')
    # x's gradient in the compute dtype, w's in f32
    assert sorted(backward) == [
        (['bfloat16', 'bfloat16'], 'bfloat16'), (['bfloat16', 'bfloat16'], 'float32'),
    ]  # fmt: skip


@pytest.mark.parametrize(('dtype', 'rounding'), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)])
def test_values_and_gradients(dtype, rounding):
    x, w, dy = operands(dtype)
    with jax.set_mesh(mesh_of(1, 2, 1)):
        y = jax.jit(multiply)(x, w)
        dx, dw = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
    # Exact products of the rounded operands, in double precision
    x, w, dy = (np.asarray(jnp.asarray(a, dtype), np.float64) for a in (x, w, dy))
    close(y, np.einsum('blm,mhd->blhd', x, w), rounding)
    close(dx, np.einsum('blhd,mhd->blm', dy, w), rounding)
    close(dw, np.einsum('blhd,blm->mhd', dy, x), 1e-6)  # f32 whatever the compute dtype


@typed_shard_map
def multiply(x: num['B/d L M'], w: f32['M H D']) -> num['B/d L H D']:
    return product(SPEC, x, w, Format('compute'))


@typed_shard_map
def loss(x: num['B/d L M'], w: f32['M H D'], dy: num['B/d L H D']) -> f32['']:
    return psum('d', jnp.sum((product(SPEC, x, w, Format('compute')) * dy).astype(jnp.float32)))


def operands(dtype):
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 8, 64), (64, 2, 16), (4, 8, 2, 16)))
    return jnp.asarray(x, dtype), w, jnp.asarray(dy, dtype)


def close(actual, expected, rounding):
    """Equal but for a relative rounding of the result; sums of 64 terms of size one have that size too."""
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=rounding, atol=8 * rounding)


def dots(jaxpr, name='dot_general'):
    """The matrix products of a program, in order."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        is_program = lambda x: hasattr(x, 'eqns')  # noqa: E731
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(inner):
                yield from dots(inner, name)
