"""The feed-forward of a layer.

Letters: B batch, L length, M d_model, F feed-forward.
"""

import jax
import jax.numpy as jnp

from pretrax.model.layers import LayerSpec
from pretrax.model.matmul import add_bias, product
from pretrax.model.norm import norm
from pretrax.model.weights import Layer
from pretrax.shardlib import all_gather, num, psum_scatter, save, typechecked


@typechecked
def feed_forward(h: num['B/r/d/e L/c/t M'], w: Layer, layer: LayerSpec) -> num['B/r/d/e L/c/t M']:
    """act(h W_up) W_down, or with a gate (act(h W_gate) * h W_up) W_down. Shazeer 2020, arXiv:2002.05202, eq. 5 and 6."""
    arch, formats = layer.arch, layer.formats
    h = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', h)
    w_up = layer.gather('up', 'M/d F/t -> M F/t', w, h)
    up = add_bias(product('B/r/d/e L/c M, M F/t -> B/r/d/e L/c F/t', h, w_up, formats['up']), w.up_bias)
    up = save(up, 'up')
    if arch.gated:
        w_gate = layer.gather('gate', 'M/d F/t -> M F/t', w, h)
        gate = save(product('B/r/d/e L/c M, M F/t -> B/r/d/e L/c F/t', h, w_gate, formats['gate']), 'gate')
        act = gated(gate, up, arch.activation)
    else:
        act = gelu(up)
    w_down = layer.gather('down', 'F/t M/d -> F/t M', w, h)
    out = product('B/r/d/e L/c F/t, F/t M -> B/r/d/e L/c M', act, w_down, formats['down'])  # partial over t
    out = save(psum_scatter('B/r/d/e L/c M -> B/r/d/e L/c/t M', out), 'mlp_out')
    return norm(add_bias(out, w.down_bias), w.norm2_after, None, arch)


def gated(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    """The activation of the gate, times up."""
    return swiglu(gate, up) if activation == 'swiglu' else geglu(gate, up)


@jax.checkpoint  # keeps gate and up in their own dtype for the backward pass, no f32 values between
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, computed in f32. Shazeer 2020, arXiv:2002.05202, eq. 6."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(up.dtype)


@jax.checkpoint
def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gelu(gate) * up, computed in f32, with the tanh form of gelu. Shazeer 2020, arXiv:2002.05202, eq. 5."""
    return (jax.nn.gelu(gate.astype(jnp.float32), approximate=True) * up.astype(jnp.float32)).astype(up.dtype)


@jax.checkpoint
def gelu(up: jax.Array) -> jax.Array:
    """The tanh form, computed in f32. Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2."""
    return jax.nn.gelu(up.astype(jnp.float32), approximate=True).astype(up.dtype)
