"""Muon: the momentum of each matrix, orthogonalized. Jordan 2024, kellerjordan.github.io/posts/muon.

Momenta are sharded like their weights; `owners.py` brings each matrix to one device, which orthogonalizes it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonState

from pretrax.model.weights import matrix_dimensions
from pretrax.train.owners import layout_of, on_owners

JORDAN = (3.4445, -4.7750, 2.0315)  # the coefficients of each iteration


def scale_by_muon(
    momentum: float, iterations: int, rms: float, eps: float
) -> optax.GradientTransformationExtraArgs:
    """Muon's direction for a tree in which every leaf holds matrices.

    As in Optax, the bias of the momentum is corrected before the matrix is orthogonalized. The root mean square of an
    update is about `rms` (arXiv:2502.16982, section 2.2).
    """

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params), jnp.asarray(JORDAN))

    def update(
        updates: Any, state: MuonState, params: Any = None, *, shardings: Any = None, **_: Any
    ) -> tuple[Any, MuonState]:
        del params
        mu = optax.tree.update_moment(updates, state.mu, momentum, 1)
        count = optax.safe_increment(state.count)
        ahead = jax.tree.map(
            lambda m, g: momentum * m + (1 - momentum) * g,
            optax.tree.bias_correction(mu, momentum, optax.safe_increment(count)),
            optax.tree.bias_correction(updates, momentum, count),
        )
        after = MuonState(count, mu, state.ns_coeffs)

        def work(x: jax.Array) -> jax.Array:
            scale = rms * max(x.shape[1:]) ** 0.5
            return scale * orthogonalize(x, state.ns_coeffs, iterations, eps)

        known = dict(jax.tree_util.tree_leaves_with_path(shardings))
        leaves, tree = jax.tree_util.tree_flatten_with_path(ahead)
        dims = tree.flatten_up_to(matrix_dimensions(ahead))
        layouts = [layout_of(w, one, known.get(path)) for (path, w), one in zip(leaves, dims, strict=True)]
        return tree.unflatten(on_owners(work, [w for _, w in leaves], layouts)), after

    return optax.GradientTransformationExtraArgs(init, update)


def orthogonalize(x: jax.Array, coefficients: jax.Array, iterations: int, eps: float) -> jax.Array:
    """The matrices with singular values between about 0.7 and 1.2: Newton-Schulz iterations, each a quintic polynomial.

    Args:
        x: f32[matrices, rows, columns].
        coefficients: f32[3] of every iteration.
        iterations: how many.
        eps: added to the norm of a matrix.
    """
    transposed = x.shape[-2] > x.shape[-1]
    x = x.mT if transposed else x  # the product of a matrix and its transpose is then the smaller one
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + eps)
    a, b, c = coefficients
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if transposed else x
