"""Every matrix product with a weight goes through `product`: the one place where its numerics are decided.

The derivative is written by hand. Differentiating an `einsum` with f32 accumulation makes both backward products
f32 x f32 on GPUs; here the operands of all three products have the compute dtype, the accumulation is f32, and the
weight's gradient stays f32 (docs/lab-notes.md has the measurements).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..shardlib import all_gather, einsum


def product(spec: str, x: Any, w: Any) -> Any:
    """`einsum(spec, x, w)` in x's dtype, accumulated in f32. w is f32, rounded to x's dtype; its gradient is f32."""
    return einsum(spec, x, w, dot=_dot)


def gather(spec: str, w: Any, x: Any) -> Any:
    """All of a weight's slices over `d`, sent in the dtype of the activations x."""
    return all_gather(spec, w, wire=x.dtype)


def plus(x: Any, bias: Any) -> Any:
    """x + bias, where the family has biases; in f32, as its gradient is a sum over all tokens. In x's dtype after."""
    return x if bias is None else (x.astype(jnp.float32) + bias).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(equation: str, x: Any, w: Any) -> Any:
    return _einsum(equation, x, w.astype(x.dtype), x.dtype)


def _dot_forward(equation: str, x: Any, w: Any) -> tuple[Any, Any]:
    w = w.astype(x.dtype)
    return _einsum(equation, x, w, x.dtype), (x, w)


def _dot_backward(equation: str, residuals: Any, dy: Any) -> tuple[Any, Any]:
    x, w = residuals
    left, y_letters = equation.split('->')
    x_letters, w_letters = left.split(',')
    dx = _einsum(f'{y_letters},{w_letters}->{x_letters}', dy, w, x.dtype)
    dw = _einsum(f'{x_letters},{y_letters}->{w_letters}', x, dy, jnp.float32)
    return dx, dw


_dot.defvjp(_dot_forward, _dot_backward)


def _einsum(equation: str, a: Any, b: Any, dtype: Any) -> Any:
    return jnp.einsum(equation, a, b, preferred_element_type=dtype)
