"""One decoder for every family: mathematics, memory, sharding and communication of the forward pass.

Letters: B batch, L length, M d_model, H query heads, K key/value heads, D head, F feed-forward, V vocabulary.
Mesh axes: r replicas, d data (weights are sharded over it at rest), t tensor. Between blocks the sequence is sharded
over `t` too (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

A weight is gathered over `d` where it is used and travels in the compute dtype; its gradient is added up in f32 by the
transpose of the gather.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..shardlib import (
    all_gather,
    f32,
    i32,
    num,
    psum_scatter,
    recompute_by_name,
    save,
    scan,
    take,
    typechecked,
)
from .attention import Kernel, attend, choose_kernel
from .families import SAVED_NAMES, Architecture, TransformerOptions, resolve
from .loss import Batch, LossTerms, denominators, loss_terms
from .matmul import product
from .weights import Layer, Weights, abstract_weights, init_weights

Attend = Callable[[Any, Any, Any], tuple[Any, Any]]  # q, k, v -> output, and what a cache keeps


@typechecked
def block(
    x: num['B/r/d L/t M'], w: Layer, positions: i32['B/r/d L'], arch: Architecture, attention: Attend
) -> tuple[num['B/r/d L/t M'], Any]:
    """x + attention(norm(x)), then x + mlp(norm(x)). Pre-norm: Xiong et al. 2020, arXiv:2002.04745."""
    h = all_gather('B/r/d L/t M -> B/r/d L M', norm(x, w.norm1, w.norm1_bias, arch))
    q = plus(product('B/r/d L M, M H/t D -> B/r/d L H/t D', h, gather('M/d H/t D -> M H/t D', w.q, x)), w.q_bias)
    k = plus(product('B/r/d L M, M K/t D -> B/r/d L K/t D', h, gather('M/d K/t D -> M K/t D', w.k, x)), w.k_bias)
    v = plus(product('B/r/d L M, M K/t D -> B/r/d L K/t D', h, gather('M/d K/t D -> M K/t D', w.v, x)), w.v_bias)
    if arch.positions == 'rope':
        q, k = rope(q, positions, arch.rope_base), rope(k, positions, arch.rope_base)
    y, kept = attention(save(q, 'q'), save(k, 'k'), save(v, 'v'))
    y = save(y, 'attention')
    out = product('B/r/d L H/t D, H/t D M -> B/r/d L M', y, gather('H/t D M/d -> H/t D M', w.o, x))  # partial over t
    x = x + plus(save(psum_scatter('B/r/d L M -> B/r/d L/t M', out), 'attention_out'), w.o_bias)

    h = all_gather('B/r/d L/t M -> B/r/d L M', norm(x, w.norm2, w.norm2_bias, arch))
    up = plus(product('B/r/d L M, M F/t -> B/r/d L F/t', h, gather('M/d F/t -> M F/t', w.up, x)), w.up_bias)
    up = save(up, 'up')
    if arch.activation == 'swiglu':
        gate = save(product('B/r/d L M, M F/t -> B/r/d L F/t', h, gather('M/d F/t -> M F/t', w.gate, x)), 'gate')
        act = swiglu(gate, up)
    else:
        act = gelu(up)
    out = product('B/r/d L F/t, F/t M -> B/r/d L M', act, gather('F/t M/d -> F/t M', w.down, x))  # partial over t
    x = x + plus(save(psum_scatter('B/r/d L M -> B/r/d L/t M', out), 'mlp_out'), w.down_bias)
    return x, kept


@typechecked
def forward(
    w: Weights,
    tokens: i32['B/r/d L'],
    positions: i32['B/r/d L'],
    arch: Architecture,
    dtype: Any,
    layers: Callable[[Any, Weights], tuple[Any, Any]],
) -> tuple[num['B/r/d L V/t'], Any]:
    """Logits in `dtype` for every token, and what `layers(x, weights)`, which runs the blocks, gives besides x."""
    table = all_gather('V/t M/d -> V/t M', w.embed, wire=dtype)
    x = take('V/t M, B/r/d L -> B/r/d L M', table, tokens).astype(dtype)  # partial over t
    if w.positions is not None:
        places = all_gather('P/t M/d -> P/t M', w.positions, wire=dtype)
        x = x + take('P/t M, B/r/d L -> B/r/d L M', places, positions).astype(dtype)
    x, kept = layers(psum_scatter('B/r/d L M -> B/r/d L/t M', x), w)
    h = all_gather('B/r/d L/t M -> B/r/d L M', norm(x, w.norm, w.norm_bias, arch))
    unembed = table if w.unembed is None else all_gather('V/t M/d -> V/t M', w.unembed, wire=dtype)
    return product('B/r/d L M, V/t M -> B/r/d L V/t', h, unembed), kept


def gather(spec: str, w: Any, x: Any) -> Any:
    """All of a weight's slices over `d`, sent in the dtype of the activations x."""
    return all_gather(spec, w, wire=x.dtype)


