"""The feed-forward of a block.

Letters: B batch, L length, M d_model, F feed-forward.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture
from pretrax.model.matmul import gather, plus, product
from pretrax.model.numerics import Formats
from pretrax.model.weights import Layer
from pretrax.shardlib import all_gather, num, psum_scatter, save, typechecked


@typechecked
def feed_forward(h: num['B/r/d/e L/c/t M'], w: Layer, arch: Architecture, formats: Formats) -> num['B/r/d/e L/c/t M']:
    """act(h W_up) W_down, or with a gate (act(h W_gate) * h W_up) W_down. Shazeer 2020, arXiv:2002.05202, eq. 5 and 6."""
    h = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', h)
    w_up = gather('M/d F/t -> M F/t', w.up, h)
    up = plus(product('B/r/d/e L/c M, M F/t -> B/r/d/e L/c F/t', h, w_up, formats['up']), w.up_bias)
    up = save(up, 'up')
    if arch.gated:
        w_gate = gather('M/d F/t -> M F/t', w.gate, h)
        gate = save(product('B/r/d/e L/c M, M F/t -> B/r/d/e L/c F/t', h, w_gate, formats['gate']), 'gate')
        act = gated(gate, up, arch.activation)
    else:
        act = gelu(up)
    w_down = gather('F/t M/d -> F/t M', w.down, h)
    out = product('B/r/d/e L/c F/t, F/t M -> B/r/d/e L/c M', act, w_down, formats['down'])  # partial over t
    return plus(save(psum_scatter('B/r/d/e L/c M -> B/r/d/e L/c/t M', out), 'mlp_out'), w.down_bias)


def gated(gate: Any, up: Any, activation: str) -> Any:
    """up, times the activation of its gate."""
    return swiglu(gate, up) if activation == 'swiglu' else geglu(gate, up)


@jax.checkpoint  # the backward pass keeps gate and up in their own dtype, not f32 values between them and the result
def swiglu(gate: Any, up: Any) -> Any:
    """silu(gate) * up, computed in f32. Shazeer 2020, arXiv:2002.05202, eq. 6."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(up.dtype)


@jax.checkpoint
def geglu(gate: Any, up: Any) -> Any:
    """gelu(gate) * up, computed in f32, with the tanh form of gelu. Shazeer 2020, arXiv:2002.05202, eq. 5."""
    return (jax.nn.gelu(gate.astype(jnp.float32), approximate=True) * up.astype(jnp.float32)).astype(up.dtype)


@jax.checkpoint
def gelu(up: Any) -> Any:
    """The tanh form, computed in f32. Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2."""
    return jax.nn.gelu(up.astype(jnp.float32), approximate=True).astype(up.dtype)
