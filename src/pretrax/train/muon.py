"""Muon: the momentum of each matrix, orthogonalized. Jordan 2024, kellerjordan.github.io/posts/muon.

Momenta are sharded like their weights; `owners.py` brings each matrix to one device, which orthogonalizes it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonState

from pretrax.train.owners import layout_of, on_owners

Polynomials = Literal['jordan', 'polar_express']
Matrices = Callable[..., Any]  # `Model.matrix_dimensions`

_JORDAN = (3.4445, -4.7750, 2.0315)
# Amsel et al. 2025, arXiv:2505.16932, algorithm 1 for singular values between 0.001 and 1. The last one is for all
# further iterations.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_SAFETY = 1.01  # so that rounding takes no singular value out of the interval


def coefficients(polynomials: Polynomials, iterations: int) -> list[tuple[float, float, float]]:
    """The coefficients a, b, c of a x + b x^3 + c x^5 for each iteration."""
    if polynomials == 'jordan':
        return [_JORDAN] * iterations
    wider = [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS[:-1]]
    return [*wider, *[_POLAR_EXPRESS[-1]] * iterations][:iterations]


def scale_by_muon(
    matrices: Matrices,
    *,
    momentum: float,
    iterations: int,
    rms: float,
    eps: float,
    polynomials: Polynomials,
    dtype: Any,
) -> optax.GradientTransformationExtraArgs:
    """Muon's direction for a tree in which every leaf holds matrices.

    As in Optax, the bias of the momentum is corrected before the matrix is orthogonalized. The root mean square of an
    update is about `rms` (arXiv:2502.16982, section 2.2). Matrices are exchanged and multiplied in `dtype`; None: that
    of the gradient.
    """

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params), jnp.asarray(_JORDAN))

    def update(
        updates: Any, state: Any, params: Any = None, *, shardings: Any = None, **_: Any
    ) -> tuple[Any, MuonState]:
        del params
        mu = optax.tree.update_moment(updates, state.mu, momentum, 1)
        count = optax.safe_increment(state.count)
        ahead = jax.tree.map(
            lambda m, g: momentum * m + (1 - momentum) * g,
            optax.tree.bias_correction(mu, momentum, optax.safe_increment(count)),
            optax.tree.bias_correction(updates, momentum, count),
        )
        known = dict(jax.tree_util.tree_leaves_with_path(shardings))
        leaves, tree = jax.tree_util.tree_flatten_with_path(ahead)
        dims = tree.flatten_up_to(matrices(ahead))
        layouts = [layout_of(w, one, known.get(path)) for (path, w), one in zip(leaves, dims, strict=True)]

        def work(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return rms * max(x.shape[1:]) ** 0.5 * orthogonalize(x, coefficients(polynomials, iterations), eps), None

        done = on_owners(work, [w.astype(dtype or w.dtype) for _, w in leaves], layouts)[0]
        directions = [one.astype(w.dtype) for one, (_, w) in zip(done, leaves, strict=True)]
        return tree.unflatten(directions), MuonState(count, mu, state.ns_coeffs)

    return optax.GradientTransformationExtraArgs(init, update)


def orthogonalize(x: jax.Array, of_iterations: Sequence[tuple[float, float, float]], eps: float) -> jax.Array:
    """The matrices with singular values near 1: each iteration applies an odd polynomial to them.

    Args:
        x: num[matrices, rows, columns].
        of_iterations: the coefficients of the polynomial of each iteration.
        eps: added to the norm of a matrix.
    """
    transposed = x.shape[-2] > x.shape[-1]
    x = x.mT if transposed else x  # the product of a matrix and its transpose is then the smaller one
    norm = jnp.linalg.norm(x.astype(jnp.float32), axis=(-2, -1), keepdims=True)
    x = (x / (norm + eps)).astype(x.dtype)
    for a, b, c in of_iterations:
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return x.mT if transposed else x


class NeuronState(NamedTuple):
    """The mean square of the orthogonalized momentum of each output of a matrix, averaged over steps."""

    v: Any


def scale_by_neurons(matrices: Matrices, b2: float, rms: float, eps: float) -> optax.GradientTransformation:
    """NorMuon: each output of a matrix gets an update of about the same size. Li et al. 2025, arXiv:2510.05491.

    The root mean square of the update of a matrix is `rms`.
    """

    def init(params: Any) -> NeuronState:
        return NeuronState(jax.tree.map(lambda w, dims: jnp.zeros_like(_mean(w, dims[0])), params, matrices(params)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, NeuronState]:
        del params
        dims = matrices(updates)
        v = jax.tree.map(lambda v, o, each: b2 * v + (1 - b2) * _mean(jnp.square(o), each[0]), state.v, updates, dims)

        def normalized(o: jax.Array, v: jax.Array, each: Any) -> jax.Array:
            scaled = o / (jnp.sqrt(v) + eps)
            return scaled * rms / (jnp.sqrt(_mean(jnp.square(scaled), (*each[0], *each[1]))) + eps)

        return jax.tree.map(normalized, updates, v, dims), NeuronState(v)

    return optax.GradientTransformation(init, update)


def _mean(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return jnp.mean(x, axis=dims, keepdims=True)
