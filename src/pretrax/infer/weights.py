"""The weights of the decoder as inference multiplies by them: matrices in the compute dtype or in int8, layers apart.

Letters: V vocabulary, M d_model, P positions, H query heads, K key/value heads, D head, F feed-forward, E experts,
F_expert feed-forward of an expert, F_shared of the shared expert.
Training stacks the layers. A loop over tokens would copy a layer's slice for every token, which on a CPU takes longer
than multiplying by it.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from pretrax.model.architecture import Architecture
from pretrax.model.attention import in_attention
from pretrax.model.numerics import Formats
from pretrax.model.stack import Stack
from pretrax.model.transformer import Transformer
from pretrax.model.weight_only import quantize
from pretrax.model.weights import MATRICES, Layer, Weights
from pretrax.shardlib import all_gather, f32, make_shardings, num, pytree_dataclass

type WeightKind = Literal['compute', 'int8']


@pytree_dataclass
class Scales:
    """The scales of a layer's int8 matrices, one for each output channel. None: the matrix has the compute dtype."""

    q: f32['H/t D'] | None = None
    k: f32['K/t D'] | None = None
    v: f32['K/t D'] | None = None
    o: f32['M'] | None = None
    q_direct: f32['H/t D_qk'] | None = None
    q_a: f32['C_q'] | None = None
    q_b: f32['H/t D_qk'] | None = None
    kv_a: f32['C_kv'] | None = None
    o_gate: f32['H/t D'] | None = None
    q_global: f32['H/t D_global'] | None = None
    k_global: f32['K_global/t D_global'] | None = None
    v_global: f32['K_global/t D_global'] | None = None
    o_global: f32['M'] | None = None
    linear_q: f32['N_key/t D_key'] | None = None
    linear_k: f32['N_key/t D_key'] | None = None
    linear_v: f32['N_state/t D_value'] | None = None
    linear_z: f32['N_state/t D_value'] | None = None
    linear_o: f32['M'] | None = None
    gate: f32['F/t'] | None = None
    up: f32['F/t'] | None = None
    down: f32['M'] | None = None
    expert_gate: f32['E F_expert/t'] | None = None
    expert_up: f32['E F_expert/t'] | None = None
    expert_down: f32['E M'] | None = None
    shared_gate: f32['F_shared/t'] | None = None
    shared_up: f32['F_shared/t'] | None = None
    shared_down: f32['M'] | None = None

    def formats(self) -> Formats:
        """How the layer multiplies by its matrices, for `LayerSpec`."""
        scales = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Formats(scales={in_attention(name): scale for name, scale in scales.items() if scale is not None})


@pytree_dataclass
class ServingLayer:
    """A layer: its vectors and its router are f32."""

    weights: Layer
    scales: Scales


@pytree_dataclass
class Outer:
    """The weights outside the layers. `unembed` is None if the embedding is the same table in the same dtype."""

    embed: num['V/t M/d']
    positions: num['P/t M/d'] | None
    norm: f32['M']
    norm_bias: f32['M'] | None
    unembed: num['V/t M/d'] | None
    unembed_scale: f32['V/t'] | None
    unembed_bias: f32['V/t'] | None

    def embedding(self) -> num['V/t M']:
        """The table of the embedding."""
        return all_gather('V/t M/d -> V/t M', self.embed)

    def unembedding(self) -> num['V/t M']:
        """The table of the unembedding; if it is int8, its scale is `unembed_scale`."""
        return all_gather('V/t M/d -> V/t M', self.embed if self.unembed is None else self.unembed)


@pytree_dataclass
class ServingWeights:
    """The decoder. The inputs of an int8 matrix are the last dimensions of its array, as CPUs multiply it fastest."""

    outer: Outer
    stored: tuple[ServingLayer, ...]

    @property
    def layers(self) -> tuple[ServingLayer, ...]:
        """The layers, with the dimensions of each matrix in the order of its type."""

        def restored(layer: ServingLayer) -> ServingLayer:
            weights = layer.weights.named()
            for name, w in weights.items():
                if w.dtype == jnp.int8:
                    weights[name] = jnp.transpose(w, np.argsort(_outputs_first(name, w.ndim)))
            return dataclasses.replace(layer, weights=Layer.from_named(weights))

        return tuple(map(restored, self.stored))