@jax.checkpoint  # the backward pass keeps gate and up in their own dtype, not f32 values between them and the result
def swiglu(gate: Any, up: Any) -> Any:
    """silu(gate) * up, computed in f32. Shazeer 2020, arXiv:2002.05202, eq. 6."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(up.dtype)


@jax.checkpoint
def gelu(up: Any) -> Any:
    """The tanh form, computed in f32. Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2."""
    return jax.nn.gelu(up.astype(jnp.float32), approximate=True).astype(up.dtype)


def plus(x: Any, bias: Any) -> Any:
    """x + bias, where the family has biases; in f32, as its gradient is a sum over all tokens. In x's dtype after."""
    return x if bias is None else (x.astype(jnp.float32) + bias).astype(x.dtype)


@typechecked
def norm(x: num['B/r/d L/t M'], scale: f32['M'], bias: f32['M'] | None, arch: Architecture) -> num['B/r/d L/t M']:
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) or LayerNorm (Ba et al. 2016, arXiv:1607.06450), in f32."""
    y: Any = x.astype(jnp.float32)
    if arch.norm == 'layernorm':
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + arch.norm_eps) * scale
    return (y if bias is None else y + bias).astype(x.dtype)


def rope(x: Any, positions: i32['B/r/d L'], base: float) -> Any:
    """Turns the pair (i, i + D/2) of each head by position * base^(-2i/D). Su et al. 2021, arXiv:2104.09864, eq. 15."""
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class ModelRequest:
    """What a model is told when it is built."""

    vocab_size: int
    sequence_length: int
    documents_per_row: int | None
    dtype: Any  # compute dtype
    platform: str  # of the devices
    mesh: dict[str, int]


class Transformer:
    """The decoder as a model: weights, their initial values and the loss. Methods with arrays run per device."""

    Weights = Weights

    def __init__(self, request: ModelRequest, *, options: TransformerOptions):
        self.arch = resolve(options, request.vocab_size, request.sequence_length)
        self.arch.check_mesh(request.mesh, request.sequence_length)
        self.dtype = request.dtype
        self.kernel: Kernel = choose_kernel(
            options.attention, request.platform, request.dtype, self.arch.d_head, request.sequence_length,
            request.documents_per_row,
        )  # fmt: skip
        self.unrolled, why_unrolled = _choose_unrolled(options.layers, self.arch.n_layers, request.mesh)
        self.saved, why_saved = _choose_saved(options.save, request.mesh)
        self.choices = {
            'architecture': self.arch.describe(),
            'attention': str(self.kernel),
            'layers': why_unrolled,
            'activations': why_saved,
        }

    def init(self, key: jax.Array) -> Weights:
        """Initial weights (under jit, outside the manual region)."""
        return init_weights(self.arch, key)

    def abstract(self) -> Weights:
        """Shapes and shardings of the weights on the mesh in force."""
        return abstract_weights(self.arch)

    def loss(self, weights: Weights, batch: Batch) -> LossTerms:
        """This device's terms of the loss."""

        def attention(q: Any, k: Any, v: Any) -> tuple[Any, None]:
            return attend(q, k, v, batch.segments, self.kernel), None

        def one(x: Any, layer: Layer) -> tuple[Any, None]:
            return block(x, layer, batch.positions, self.arch, attention)

        def layers(x: Any, w: Weights) -> tuple[Any, None]:
            if not self.unrolled:
                return scan(one, x, w.layers, self.saved)[0], None
            kept = recompute_by_name(one, self.saved)
            for i in range(self.arch.n_layers):
                x, _ = kept(x, jax.tree.map(lambda stacked, i=i: stacked[i], w.layers))
            return x, None

        logits, _ = forward(weights, batch.tokens, batch.positions, self.arch, self.dtype, layers)
        return loss_terms(logits, batch, self.arch.vocab_size, self.arch.z_loss)

    def denominators(self, batch: Batch) -> dict[str, Any]:
        """The denominators of the terms of `loss`, which depend on the batch alone."""
        return denominators(batch, self.arch.z_loss)


def _choose_unrolled(wanted: str, n_layers: int, mesh: dict[str, int]) -> tuple[bool, str]:
    if wanted != 'auto':
        return wanted == 'unroll', f'{wanted} (as configured)'
    if mesh['d'] * mesh['t'] == 1 and n_layers <= 48:
        return True, 'unroll (faster than a loop where weights are whole; model.layers=scan compiles faster)'
    return False, 'scan (many devices or layers: compiles faster)'


def _choose_saved(wanted: Any, mesh: dict[str, int]) -> tuple[Any, str]:
    if wanted == 'none':
        return {}, 'everything is recomputed in the backward pass (model.save=none)'
    if wanted != 'all':
        kept = [name for name, choice in wanted.items() if choice == 'keep']
        return dict(wanted), f'kept: {", ".join(kept) or "none"}; the rest is recomputed (model.save)'
    if mesh['d'] == 1:
        return None, 'all kept'
    named = dict.fromkeys(SAVED_NAMES, 'keep')
    return named, f'kept: {", ".join(named)}; gathered weights and cheap values are computed again (d > 1)'
