"""Products of operands rounded to eight bits, forward and backward, on any mesh.

int8: Every row and every column has a scale, so that its largest value is 127. Sums are exact, in i32. Gradients are
rounded
    stochastically (Gupta et al. 2015, arXiv:1502.02551, section 3.1), everything else to nearest.
mxfp8, nvfp4: see `block_scaled.py`.
fp8: An operand has one scale, a power of two, computed when it is used ('current scaling'). Values are e4m3, gradients
    e5m2 (Micikevicius et al. 2022, arXiv:2209.05433, section 3), sums f32. There is no stochastic rounding.

This holds for all three products of a weight: y = x w, dx = dy w^T and dw = x^T dy. A scale is that of the whole array,
not of a device's slice: the maximum is over the mesh axes too, except `r`, over whose slow network only gradients are
sent. Stochastic rounding depends on (seed, step, weight) and the index of a number in the whole array.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pretrax.errors import UserError
from pretrax.model.block_scaled import BLOCK, LARGEST, dot_in_blocks, power_of_two, round_in_blocks
from pretrax.shardlib import Dim, axis_index, axis_size, einsum, parse_dims, pmax

Kind = Literal['int8', 'fp8', 'mxfp8', 'nvfp4']
Dims = tuple[Dim, ...]
Seed = jax.Array | None  # u32[2] of stochastic rounding

LONGEST = (2**31 - 1) // 127**2  # terms of an i32 sum of int8 products that cannot overflow
_LARGEST = {jnp.dtype(jnp.float8_e4m3fn): 448.0, jnp.dtype(jnp.float8_e5m2): 57344.0}


def product(kind: Kind, spec: str, x: jax.Array, w: jax.Array, seed: Seed) -> jax.Array:
    """`einsum(spec, x, w)` of operands in eight bits, in x's dtype. w is f32, and so is its gradient.

    Args:
        kind: 'int8', 'fp8', 'mxfp8' or 'nvfp4'.
        spec: the types of x, w and the result.
        x: activations.
        w: a weight.
        seed: of stochastic rounding; only gradients of int8 and nvfp4 need it.
    """
    types = _types(spec)
    return einsum(spec, x, w, dot=lambda _, x, w: _product(kind, types, x, w, seed))


def _types(spec: str) -> '_Types':
    operands, after = spec.split('->')
    x, w = operands.split(',')
    return _Types(parse_dims(x), parse_dims(w), parse_dims(after))


class _Types(NamedTuple):
    x: Dims
    w: Dims
    y: Dims


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of a product, and its type. Gradients are rounded differently."""

    values: jax.Array
    dims: Dims
    is_gradient: bool = False
    seed: Seed = None

    @property
    def names(self) -> list[str]:
        return [dim.name for dim in self.dims]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(kind: Kind, types: _Types, x: jax.Array, w: jax.Array, seed: Seed) -> jax.Array:
    return _forward(kind, types, x, w, seed)[0]


def _forward(kind: Kind, types: _Types, x: jax.Array, w: jax.Array, seed: Seed) -> tuple[jax.Array, tuple]:
    w = w.astype(x.dtype)
    return multiply(kind, Operand(x, types.x), Operand(w, types.w), types.y, x.dtype), (x, w, seed)