def _outputs_first(name: str, ndim: int) -> list[int]:
    """The axes of the array of a matrix, those of its inputs last."""
    inputs = [axis - 1 for axis in np.atleast_1d(MATRICES[name][0])]
    return [axis for axis in range(ndim) if axis not in inputs] + inputs


def decoding_dtype(platform: str, dtype: DTypeLike, tokens: int) -> DTypeLike:
    """The dtype of activations, matrices and the cache of a decoder.

    XLA for CPUs multiplies a vector by a bf16 matrix four times as slowly as by an f32 one, and from two vectors on
    faster (benchmarks/lab-notes.md). From 64 tokens on, converting f32 matrices to bf16 in each product pays.

    Args:
        platform: of the devices.
        dtype: compute dtype.
        tokens: that a device multiplies by a matrix at once.
    """
    return jnp.float32 if platform == 'cpu' and tokens == 1 else dtype


def serving_weights(
    weights: Weights, model: Transformer, kind: WeightKind = 'compute', dtype: DTypeLike | None = None
) -> ServingWeights:
    """The weights of training, on any mesh, as inference multiplies by them on the current mesh.

    Matrices have `dtype`; None: the compute dtype.

    If `kind` is 'int8', three kinds of matrices stay in the compute dtype: those of experts that are sharded over e,
    the embedding table, where a token reads one row, and `kv_b`, whose outputs are summed over in decoding.
    """
    placed = jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), weights, model.abstract())
    return _program(model.arch, jnp.dtype(dtype or model.dtype), kind, jax.sharding.get_mesh())(placed)


@functools.lru_cache(maxsize=8)
def _program(arch: Architecture, dtype: DTypeLike, kind: WeightKind, mesh: Any) -> Any:
    """Compiled once, since a server that follows a run converts its weights again and again."""
    make = functools.partial(_convert, dtype, kind, arch, mesh.shape['e'])
    layer = make_shardings(ServingLayer, mesh)
    weights = layer.weights.named()
    for name in weights:
        if _is_rounded(name, kind, mesh.shape['e']):
            spec = weights[name].spec
            weights[name] = NamedSharding(mesh, PartitionSpec(*(spec[i] for i in _outputs_first(name, len(spec)))))
    layer = dataclasses.replace(layer, weights=Layer.from_named(weights))
    shardings = ServingWeights(make_shardings(Outer, mesh), (layer,) * arch.n_layers)
    return jax.jit(make, out_shardings=shardings)


def _convert(dtype: DTypeLike, kind: WeightKind, arch: Architecture, e: int, w: Weights) -> ServingWeights:
    layers, scales = {}, {}
    stacked: Any = w.layers
    for name, values in stacked.named().items():
        if _is_rounded(name, kind, e):
            matrices, scales[name] = quantize(values, tuple(np.atleast_1d(MATRICES[name][0])))
            order = _outputs_first(name, values.ndim - 1)
            layers[name] = jnp.transpose(matrices, (0, *(axis + 1 for axis in order)))
        else:
            layers[name] = values.astype(dtype) if name in MATRICES else values
    unembed, unembed_scale = w.unembed, None
    if kind == 'int8':
        unembed, unembed_scale = quantize(w.embed if unembed is None else unembed, (1,))
    elif unembed is not None:
        unembed = unembed.astype(dtype)
    positions = None if w.positions is None else w.positions.astype(dtype)
    outer = Outer(w.embed.astype(dtype), positions, w.norm, w.norm_bias, unembed, unembed_scale, w.unembed_bias)
    names = [Layer.fields_in(arch, kind) for kind in arch.kinds]
    weights, scale = Stack(layers, names), Stack(scales, names)
    each = [ServingLayer(Layer.from_named(weights.layer(i)), Scales(**scale.layer(i))) for i in range(arch.n_layers)]
    return ServingWeights(outer, tuple(each))


def _is_rounded(name: str, kind: WeightKind, e: int) -> bool:
    """Whether a weight of a layer is stored in int8."""
    exact = name == 'kv_b' or (name.startswith('expert_') and e > 1)
    return kind == 'int8' and name in MATRICES and not exact
