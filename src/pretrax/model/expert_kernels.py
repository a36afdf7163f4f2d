"""Products of experts on GPUs: two Pallas kernels, compiled by Triton. One launch has the blocks of all experts.

`dispatch.sort_into_blocks` makes the blocks: each has rows of one expert. A loop over them would copy the matrix of its
expert for each block, and read and write the expert's whole gradient. The kernels read tiles of a matrix where it lies,
and sum a tile of a gradient over all rows of its expert in registers.
Letters: N rows, K summed dimension, F columns, G experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pretrax.shardlib import f32, i32, num, vary_together

LEAST = 16  # rows of a block
_TILE = 128  # rows and columns of a tile of the result
_STEP = 64  # terms of a sum that a program reads at a time
_BAND = 8  # tiles of rows that use the same columns of a matrix one after another, so that the cache has them


def obstacle(dtype: DTypeLike, *widths: int) -> str:
    """Why the kernels cannot multiply in a dtype, or matrices of these widths; '': they can."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f'they multiply bf16 or f16, not {jnp.dtype(dtype).name}'
    if wrong := [width for width in widths if width % _STEP]:
        return f'they need widths that are multiples of {_STEP}, not {wrong[0]}'
    return ''


def times_group(
    x: num['N K'], w: num['G K F'], groups: i32['blocks'], transposed: bool, interpret: bool = False
) -> num['N F']:
    """Each block of rows times the matrix of its group, in x's dtype; `transposed`: w is [G, F, K]. Sums are f32."""
    (n, k), f = x.shape, w.shape[1 if transposed else 2]
    block, height, width = n // groups.shape[0], min(n // groups.shape[0], _TILE), _tile(f)
    tiles, columns = n // height, f // width

    def kernel(x_ref: Any, w_ref: Any, groups_ref: Any, y_ref: Any) -> None:
        band, place = pl.program_id(0) // (_BAND * columns), pl.program_id(0) % (_BAND * columns)
        tall = jnp.minimum(tiles - band * _BAND, _BAND)  # the last band may be lower
        tile, column = band * _BAND + place % tall, place // tall
        rows, into = pl.ds(tile * height, height), pl.ds(column * width, width)
        group = groups_ref[tile * height // block]

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            terms = pl.ds(i * _STEP, _STEP)
            matrix = w_ref[group, into, terms].T if transposed else w_ref[group, terms, into]
            return total + jnp.dot(x_ref[rows, terms], matrix, preferred_element_type=jnp.float32)

        total = jax.lax.fori_loop(0, k // _STEP, add, jnp.zeros((height, width), jnp.float32))
        y_ref[rows, into] = total.astype(y_ref.dtype)

    return _run(kernel, tiles * columns, jax.ShapeDtypeStruct((n, f), x.dtype), interpret, (x, w, groups))


def group_gradients(
    x: num['N K'], dy: num['N F'], groups: i32['blocks'], n_groups: int, interpret: bool = False
) -> f32['G K F']:
    """For each group the sum over its rows of x[n] dy[n]; zeros for a group without rows. `groups` ascend."""
    (n, k), f = x.shape, dy.shape[1]
    block = n // groups.shape[0]
    ends = jnp.sum(groups[None] < jnp.arange(n_groups + 1)[:, None], axis=1, dtype=jnp.int32) * block
    step, height, width = min(block, _STEP), _tile(k), _tile(f)
    tiles, columns = k // height, f // width

    def kernel(x_ref: Any, dy_ref: Any, ends_ref: Any, w_ref: Any) -> None:
        group, place = pl.program_id(0) // (tiles * columns), pl.program_id(0) % (tiles * columns)
        left, right = pl.ds(place % tiles * height, height), pl.ds(place // tiles * width, width)

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            rows = pl.ds(i * step, step)
            return total + jnp.dot(x_ref[rows, left].T, dy_ref[rows, right], preferred_element_type=jnp.float32)

        first, end = ends_ref[group] // step, ends_ref[group + 1] // step
        w_ref[group, left, right] = jax.lax.fori_loop(first, end, add, jnp.zeros((height, width), jnp.float32))

    result = jax.ShapeDtypeStruct((n_groups, k, f), jnp.float32)
    return _run(kernel, n_groups * tiles * columns, result, interpret, (x, dy, ends))


def _tile(width: int) -> int:
    return _TILE if width % _TILE == 0 else _STEP


def _run(kernel: Any, programs: int, result: jax.ShapeDtypeStruct, interpret: bool, operands: tuple) -> jax.Array:
    from jax.experimental.pallas import triton  # registers the compiler, which JAX has on some platforms only

    operands = vary_together(*operands)
    result = result.update(manual_axis_type=jax.typeof(operands[0]).manual_axis_type)
    options = triton.CompilerParams(num_warps=8, num_stages=3)
    call = pl.pallas_call(
        kernel, result, grid=(programs,), compiler_params=options, name='experts', interpret=interpret
    )
    return call(*operands)
