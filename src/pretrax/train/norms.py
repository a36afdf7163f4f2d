"""Norms, products and statistics of whole trees of sharded arrays, each in one all-reduce.

Under `jit`, XLA adds an all-reduce for each array and for each mesh axis that shards it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from pretrax.shardlib import as_partial_sum, axis_index, axis_size, f32, pmax, psum, type_of, typed_shard_map
from pretrax.shardlib.types import ArrayType, current_mesh


def global_norm(tree: Any, shardings: Any) -> jax.Array:
    """The Euclidean norm of a tree, f32[]. None counts as zeros. Sends 4 bytes."""
    return jnp.sqrt(inner_products([(tree, tree)], shardings)[0])


def inner_products(pairs: Sequence[tuple[Any, Any]], shardings: Any) -> jax.Array:
    """The inner product of each pair of trees, f32[pairs]. Sends 4 bytes for each pair.

    Args:
        pairs: trees, all with the same shapes.
        shardings: the sharding of each array.
    """
    types = _types(pairs[0][0], shardings)
    summed, all_types = _axes(types), _repeated(types, 2 * len(pairs))

    @typed_shard_map
    def products(trees: all_types) -> f32['pairs']:
        def product(x: jax.Array, y: jax.Array, array: ArrayType) -> jax.Array:
            return _once(summed, array, jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32)))

        sums = jnp.stack([sum(map(product, a, b, types)) for a, b in zip(trees[::2], trees[1::2], strict=True)])
        return _over(summed, psum, sums)

    return products(tuple(tuple(jax.tree.leaves(tree)) for pair in pairs for tree in pair))


def squares_and_maxima(trees: Sequence[Any], shardings: Any, by_row: Any) -> list[tuple[Any, Any]]:
    """For each tree, the sums of the squares of its arrays and the largest absolute values, as two trees of f32[rows].

    Sends 4 bytes for each number, in an all-reduce of the sums and one of the maxima.

    Args:
        trees: arrays, with the same shapes in each tree.
        shardings: the sharding of each array.
        by_row: for each array, whether each index of its first dimension is a row; if not, the array has one row.
    """
    types, split = _types(trees[0], shardings), jax.tree.leaves(by_row)
    summed, all_types = _axes(types), _repeated(types, len(trees))

    @typed_shard_map
    def reduced(trees: all_types) -> tuple[f32['numbers'], f32['numbers']]:
        def rows(x: jax.Array, array: ArrayType, is_split: bool) -> tuple[jax.Array, ...]:
            x = (x if is_split else x[None]).astype(jnp.float32)
            others = tuple(range(1, x.ndim))
            found = jnp.sum(jnp.square(x), axis=others), jnp.max(jnp.abs(x), axis=others)
            if is_split and (axes := ' '.join(array.dims[0].axes)):  # each device has some of the rows
                whole, start = jnp.zeros(len(x) * axis_size(axes)), axis_index(axes) * len(x)
                found = tuple(jax.lax.dynamic_update_slice(whole, part, (start,)) for part in found)
            return tuple(_once(summed, array, part) for part in found)

        found = [rows(*each) for arrays in trees for each in zip(arrays, types, split, strict=True)]
        squares, maxima = (jnp.concatenate(parts) for parts in zip(*found, strict=True))
        return _over(summed, psum, squares), _over(summed, pmax, maxima)

    squares, maxima = reduced(tuple(tuple(jax.tree.leaves(tree)) for tree in trees))
    numbers = jax.tree.map(lambda x, is_split: jnp.zeros(len(x) if is_split else 1), trees[0], by_row)
    restore = ravel_pytree([numbers] * len(trees))[1]
    return list(zip(restore(squares), restore(maxima), strict=True))


def _types(tree: Any, shardings: Any) -> list[ArrayType]:
    """The types of the arrays of a tree."""
    arrays, structure = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    pairs = zip(arrays, structure.flatten_up_to(shardings), strict=True)
    return [type_of(sharding, x.ndim) for x, sharding in pairs if x is not None]


def _repeated(types: Sequence[ArrayType], times: int) -> Any:
    """The type of a tuple of trees."""
    return tuple[*[tuple[*types]] * times]


def _axes(types: Sequence[ArrayType]) -> tuple[str, ...]:
    """The mesh axes that shard one of the arrays, in the order of the mesh."""
    return tuple(axis for axis in current_mesh().axis_names if any(axis in one.axes for one in types))


def _once(summed: tuple[str, ...], array: ArrayType, x: jax.Array) -> jax.Array:
    """The result of a device for its slice of an array, as a partial sum along `summed`. Copies count once."""
    return as_partial_sum(' '.join(axis for axis in summed if axis not in array.axes), x)


def _over(axes: tuple[str, ...], reduction: Callable[[str, Any], Any], x: jax.Array) -> Any:
    """The reduction over mesh axes; x itself if there are none."""
    return reduction(' '.join(axes), x) if axes else x
