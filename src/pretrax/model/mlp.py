"""The feed-forward of a layer.

Letters: B batch, L length, M d_model, F feed-forward.
"""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture, LayerKind
from pretrax.model.layer_spec import LayerSpec
from pretrax.model.matmul import add_bias, product
from pretrax.model.part import Part
from pretrax.shardlib import all_gather, f32, num, psum_scatter, pytree_dataclass, save, typechecked


@pytree_dataclass
class FeedForwardWeights(Part):
    """The projections of a dense feed-forward."""

    gate: num['M/d F/t'] | None
    up: num['M/d F/t']
    down: num['F/t M/d']
    gate_bias: f32['F/t'] | None
    up_bias: f32['F/t'] | None
    down_bias: f32['M'] | None

    @classmethod
    def optional(cls, arch: Architecture, kind: LayerKind) -> Mapping[str, bool]:
        """As the activation and the option of biases say."""
        del kind
        bias, gated = arch.feed_forward.bias, arch.feed_forward.gated
        return {'gate': gated, 'gate_bias': gated and bias, 'up_bias': bias, 'down_bias': bias}


@typechecked
def feed_forward(h: num['B/r/d/e L/c/t M'], w: FeedForwardWeights, layer: LayerSpec) -> num['B/r/d/e L/c/t M']:
    """act(h W_up) W_down, or with a gate (act(h W_gate) * h W_up) W_down.

    Shazeer 2020, arXiv:2002.05202, eq. 5 and 6.
    """
    arch, formats = layer.arch, layer.formats
    h = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', h)
    w_up = layer.gather('up', 'M/d F/t -> M F/t', w, h)
    up = add_bias(product('B/r/d/e L/c M, M F/t -> B/r/d/e L/c F/t', h, w_up, formats['up']), w.up_bias)
    up = save(up, 'up')
    if arch.feed_forward.gated:
        w_gate = layer.gather('gate', 'M/d F/t -> M F/t', w, h)
        gate = product('B/r/d/e L/c M, M F/t -> B/r/d/e L/c F/t', h, w_gate, formats['gate'])
        act = gated(save(add_bias(gate, w.gate_bias), 'gate'), up, arch)
    else:
        act = {'gelu': gelu, 'gelu_erf': gelu_erf, 'relu2': relu2}[arch.feed_forward.activation](up)
    w_down = layer.gather('down', 'F/t M/d -> F/t M', w, h)
    out = product('B/r/d/e L/c F/t, F/t M -> B/r/d/e L/c M', act, w_down, formats['down'])  # partial over t
    out = save(psum_scatter('B/r/d/e L/c M -> B/r/d/e L/c/t M', out), 'mlp_out')
    return add_bias(out, w.down_bias)


@functools.partial(jax.checkpoint, static_argnums=2)  # keeps gate and up in their dtype, no f32 values between
def gated(gate: jax.Array, up: jax.Array, arch: Architecture) -> jax.Array:
    """The activation of the gate, times up. Computed in f32, and rounded to up's dtype."""
    return gated_in_f32(gate, up, arch).astype(up.dtype)


def gated_in_f32(gate: jax.Array, up: jax.Array, arch: Architecture) -> jax.Array:
    """The activation of the gate, times up, in f32. Shazeer 2020, arXiv:2002.05202, eq. 5 (tanh form of gelu) and 6.

    swiglu_oai is gate sigmoid(1.702 gate) (up + 1) of clamped values. OpenAI 2025, arXiv:2508.10925, section 2.3.
    """
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    if arch.feed_forward.activation == 'swiglu_oai':
        limit = arch.feed_forward.swiglu_limit
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    silu = arch.feed_forward.activation == 'swiglu'
    return (jax.nn.silu(gate) if silu else jax.nn.gelu(gate, approximate=True)) * up


@jax.checkpoint
def gelu(up: jax.Array) -> jax.Array:
    """The tanh form, computed in f32. Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2."""
    return jax.nn.gelu(up.astype(jnp.float32), approximate=True).astype(up.dtype)


@jax.checkpoint
def gelu_erf(up: jax.Array) -> jax.Array:
    """x times the normal distribution function of x, in f32. Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2."""
    x = up.astype(jnp.float32)
    return (x / 2 * (1 + _erf(x / math.sqrt(2)))).astype(up.dtype)


@jax.custom_jvp
def _erf(x: jax.Array) -> jax.Array:
    """The derivative is written out, because that of JAX 0.12 does not trace under `shard_map` with `check_vma`."""
    return jax.lax.erf(x)


_erf.defjvps(lambda dx, _, x: dx * (2 / math.sqrt(math.pi)) * jnp.exp(-jnp.square(x)))


@jax.checkpoint
def relu2(up: jax.Array) -> jax.Array:
    """max(x, 0)^2, computed in f32. So et al. 2021, arXiv:2109.08668, section 4."""
    return jnp.square(jax.nn.relu(up.astype(jnp.float32))).astype(up.dtype)
