"""The weights of the decoder: one declaration gives shapes, shardings, initial values and checkpoints.

Letters: V vocabulary, M d_model, P positions, H query heads, K key/value heads, D head, F feed-forward, E experts,
F_shared of the shared expert.
Matrices are sharded at rest over `d`, over `t` if tensor parallelism splits them, and over `e` if each expert has one. Vectors
are replicated. Training keeps every weight in f32; inference multiplies by matrices of other dtypes (infer/weights.py).
"""

import dataclasses
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from optax.contrib import MuonDimensionNumbers

from pretrax.model.architecture import Architecture
from pretrax.shardlib import Array, f32, make_abstract, num, pytree_dataclass


@pytree_dataclass
class Layer:
    """One layer. Weights that a family does not have are None.

    `up` and `down` are the feed-forward of a dense model. A mixture of experts has a `router`, the feed-forward of each expert
    of width F, and in some families a shared expert, which every token uses, times sigmoid(token . shared_mix).
    """

    norm1: f32['M'] | None
    norm1_bias: f32['M'] | None
    q: num['M/d H/t D']
    k: num['M/d K/t D']
    v: num['M/d K/t D']
    o: num['H/t D M/d']
    q_bias: f32['H/t D'] | None
    k_bias: f32['K/t D'] | None
    v_bias: f32['K/t D'] | None
    o_bias: f32['M'] | None
    q_norm: f32['D'] | None  # of each head
    k_norm: f32['D'] | None
    q_full_norm: f32['H/t D'] | None  # of all heads together
    k_full_norm: f32['K/t D'] | None
    norm1_after: f32['M'] | None
    norm2: f32['M'] | None
    norm2_bias: f32['M'] | None
    gate: num['M/d F/t'] | None
    up: num['M/d F/t'] | None
    down: num['F/t M/d'] | None
    up_bias: f32['F/t'] | None
    down_bias: f32['M'] | None
    router: f32['M/d E'] | None
    expert_gate: num['E/e M/d F/t'] | None
    expert_up: num['E/e M/d F/t'] | None
    expert_down: num['E/e F/t M/d'] | None
    shared_gate: num['M/d F_shared/t'] | None
    shared_up: num['M/d F_shared/t'] | None
    shared_down: num['F_shared/t M/d'] | None
    shared_mix: f32['M'] | None
    norm2_after: f32['M'] | None


@pytree_dataclass
class Weights:
    """The decoder. `positions` exists if positions are learned, `unembed` if the family does not tie it to the embedding."""

    embed: num['V/t M/d']
    positions: num['P/t M/d'] | None
    layers: Array['layers/p', Layer]
    norm: f32['M']
    norm_bias: f32['M'] | None
    unembed: num['V/t M/d'] | None


@pytree_dataclass
class Ends:
    """The weights before and after the layers, with the tables of the vocabulary gathered; one table if the family ties them."""

    embedding: num['V/t M']
    positions: num['P/t M/d'] | None
    norm: f32['M']
    norm_bias: f32['M'] | None
    unembedding: num['V/t M']


def abstract_weights(arch: Architecture) -> Weights:
    """Shapes and shardings of the weights on the mesh in force."""
    absent = {
        'positions': arch.positions != 'learned',
        'unembed': arch.tied,
        'gate': not arch.gated or arch.n_experts > 0,
        'up': arch.n_experts > 0,
        'down': arch.n_experts > 0,
        **dict.fromkeys(('router', 'expert_gate', 'expert_up', 'expert_down'), not arch.n_experts),
        **dict.fromkeys(('shared_gate', 'shared_up', 'shared_down'), not arch.d_shared),
        'shared_mix': not (arch.d_shared and arch.shared_gate),
        **dict.fromkeys(('q_bias', 'k_bias', 'v_bias'), not arch.qkv_bias),
        **dict.fromkeys(('o_bias', 'up_bias', 'down_bias'), not arch.bias),
        **dict.fromkeys(('norm_bias', 'norm1_bias', 'norm2_bias'), not (arch.bias and arch.norm == 'layernorm')),
        **dict.fromkeys(('norm1', 'norm2'), arch.block_norms == 'post'),
        **dict.fromkeys(('norm1_after', 'norm2_after'), arch.block_norms == 'pre'),
        **dict.fromkeys(('q_norm', 'k_norm'), arch.qk_norm != 'head'),
        **dict.fromkeys(('q_full_norm', 'k_full_norm'), arch.qk_norm != 'full'),
    }
    omit = tuple(name for name, without in absent.items() if without)
    return make_abstract(Weights, arch.sizes, omit=omit, num=jnp.float32)


def init_weights(arch: Architecture, key: jax.Array) -> Weights:
    """Initial weights: scales of norms 1, biases 0, matrices normal with `init_std`.

    Radford et al. 2019, section 2.3: the projections into the residual stream are scaled by 1/sqrt(2 n_layers).
    The randomness of a weight depends on the key and its name alone, so it is the same on any mesh.
    """
    residual = arch.init_std / math.sqrt(2 * arch.n_layers)

    def init(path: tuple, like: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].name
        if name.endswith('bias'):
            return jnp.zeros(like.shape, like.dtype)
        if 'norm' in name:
            return jnp.full(like.shape, 1 - arch.norm_offset, like.dtype)
        own_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return (residual if name == 'o' or name.endswith('down') else arch.init_std) * jax.random.normal(
            own_key, like.shape
        )

    return jax.tree_util.tree_map_with_path(init, abstract_weights(arch))


# The input and output dimensions of a layer's matrices; dimension 0 is the layers. Each expert has a matrix of its own. A
# router is not one: each of its columns belongs to an expert, so Adam updates it.
_MATRICES = {
    'q': (1, (2, 3)), 'k': (1, (2, 3)), 'v': (1, (2, 3)), 'o': ((1, 2), 3),
    'gate': (1, 2), 'up': (1, 2), 'down': (1, 2),
    'expert_gate': (2, 3), 'expert_up': (2, 3), 'expert_down': (2, 3),
    'shared_gate': (1, 2), 'shared_up': (1, 2), 'shared_down': (1, 2),
}  # fmt: skip


def round_matrices(layer: Layer, dtype: DTypeLike) -> Layer:
    """The matrices in the dtype in which `gather` sends them to products; the other weights as they are."""
    present = {name: getattr(layer, name) for name in _MATRICES if getattr(layer, name) is not None}
    return dataclasses.replace(layer, **{name: w.astype(dtype) for name, w in present.items()})


def matrix_dimensions(weights: Any) -> Any:
    """The input and output dimensions of each matrix, for optimizers such as Muon; None for other weights.

    In a model other than this decoder, every two-dimensional weight is a matrix.
    """
    if isinstance(weights, Weights):
        nothing = jax.tree.map(lambda _: None, weights)
        matrices = {name: MuonDimensionNumbers(*axes) for name, axes in _MATRICES.items()}
        present = {name: value for name, value in matrices.items() if getattr(weights.layers, name) is not None}
        return dataclasses.replace(nothing, layers=dataclasses.replace(nothing.layers, **present))
    return jax.tree.map(lambda w: MuonDimensionNumbers() if w.ndim == 2 else None, weights)
