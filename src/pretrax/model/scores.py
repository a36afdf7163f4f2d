"""Attention scores, and soft caps: bounds on scores and logits."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture, LayerKind


@dataclasses.dataclass(frozen=True)
class Scores:
    """How attention scores are computed from products of queries and keys, and which keys are visible."""

    divisor: float
    softcap: float  # 0: none
    window: int  # tokens that a token sees, itself included; 0: all
    dropout: float = 0.0  # the share of the probabilities that training drops
    chunked: bool = False  # a token sees only its chunk of `window` tokens

    def sees(self, distance: Any) -> Any:
        """Whether a token sees the token `distance` positions before it: a number or an array."""
        return (distance >= 0) & (distance < self.window) if self.window else distance >= 0

    def same_chunk(self, position: Any, other: Any) -> Any:
        """Whether chunked attention lets tokens at these positions of a document see each other."""
        return position // self.window == other // self.window if self.chunked else True

    def score(self, products: jax.Array) -> jax.Array:
        """The scores, from the products of queries and keys."""
        return self.cap(products / self.divisor)

    def cap(self, score: jax.Array) -> jax.Array:
        """The score with the soft cap."""
        return softcap(score, self.softcap)

    def cap_gradient(self, score: jax.Array, d_score: jax.Array) -> jax.Array:
        """The gradient before the soft cap, from the capped score and its gradient."""
        return d_score * (1 - jnp.square(score / self.softcap)) if self.softcap else d_score


def scores_of(arch: Architecture, kind: LayerKind) -> Scores:
    """The attention scores of a layer. With YaRN, DeepSeek's code divides their divisor by mscale^2."""
    attention, scaling = arch.attention, arch.rope.scaling
    divisor = math.sqrt(attention.query_pre_attn_scalar or arch.heads(kind).d_query)
    if attention.latent.kv_rank and scaling is not None and scaling.kind == 'yarn' and scaling.mscale_all_dim:
        divisor /= scaling.yarn_mscale(scaling.mscale_all_dim) ** 2
    chunked = kind.window > 0 and attention.window_type == 'chunked'
    return Scores(divisor, attention.softcap, kind.window, attention.dropout, chunked)


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
