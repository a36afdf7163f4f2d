"""Products with weights that are kept in int8, for inference. Every output channel has a scale.

A CPU multiplies int8 by int8. Activations are rounded to 16 bits, for each token relative to its largest value, and
multiplied as two halves of 8 bits, whose sums are exact. So the only error that counts is that of the weights.
Converting the weights to f32 instead would write four times the bytes that are read; other hardware converts them as it
multiplies.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pretrax.shardlib import einsum

_LARGEST = 127 * 256 + 127  # whose halves are 127 and 127
_FEW_ROWS = 32  # two for each token; from 64 on, packing the matrix pays
_BLOCK = 4 << 20  # bytes


def quantize(w: jax.Array, inputs: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """A matrix in int8 and the f32 scale of each output channel.

    Args:
        w: f32, any shape.
        inputs: its input dimensions, which the scale lacks.
    """
    largest = jnp.max(jnp.abs(w), axis=inputs, keepdims=True)
    scale = jnp.maximum(largest, 1e-30) / 127  # zeros stay zeros
    return jnp.round(w / scale).astype(jnp.int8), jnp.squeeze(scale, inputs)


def scaled_product(spec: str, x: jax.Array, w: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`einsum(spec, x, w * scale)`, whose output channels are the last dimensions of the result.

    Args:
        spec: types of x, w and the result.
        x: activations.
        w: int8.
        scale: f32, of each output channel.
        dtype: of the result; sums are exact or f32.
    """
    return einsum(spec, x, w, dot=lambda equation, x, w: (_dot(equation, x, w) * scale).astype(dtype))


def grouped_product(
    spec: str, x: jax.Array, w: jax.Array, scale: jax.Array, groups: jax.Array, method: str
) -> jax.Array:
    """`matmul.grouped_product` of int8 matrices, with the scale of each group's output channels."""

    def dot(_: str, x: jax.Array, w: jax.Array) -> jax.Array:
        rows, matrices = x.reshape(-1, x.shape[-1]), w.reshape(-1, *w.shape[-2:])
        scales = scale.reshape(len(matrices), -1)
        if method == 'ragged':
            of_rows = jnp.repeat(scales, groups, axis=0, total_repeat_length=len(rows))
            y = jax.lax.ragged_dot(rows, matrices.astype(x.dtype), groups, preferred_element_type=jnp.float32) * of_rows
        else:
            blocks = rows.reshape(len(groups), -1, rows.shape[-1])
            y = jax.lax.map(lambda one: _dot('nm,mf->nf', one[0], matrices[one[1]]) * scales[one[1]], (blocks, groups))
        return y.reshape(*x.shape[:-1], -1).astype(x.dtype)

    return einsum(spec, x, w, dot=dot)


def _dot(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """f32 products with int8 values, without their scales."""
    of_platform = functools.partial(_in_halves, equation), functools.partial(_converted, equation)
    return jax.lax.platform_dependent(x, w, cpu=of_platform[0], default=of_platform[1])


def _converted(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, w.astype(x.dtype), preferred_element_type=jnp.float32)


def _in_halves(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """(256 high + low) w, where high and low are int8. Outputs are the last dimensions of the result."""
    operands, y = equation.split('->')
    of_x, of_w = operands.split(',')
    x = x.astype(jnp.float32)
    inputs = tuple(i for i, letter in enumerate(of_x) if letter not in y)
    unit = jnp.maximum(jnp.max(jnp.abs(x), axis=inputs, keepdims=True), 1e-30) / _LARGEST
    fixed = jnp.round(x / unit).astype(jnp.int32)
    high = (fixed + 128) >> 8
    halves = jnp.stack([high, fixed - (high << 8)]).astype(jnp.int8)
    outputs, contracted = ([letter for letter in of_w if (letter in y) == is_output] for is_output in (True, False))
    assert of_x.endswith(''.join(contracted)), equation
    matrix = jnp.einsum(f'{of_w}->{"".join(outputs + contracted)}', w)
    width = math.prod(x.shape[i] for i in inputs)
    sums = _sums(halves.reshape(2, -1, width), matrix.reshape(-1, width))
    sums = sums.reshape(*x.shape[: -len(inputs)], *matrix.shape[: len(outputs)])
    unit = jnp.squeeze(unit, inputs)  # the first dimensions of the result are those of x
    return sums * unit.reshape(*unit.shape, *(1,) * len(outputs))


def _sums(halves: jax.Array, matrix: jax.Array) -> jax.Array:
    """f32 [rows, outputs] of the int8 halves of rows [2, rows, inputs] and an int8 matrix [outputs, inputs].

    XLA for CPUs packs the right operand in each product, and rounds the left one to another format. So if there are few
    rows, they are the right one, and a large matrix is converted in blocks, which stay in the cache of the processor.
    """
    rows = halves.reshape(-1, halves.shape[-1])
    if len(rows) > _FEW_ROWS:
        sums = jax.lax.dot_general(rows, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        high, low = sums.astype(jnp.float32).reshape(2, -1, len(matrix))
        return 256 * high + low
    n = len(matrix)
    blocks = next(k for k in (64, 32, 16, 8, 4, 2, 1) if n % k == 0 and (k == 1 or matrix.size > k // 2 * _BLOCK))
    matrices, many = matrix.reshape(blocks, n // blocks, -1), jnp.broadcast_to(rows, (blocks, *rows.shape))
    batched = ((2,), (2,)), ((0,), (0,))
    sums = jax.lax.dot_general(matrices, many, batched, preferred_element_type=jnp.int32)
    # The first barrier keeps XLA from exchanging the operands, the second from adding as it transposes.
    high, low = jnp.moveaxis(jax.lax.optimization_barrier(sums).astype(jnp.float32).reshape(n, 2, -1), 1, 0)
    return jax.lax.optimization_barrier(256 * high + low).T
