"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner. Vyas et al. 2024, arXiv:2409.11321, algorithm 3.

Letters, as in the paper: G gradient, L and R preconditioners of the inputs and outputs of a matrix, Q_L and Q_R their
eigenvectors, M and V Adam's moments; V is in the eigenbasis, M is not.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pretrax.model.base import MatrixAxes
from pretrax.train.muon import Matrices


class SoapState(NamedTuple):
    """The moments of every weight, and of each matrix the preconditioners and their eigenvectors.

    A preconditioner is f32[..., inputs, inputs] or f32[..., outputs, outputs], where ... are the dimensions that count
    matrices, such as layers. It is None for a weight that is not a matrix, and for a dimension that is too wide.
    """

    gradients: jax.Array  # i32[]: how many so far
    m: Any
    v: Any
    left: Any  # L
    right: Any  # R
    left_basis: Any  # Q_L
    right_basis: Any  # Q_R


class _Weight(NamedTuple):
    """The part of the state that belongs to one weight."""

    m: jax.Array
    v: jax.Array
    left: jax.Array | None
    right: jax.Array | None
    left_basis: jax.Array | None
    right_basis: jax.Array | None


def scale_by_soap(
    matrices: Matrices, b1: float, b2: float, eps: float, precondition_frequency: int, max_precond_dim: int
) -> optax.GradientTransformation:
    """SOAP's direction. As in the authors' code, the first gradient only gives the first eigenvectors: its direction is
    zero.

    A basis of the same gradient that is divided by its own moments would be a poor start: in it, the gradient is
    diagonal, so that all other entries of V would be zero.

    The products and decompositions run in f32, whatever the default precision of the device.
    """

    def init(params: Any) -> Any:
        leaves, tree = jax.tree.flatten(params)
        parts = [
            _first(w, dims, max_precond_dim) for w, dims in zip(leaves, _dimensions(matrices, params), strict=True)
        ]
        return SoapState(jnp.zeros((), jnp.int32), *(tree.unflatten(field) for field in zip(*parts, strict=True)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        leaves, tree = jax.tree.flatten(updates)
        before = [_Weight(*fields) for fields in zip(*map(tree.flatten_up_to, state[1:]), strict=True)]
        found = [
            _next(g, one, dims, state.gradients)
            for g, one, dims in zip(leaves, before, _dimensions(matrices, updates), strict=True)
        ]
        directions, parts = zip(*found, strict=True)
        fields = (tree.unflatten(field) for field in zip(*parts, strict=True))
        return tree.unflatten(directions), SoapState(state.gradients + 1, *fields)

    def _next(gradient: jax.Array, one: _Weight, dims: MatrixAxes | None, t: jax.Array) -> tuple[jax.Array, _Weight]:
        """The direction of a weight, and its state after gradient number t, counted from 0."""
        is_first, bases = t == 0, (one.left_basis, one.right_basis)
        g = _as_matrices(gradient, dims)
        rotated = _rotate(g, bases)
        m = b1 * one.m + (1 - b1) * gradient
        v = b2 * _as_matrices(one.v, dims) + (1 - b2) * jnp.square(rotated)
        correction = jnp.sqrt(1 - b2**t) / (1 - b1 ** jnp.maximum(t, 1))
        direction = correction * _rotate(_rotate(_as_matrices(m, dims), bases) / (jnp.sqrt(v) + eps), bases, back=True)

        left, right = _outer_products(g, one, b2)
        v = jnp.where(is_first, 0.0, v)
        # 0: keep the eigenvectors, 1: improve them, 2: the first ones
        what = jnp.where(is_first, 2, jnp.where(t % precondition_frequency == 0, 1, 0))
        bases, v = jax.lax.switch(what, (_keep, _improve, _decompose), (left, right), bases, v)
        after = _Weight(jnp.where(is_first, 0.0, m), _as_weight(v, gradient, dims), left, right, *bases)
        return jnp.where(is_first, 0.0, _as_weight(direction, gradient, dims)), after

    return optax.GradientTransformation(init, update)


def _dimensions(matrices: Matrices, weights: Any) -> list[MatrixAxes | None]:
    """The dimensions of each leaf that is a matrix, or a stack of matrices."""
    return jax.tree.structure(weights).flatten_up_to(matrices(weights, tables=True))


def _first(w: jax.Array, dims: MatrixAxes | None, max_precond_dim: int) -> _Weight:
    """The state of a weight before its first gradient: zeros, and identities as bases."""
    like = _as_matrices(w, dims)
    sizes = like.shape[-2:] if dims is not None else ()
    known = [n if n <= max_precond_dim else None for n in sizes] or [None, None]
    zeros = [None if n is None else jnp.zeros((*like.shape[:-2], n, n), w.dtype) for n in known]
    bases = [None if zero is None else zero + jnp.eye(zero.shape[-1], dtype=w.dtype) for zero in zeros]
    return _Weight(jnp.zeros_like(w), jnp.zeros_like(w), *zeros, *bases)


def _outer_products(g: jax.Array, one: _Weight, decay: float) -> tuple[jax.Array | None, jax.Array | None]:
    """L and R after a gradient, their moving averages of G G^T and G^T G."""
    left = right = None
    if one.left is not None:
        left = decay * one.left + (1 - decay) * _product('...ij,...kj->...ik', g, g)
    if one.right is not None:
        right = decay * one.right + (1 - decay) * _product('...ji,...jk->...ik', g, g)
    return left, right


_Bases = tuple[jax.Array | None, jax.Array | None]


def _keep(_: _Bases, bases: _Bases, v: jax.Array) -> tuple[_Bases, jax.Array]:
    return bases, v


def _decompose(products: _Bases, bases: _Bases, v: jax.Array) -> tuple[_Bases, jax.Array]:
    """The eigenvectors, largest eigenvalue first."""
    found = [None if p is None else jnp.flip(jnp.linalg.eigh(p)[1], axis=-1) for p in products]
    return (found[0], found[1]), v


def _improve(products: _Bases, bases: _Bases, v: jax.Array) -> tuple[_Bases, jax.Array]:
    """One step of power iteration, and a QR decomposition (algorithm 4).
    The order follows the eigenvalues, also in V.
    """
    found: list[jax.Array | None] = []
    for axis, (p, q) in zip((-2, -1), zip(products, bases, strict=True), strict=True):
        if p is None or q is None:
            found.append(None)
            continue
        powers = _product('...ij,...jk->...ik', p, q)
        order = jnp.argsort(-jnp.sum(q * powers, axis=-2), axis=-1)
        found.append(jnp.linalg.qr(jnp.take_along_axis(powers, order[..., None, :], axis=-1))[0])
        v = jnp.take_along_axis(v, jnp.expand_dims(order, -3 - axis), axis=axis)
    return (found[0], found[1]), v


def _rotate(x: jax.Array, bases: _Bases, back: bool = False) -> jax.Array:
    """Q_L^T x Q_R; or Q_L x Q_R^T. A basis that is None is the identity."""
    left, right = bases
    if left is not None:
        x = _product('...ij,...jk->...ik' if back else '...ji,...jk->...ik', left, x)
    if right is not None:
        x = _product('...ij,...kj->...ik' if back else '...ij,...jk->...ik', x, right)
    return x


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=jax.lax.Precision.HIGHEST)


def _axes(w: jax.Array, dims: MatrixAxes) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The dimensions of a weight that count matrices, that are inputs, and that are outputs."""
    inputs, outputs = dims
    return tuple(axis for axis in range(w.ndim) if axis not in (*inputs, *outputs)), inputs, outputs


def _as_matrices(w: jax.Array, dims: MatrixAxes | None) -> jax.Array:
    """[..., inputs, outputs]; a weight that is not a matrix stays as it is."""
    if dims is None:
        return w
    many, inputs, outputs = _axes(w, dims)
    sizes = [math.prod(w.shape[axis] for axis in axes) for axes in (inputs, outputs)]
    return w.transpose(*many, *inputs, *outputs).reshape(*(w.shape[axis] for axis in many), *sizes)


def _as_weight(matrices: jax.Array, like: jax.Array, dims: MatrixAxes | None) -> jax.Array:
    """The inverse of `_as_matrices`, for a weight with the shape of `like`."""
    if dims is None:
        return matrices
    order = [axis for axes in _axes(like, dims) for axis in axes]
    back = sorted(range(like.ndim), key=order.__getitem__)
    return matrices.reshape([like.shape[axis] for axis in order]).transpose(back)
