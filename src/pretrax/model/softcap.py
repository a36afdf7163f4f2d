"""Soft caps: bounds on attention scores and logits."""

import functools

import jax
import jax.numpy as jnp


def softcap(x: jax.Array, cap: float) -> jax.Array:
    """cap tanh(x / cap), computed in f32; x if cap is 0. Gemma Team 2024, arXiv:2408.00118, section 2.

    The derivative, 1 - (y / cap)^2, needs only the result, so x is not kept for the backward pass.
    """
    return _softcap(cap, x) if cap else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softcap(cap: float, x: jax.Array) -> jax.Array:
    return (cap * jnp.tanh(x.astype(jnp.float32) / cap)).astype(x.dtype)


def _forward(cap: float, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = _softcap(cap, x)
    return y, y


def _backward(cap: float, y: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    return ((dy.astype(jnp.float32) * (1 - jnp.square(y.astype(jnp.float32) / cap))).astype(dy.dtype),)


_softcap.defvjp(_forward, _backward)
