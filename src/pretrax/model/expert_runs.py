"""Products of experts on CPUs: the rows of an expert are multiplied in as few products as their number allows.

`dispatch.sort_into_blocks` makes the blocks. Those of one expert are adjacent and form its run. A product per block
would read the matrix of the expert, or its gradient, once for each block. So a run is cut into products of `_PRODUCTS`
blocks: small blocks then leave few rows empty, and most rows are in large products.
Letters: N rows, K summed dimension, F columns, G experts.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pretrax.model.xla_cpu import sum_over_rows
from pretrax.shardlib import f32, i32, num, vary_together

_PRODUCTS = 16, 4, 1  # blocks of a product; the first serves as often as it can, then the second


def times_group(x: num['N K'], w: num['G K F'], groups: i32['blocks'], transposed: bool) -> num['N F']:
    """Each block of rows times the matrix of its group, in x's dtype; `transposed`: w is [G, F, K]. Sums are f32."""
    equation = 'nk,fk->nf' if transposed else 'nk,kf->nf'
    x, w, groups, y = vary_together(x, w, groups, jnp.zeros((len(x), w.shape[1 if transposed else 2]), x.dtype))

    def multiply(group: i32[''], y: num['N F'], start: i32[''], length: int) -> num['N F']:
        rows = jax.lax.dynamic_slice_in_dim(x, start, length)
        rows = jnp.einsum(equation, rows, w[group], preferred_element_type=x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(y, rows, start, 0)

    return _over_products(multiply, y, groups, len(w), len(x))


def group_gradients(x: num['N K'], dy: num['N F'], groups: i32['blocks'], n_groups: int) -> f32['G K F']:
    """For each group the sum over its rows of x[n] dy[n]; zeros for a group without rows. `groups` ascend."""
    x, dy, groups, total = vary_together(x, dy, groups, jnp.zeros((n_groups, x.shape[1], dy.shape[1]), jnp.float32))

    def add(group: i32[''], total: f32['G K F'], start: i32[''], length: int) -> f32['G K F']:
        rows = (jax.lax.dynamic_slice_in_dim(z, start, length) for z in (x, dy))
        return total.at[group].add(sum_over_rows(*rows))

    return _over_products(add, total, groups, n_groups, len(x))


def _over_products(step: Callable, total: jax.Array, groups: i32['blocks'], n_groups: int, n_rows: int) -> jax.Array:
    """`total` after a step for each product: step(group, total, first row, number of rows) -> total."""
    block = n_rows // len(groups)
    counts = jnp.sum(groups == jnp.arange(n_groups)[:, None], axis=1, dtype=jnp.int32)
    first = jnp.cumsum(counts) - counts
    with_rows = jnp.argsort(counts == 0, stable=True)

    def run(i: i32[''], total: jax.Array) -> jax.Array:
        group = with_rows[i]
        start, left = first[group], counts[group]

        def multiply(i: i32[''], total: jax.Array, start: i32[''], blocks: int) -> jax.Array:
            return step(group, total, (start + i * blocks) * block, blocks * block)

        for blocks in _PRODUCTS:
            if blocks <= len(groups):
                one = functools.partial(multiply, start=start, blocks=blocks)
                total = jax.lax.fori_loop(0, left // blocks, one, total)
                start, left = start + left // blocks * blocks, left % blocks
        return total

    return jax.lax.fori_loop(0, jnp.sum(counts > 0, dtype=jnp.int32), run, total)
