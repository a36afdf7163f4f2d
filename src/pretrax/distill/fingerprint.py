"""A fingerprint of the weights of a teacher, which does not depend on the mesh."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.distill.student import Teacher


def fingerprint(teacher: Teacher | None) -> str | None:
    """Identifies the weights of a teacher, whatever their sharding; None: there is none."""
    if teacher is None:
        return None
    sums = jax.device_get(_sums(teacher.weights))
    digest = hashlib.sha256()
    for path, number in jax.tree_util.tree_leaves_with_path(sums):
        digest.update(f'{jax.tree_util.keystr(path)}={int(number)};'.encode())
    return digest.hexdigest()


@jax.jit
def _sums(weights: Any) -> Any:
    """For each array, the sum of its bits times odd numbers that depend on the position, modulo 2^32."""

    def weighted_sum(array: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(array, {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize])
        position = jnp.zeros(array.shape, jnp.uint32)
        for axis, size in enumerate(array.shape):
            position = position * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        mixed = (position ^ (position >> 15)) * np.uint32(0x9E3779B1)
        return jnp.sum(bits.astype(jnp.uint32) * (mixed | 1), dtype=jnp.uint32)

    return jax.tree.map(weighted_sum, weights)