def _backward(kind: Kind, types: _Types, residuals: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, seed = residuals
    for_x, for_w = seeds_of(kind, seed)
    dx = multiply(kind, Operand(dy, types.y, True, for_x), Operand(w, types.w), types.x, x.dtype)
    dw = multiply(kind, Operand(x, types.x), Operand(dy, types.y, True, for_w), types.w, jnp.float32)
    return dx, dw, None


_product.defvjp(_forward, _backward)


def seeds_of(kind: Kind, seed: Seed) -> tuple[jax.Array, jax.Array]:
    """The seeds of the two products of a gradient."""
    if kind in ('fp8', 'mxfp8'):
        return None, None
    assert seed is not None, f'the gradient of a product in {kind} needs a seed: give the loss a key'
    return seed, mix(seed + jnp.uint32(1))


def multiply(kind: Kind, a: Operand, b: Operand, result: Dims, dtype: DTypeLike) -> jax.Array:
    """The product of two operands, rounded; summed over the names that the result lacks."""
    after = [dim.name for dim in result]
    summed = [name for name in a.names if name in b.names and name not in after]
    both = [name for name in a.names if name in b.names and name in after]
    rows, columns = ([name for name in names if name not in summed + both] for names in (a.names, b.names))
    sizes = dict(zip(a.names + b.names, a.values.shape + b.values.shape, strict=True))
    parts: list[Any] = []  # arrays, or the values and the scales of blocks
    scales = []
    for operand, own in ((a, rows), (b, columns)):
        order = [operand.names.index(name) for name in both + own + summed]
        flat = [math.prod(sizes[name] for name in names) for names in (both, own, summed)]
        values, scale = round_to(kind, operand, summed if kind == 'int8' else summed + own)
        drawn = uniform(operand.seed, values.shape, operand.dims) if kind == 'nvfp4' and operand.is_gradient else None
        x, draws = (one if one is None else one.transpose(order).reshape(flat) for one in (values, drawn))
        parts.append(round_in_blocks(kind, x, draws) if kind in BLOCK else x)
        scales.append(_laid_out(scale, operand.names, after))
    y = dot_in_blocks(parts[0], parts[1], dtype) if kind in BLOCK else dot(kind, parts[0], parts[1], dtype)
    y = y.reshape([sizes[name] for name in both + rows + columns])
    y = y.transpose([(both + rows + columns).index(name) for name in after])
    return scaled(y, scales[0] * scales[1], dtype)


def dot(kind: Kind, a: jax.Array, b: jax.Array, dtype: DTypeLike) -> jax.Array:
    """[G, N, K] x [G, M, K] -> [G, N, M], both summed over their last dimension, as the fp8 units of GPUs require."""
    _check_sum(kind, a.shape[-1])
    sums = jnp.int32 if kind == 'int8' else dtype
    if a.shape[0] == b.shape[0] == 1:  # one plain product, which compilers optimize best
        return jax.lax.dot_general(a[0], b[0], (((1,), (1,)), ((), ())), preferred_element_type=sums)[None]
    return jax.lax.dot_general(a, b, (((2,), (2,)), ((0,), (0,))), preferred_element_type=sums)


def _check_sum(kind: Kind, terms: int) -> None:
    if kind == 'int8' and terms > LONGEST:
        raise UserError(
            f'precision.matmul=int8: a sum over {terms:,} values on one device may overflow 32 bits\n'
            f'use a smaller batch.micro, of at most {LONGEST:,} tokens, or more devices'
        )


def scaled(y: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Sums of products of rounded values, times their scales. fp8's scales are powers of two: exact in any dtype."""
    if y.dtype == jnp.int32:
        return (y.astype(jnp.float32) * scale).astype(dtype)
    return y * scale.astype(dtype)


def round_to(kind: Kind, operand: Operand, shared: list[str]) -> tuple[jax.Array, jax.Array]:
    """An operand in eight bits, and its f32 scales. Values along the dimensions `shared` have one scale.

    mxfp8 and nvfp4: the values are not rounded yet. Those of nvfp4 have a scale that is beside those of blocks.

    A value that is not finite makes its scale NaN, and so the product.
    """
    x = operand.values
    if kind == 'mxfp8':
        return x, jnp.ones((1,) * x.ndim)
    dimensions = tuple(i for i, name in enumerate(operand.names) if name in shared)
    own = jnp.max(jnp.abs(x), axis=dimensions, keepdims=True).astype(jnp.float32)
    axes = [axis for i in dimensions for axis in operand.dims[i].axes if axis != 'r']
    largest = pmax(' '.join(axes), jax.lax.stop_gradient(own)) if axes else own
    largest = jnp.maximum(largest, 1e-30)  # zeros stay zeros
    if kind == 'fp8':
        dtype = jnp.float8_e5m2 if operand.is_gradient else jnp.float8_e4m3fn
        scale = power_of_two(largest / _LARGEST[jnp.dtype(dtype)])
        values = (x.astype(jnp.float32) / scale).astype(dtype)
    elif kind == 'nvfp4':
        scale = power_of_two(largest / LARGEST)
        values = x.astype(jnp.float32) / scale
    else:
        scale = largest / 127
        values = x.astype(jnp.float32) * (127 / largest)
        stochastic = operand.is_gradient
        values = jnp.floor(values + uniform(operand.seed, x.shape, operand.dims)) if stochastic else jnp.round(values)
        values = jnp.clip(values, -127, 127).astype(jnp.int8)
    # Eight bits cannot hold NaN, and not every network's maximum passes it on.
    return values, jnp.where(jnp.isfinite(own), scale, jnp.nan)


def _laid_out(scale: jax.Array, names: list[str], after: list[str]) -> jax.Array:
    """Scales in the dimensions of the result. Dimensions of size one, which share a scale, may be anywhere."""
    kept = [name for name in names if name in after]
    scale = scale.reshape([scale.shape[names.index(name)] for name in kept])
    scale = scale.transpose([kept.index(name) for name in after if name in kept])
    return jnp.expand_dims(scale, [i for i, name in enumerate(after) if name not in kept])


def uniform(seed: jax.Array, shape: tuple[int, ...], dims: Dims) -> jax.Array:
    """f32 in [0, 1) for every number of an array: a function of the seed and of the index in the whole array.

    Two rounds of a hash. JAX's generator has twenty, which would cost more than the product itself.
    """
    *leading, columns = (
        jnp.arange(size, dtype=jnp.uint32) + _first(dim, size) for size, dim in zip(shape, dims, strict=True)
    )
    row = jnp.zeros((), jnp.uint32)
    for index, size, dim in zip(leading, shape, dims, strict=False):
        row = row[..., None] * jnp.uint32(size * _devices(dim)) + index
    bits = mix((mix(row ^ seed[0])[..., None] + columns * jnp.uint32(0x9E3779B9)) ^ seed[1])
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def _devices(dim: Dim) -> int:
    return axis_size(' '.join(dim.axes)) if dim.axes else 1


def _first(dim: Dim, size: int) -> jax.Array:
    """The first index of this device's slice of a dimension."""
    return (axis_index(' '.join(dim.axes)) * size).astype(jnp.uint32) if _devices(dim) > 1 else jnp.uint32(0)


def mix(x: jax.Array) -> jax.Array:
    """A u32 hash in which every bit of x changes half of the bits (github.com/skeeto/hash-prospector, 'lowbias32')."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
