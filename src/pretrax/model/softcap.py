"""Soft caps: attention scores and logits that cannot grow past a bound."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def softcap(x: Any, cap: float) -> Any:
    """cap tanh(x / cap), computed in f32; x itself where cap is 0. Gemma Team 2024, arXiv:2408.00118, section 2.

    The derivative is that of the result, 1 - (y / cap)^2, so that x is not kept for the backward pass.
    """
    return _softcap(cap, x) if cap else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softcap(cap: float, x: Any) -> Any:
    return (cap * jnp.tanh(x.astype(jnp.float32) / cap)).astype(x.dtype)


def _forward(cap: float, x: Any) -> tuple[Any, Any]:
    y = _softcap(cap, x)
    return y, y


def _backward(cap: float, y: Any, dy: Any) -> tuple[Any]:
    return ((dy.astype(jnp.float32) * (1 - jnp.square(y.astype(jnp.float32) / cap))).astype(dy.dtype),)


_softcap.defvjp(_forward, _backward)
