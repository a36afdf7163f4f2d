"""The weights of the decoder: one declaration gives shapes, shardings, initial values and checkpoints.

Letters: V vocabulary, M d_model, P positions, H query heads, K key/value heads, D head, F feed-forward, E experts,
F_expert feed-forward of an expert, F_shared of the shared expert; of delta nets and state-space models: N_state
heads, D_value head, N_key key heads, D_key key, J tokens that the convolution sees.
Matrices are sharded at rest over `d`, over `t` if tensor parallelism splits them, and over `e` if each expert has one.
Vectors are replicated. Training keeps every weight in f32; inference multiplies by matrices of other dtypes
(infer/weights.py).
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from optax.contrib import MuonDimensionNumbers

from pretrax.model.architecture import Architecture, LayerKind
from pretrax.shardlib import Array, f32, make_abstract, num, pytree_dataclass


@pytree_dataclass
class Layer:
    """One layer. Weights that a family or this kind of layer does not have are None.

    `up` and `down` are the feed-forward of a dense layer. A mixture of experts has a `router`, the feed-forward of each
    expert, and in some families a shared expert, which every token uses, times sigmoid(token . shared_mix).
    """

    norm1: f32['M'] | None
    norm1_bias: f32['M'] | None
    q: num['M/d H/t D'] | None
    k: num['M/d K/t D'] | None
    v: num['M/d K/t D'] | None
    o: num['H/t D M/d'] | None
    q_direct: num['M/d H/t D_qk'] | None  # these seven: of latent attention (latent_attention.py)
    q_a: num['M/d C_q'] | None
    q_a_norm: f32['C_q'] | None
    q_b: num['C_q/d H/t D_qk'] | None
    kv_a: num['M/d C_kv'] | None
    kv_a_norm: f32['C_latent'] | None
    kv_b: num['C_latent/d H/t D_kv'] | None
    q_bias: f32['H/t D'] | None
    k_bias: f32['K/t D'] | None
    v_bias: f32['K/t D'] | None
    o_bias: f32['M'] | None
    sinks: f32['H/t'] | None  # attention sinks
    q_norm: f32['D'] | None  # of each head
    k_norm: f32['D'] | None
    q_full_norm: f32['H/t D'] | None  # of all heads together, or of each head with a scale of its own
    k_full_norm: f32['K/t D'] | None
    o_gate: num['M/d H/t D'] | None
    # Of delta nets and state-space models (linear_attention.py). In Mamba 2, arXiv:2405.21060, queries, keys and values
    # are C, B and x. Its code has z, x, B, C and dt in one matrix, in_proj, and the three convolutions in one, conv1d.
    linear_q: num['M/d N_key/t D_key'] | None  # Mamba 2: C, in N_key groups of the state size D_key
    linear_k: num['M/d N_key/t D_key'] | None  # B
    linear_v: num['M/d N_state/t D_value'] | None  # x
    linear_z: num['M/d N_state/t D_value'] | None  # z, the gate of the result
    linear_a: f32['M/d N_state/t'] | None  # dt before its bias and softplus; delta net: a, of the decay alpha
    linear_beta: f32['M/d N_state/t'] | None  # delta net, arXiv:2412.06464: beta before its sigmoid
    linear_q_conv: f32['N_key/t D_key J'] | None
    linear_k_conv: f32['N_key/t D_key J'] | None
    linear_v_conv: f32['N_state/t D_value J'] | None
    linear_q_conv_bias: f32['N_key/t D_key'] | None
    linear_k_conv_bias: f32['N_key/t D_key'] | None
    linear_v_conv_bias: f32['N_state/t D_value'] | None
    linear_dt_bias: f32['N_state/t'] | None  # dt_bias
    linear_log_decay: f32['N_state/t'] | None  # A_log: a token's decay is exp(-exp(A_log) dt)
    linear_skip: f32['N_state/t'] | None  # D
    linear_norm: f32['D_value'] | None  # of each head
    linear_group_norm: f32['N_state/t D_value'] | None  # of the heads that share a key
    linear_o: num['N_state/t D_value M/d'] | None
    norm1_after: f32['M'] | None
    norm2: f32['M'] | None
    norm2_bias: f32['M'] | None
    gate: num['M/d F/t'] | None
    up: num['M/d F/t'] | None
    down: num['F/t M/d'] | None
    gate_bias: f32['F/t'] | None
    up_bias: f32['F/t'] | None
    down_bias: f32['M'] | None
    router: f32['M/d E'] | None
    router_logit_bias: f32['E'] | None
    router_bias: f32['E'] | None
    expert_gate: num['E/e M/d F_expert/t'] | None
    expert_up: num['E/e M/d F_expert/t'] | None
    expert_down: num['E/e F_expert/t M/d'] | None
    expert_gate_bias: f32['E/e F_expert/t'] | None
    expert_up_bias: f32['E/e F_expert/t'] | None
    expert_down_bias: f32['E M'] | None
    shared_gate: num['M/d F_shared/t'] | None
    shared_up: num['M/d F_shared/t'] | None
    shared_down: num['F_shared/t M/d'] | None
    shared_mix: f32['M'] | None
    norm2_after: f32['M'] | None
    layer_scale: f32[''] | None
    # Layers without a window may have heads of their own: the weights without `_global`, with other sizes
    q_global: num['M/d H/t D_global'] | None
    k_global: num['M/d K_global/t D_global'] | None
    v_global: num['M/d K_global/t D_global'] | None
    o_global: num['H/t D_global M/d'] | None
    q_norm_global: f32['D_global'] | None
    k_norm_global: f32['D_global'] | None


MODULES = 'multi_token.'  # how the names of the weights of multi-token prediction begin

# Weights that `Model.adjust` changes, and no gradient; they have no optimizer state
BUFFERS = ('layers.router_bias', 'multi_token.layer.router_bias')


@pytree_dataclass
class MultiToken:
    """A module of multi-token prediction (multi_token.py). Its layer has the kind of the decoder's last layer.

    A decoder without modules has one in which every weight is None, since a part that is None has no types for
    `shard_map`.
    """

    embedding_norm: f32['M'] | None
    hidden_norm: f32['M'] | None
    from_embedding: num['M/d M_next'] | None
    from_hidden: num['M/d M_next'] | None
    layer: Layer
    norm: f32['M'] | None


@pytree_dataclass
class Weights:
    """The decoder. `positions` exists if positions are learned, `unembed` if the family does not tie it to the
    embedding.

    The leading dimension of a weight of `layers` counts the layers that have it (`LayerKind.has`), that of a weight of
    `multi_token` the modules.
    """

    embed: num['V/t M/d']
    positions: num['P/t M/d'] | None
    layers: Array['_/p', Layer]
    norm: f32['M']
    norm_bias: f32['M'] | None
    unembed: num['V/t M/d'] | None
    unembed_bias: f32['V/t'] | None
    multi_token: Array['_', MultiToken] | None
    # Of a student in training, if its teacher is wider or narrower (distill/hidden_states.py). No other reader of a
    # checkpoint gets it.
    hidden_projection: num['pairs M/d M_teacher'] | None = None


@pytree_dataclass
class Ends:
    """The weights before and after the layers, with the tables of the vocabulary gathered;
    one table if the family ties them.
    """

    embedding: num['V/t M']
    positions: num['P/t M/d'] | None
    norm: f32['M']
    norm_bias: f32['M'] | None
    unembedding: num['V/t M']
    unembed_bias: f32['V/t'] | None


def abstract_weights(arch: Architecture) -> Weights:
    """Shapes and shardings of the weights on the current mesh."""
    absent = {
        'positions': arch.positions != 'learned',
        'unembed': arch.embedding.tied,
        'sinks': not arch.attention.sinks,
        'unembed_bias': not arch.head.bias,
        'gate': not arch.gated,
        **dict.fromkeys(('q', 'k', 'v'), arch.attention.latent.kv_rank > 0),
        **dict.fromkeys(('kv_a', 'kv_a_norm', 'kv_b'), not arch.attention.latent.kv_rank),
        'q_direct': not arch.attention.latent.kv_rank or arch.attention.latent.q_rank > 0,
        **dict.fromkeys(('q_a', 'q_a_norm', 'q_b'), not arch.attention.latent.q_rank),
        **dict.fromkeys(('shared_gate', 'shared_up', 'shared_down'), not arch.experts.d_shared),
        'router_bias': not arch.experts.router.bias,
        'shared_mix': not (arch.experts.d_shared and arch.experts.shared_gate),
        **dict.fromkeys(('q_bias', 'k_bias', 'v_bias'), not arch.attention.qkv_bias),
        'o_bias': not arch.attention.o_bias,
        'gate_bias': not (arch.feed_forward.bias and arch.gated),
        **dict.fromkeys(('up_bias', 'down_bias'), not arch.feed_forward.bias),
        **dict.fromkeys(_BIASES_OF_EXPERTS, not arch.feed_forward.bias),
        **dict.fromkeys(('norm_bias', 'norm1_bias'), not arch.norm.bias),
        'norm2_bias': not arch.norm.bias or arch.block.shared_norm,
        'norm1': arch.block.norms == 'post',
        'norm2': arch.block.norms == 'post' or arch.block.shared_norm,
        **dict.fromkeys(('norm1_after', 'norm2_after'), arch.block.norms == 'pre'),
        **dict.fromkeys(('q_norm', 'k_norm'), arch.attention.qk_norm != 'head'),
        **dict.fromkeys(('q_full_norm', 'k_full_norm'), arch.attention.qk_norm not in ('full', 'each_head')),
        'o_gate': not arch.attention.gate,
        'layer_scale': not arch.block.layer_scale,
        'v_global': arch.attention.global_k_as_v,
        **dict.fromkeys(('q_norm_global', 'k_norm_global'), arch.attention.qk_norm != 'head'),
        **dict.fromkeys((f'linear_{name}_conv_bias' for name in 'qkv'), not arch.recurrent.conv_bias),
    }
    counts = {field.name: arch.count(field.name) for field in dataclasses.fields(Layer)}
    omit = tuple(name for name in absent | counts if absent.get(name) or not counts.get(name, 1))
    sizes = arch.sizes | {f'layers.{name}': count for name, count in counts.items()}
    weights = make_abstract(Weights, sizes, omit=(*omit, 'multi_token', 'hidden_projection'), num=jnp.float32)
    if not arch.multi_token.n_layers:
        return dataclasses.replace(weights, multi_token=_NO_MODULE)
    missing = tuple(name for name in counts if absent.get(name) or not arch.kinds[-1].has(name))
    of_module = dict.fromkeys(
        f'{prefix}{name}'
        for prefix in ('', 'layer.')
        for name in (*(field.name for field in dataclasses.fields(MultiToken)), *counts)
    )
    sizes = arch.sizes | dict.fromkeys(of_module, arch.multi_token.n_layers)
    modules = make_abstract(Array['_', MultiToken], sizes, omit=missing, num=jnp.float32)
    return dataclasses.replace(weights, multi_token=modules)


_NO_MODULE = MultiToken(None, None, None, None, Layer(*[None] * len(dataclasses.fields(Layer))), None)
_BIASES_OF_EXPERTS = ('router_logit_bias', 'expert_gate_bias', 'expert_up_bias', 'expert_down_bias')


def kinds_of(layers: Layer, arch: Architecture) -> tuple[LayerKind, ...]:
    """The kinds of stacked layers: all of the decoder, or those of a pipeline stage."""
    name, w = next((name, w) for name, w in vars(layers).items() if w is not None)
    return arch.kinds[: w.shape[0] * arch.n_layers // arch.count(name)]


def layer_with(weights: Mapping[str, jax.Array]) -> Layer:
    """A layer that has only these weights."""
    return Layer(**{field.name: weights.get(field.name) for field in dataclasses.fields(Layer)})


def with_own_heads(layer: Layer) -> Layer:
    """The weights of a single layer, those of its heads under the names that attention reads: `q` for `q_global`."""
    if layer.q_global is None:
        return layer
    return layer_with({name.removesuffix('_global'): w for name, w in vars(layer).items() if w is not None})


def init_weights(arch: Architecture, key: jax.Array) -> Weights:
    """Initial weights: scales of norms 1, biases 0, the others normal with `init_std`, except as `init` and `mup` say.

    scaled: the projections into the residual stream are scaled by 1/sqrt(2 n_layers). Radford et al. 2019, section 2.3.
    truncated: values beyond 3 standard deviations are drawn again. xavier: the matrices of the layers are uniform
    within sqrt(6 / (inputs + outputs)), which follows the width without `mup`. Glorot and Bengio 2010, eq. 16. The
    randomness of a weight depends only on the key and its name, so it is the same on any mesh.
    """
    depth = arch.n_layers / (arch.mup.depth if arch.mup else 1)  # muP has a multiplier for more layers
    residual = arch.init.std / math.sqrt(2 * depth) if arch.init.kind == 'scaled' else arch.init.std

    def init(path: tuple, like: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].name
        full_name = name if path[0].name != 'multi_token' else jax.tree_util.keystr(path, simple=True, separator='.')
        own_key = jax.random.fold_in(key, zlib.crc32(full_name.encode()))
        if name in _INITIAL:
            return _INITIAL[name](own_key, like.shape)
        if name.endswith('bias'):
            return jnp.zeros(like.shape, like.dtype)
        if 'norm' in name:
            return jnp.full(like.shape, 1 - arch.norm.offset * (not name.endswith('_a_norm')), like.dtype)
        std = residual if name in ('o', 'o_global', 'linear_o') or name.endswith('down') else arch.init.std
        if arch.mup:
            std *= arch.mup.init(name, name in MATRICES | OF_MODULES)
        if arch.init.kind == 'truncated':
            return std * jax.random.truncated_normal(own_key, -3.0, 3.0, like.shape)
        if arch.init.kind == 'xavier' and name in MATRICES | OF_MODULES:
            inputs, outputs = (MATRICES | OF_MODULES)[name]
            batch = tuple(axis for axis in range(len(like.shape)) if axis not in (*_axes(inputs), *_axes(outputs)))
            return jax.nn.initializers.glorot_uniform(inputs, outputs, batch)(own_key, like.shape)
        return std * jax.random.normal(own_key, like.shape)

    return jax.tree_util.tree_map_with_path(init, abstract_weights(arch))


def _init_dt_bias(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Initial biases for which the step, softplus(bias), is 0.001 to 0.1."""
    step = jnp.exp(jax.random.uniform(key, shape, minval=math.log(0.001), maxval=math.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))


def _init_convolution(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    bound = shape[-1] ** -0.5
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


# As in the code of Mamba 2 (Dao and Gu 2024, arXiv:2405.21060), which that of gated delta nets follows.
_INITIAL: dict[str, Callable[[jax.Array, tuple[int, ...]], jax.Array]] = {
    'linear_dt_bias': _init_dt_bias,
    'linear_log_decay': lambda key, shape: jnp.log(jax.random.uniform(key, shape, minval=1, maxval=16)),
    'linear_skip': lambda _, shape: jnp.ones(shape),
    'linear_norm': lambda _, shape: jnp.ones(shape),  # without `norm_offset`, as the next one
    'linear_group_norm': lambda _, shape: jnp.ones(shape),
    **dict.fromkeys((f'linear_{name}_conv' for name in 'qkv'), _init_convolution),
    'layer_scale': lambda _, shape: jnp.ones(shape),
}


# The input and output dimensions of a layer's matrices; dimension 0 is the layers. Each expert has a matrix of its own.
# A router is not one: each of its columns belongs to an expert, so Adam updates it.
MATRICES = {
    'q': (1, (2, 3)), 'k': (1, (2, 3)), 'v': (1, (2, 3)), 'o': ((1, 2), 3), 'o_gate': (1, (2, 3)),
    'q_global': (1, (2, 3)), 'k_global': (1, (2, 3)), 'v_global': (1, (2, 3)), 'o_global': ((1, 2), 3),
    'linear_q': (1, (2, 3)), 'linear_k': (1, (2, 3)), 'linear_v': (1, (2, 3)), 'linear_z': (1, (2, 3)),
    'linear_o': ((1, 2), 3),
    'q_direct': (1, (2, 3)), 'q_a': (1, 2), 'q_b': (1, (2, 3)), 'kv_a': (1, 2), 'kv_b': (1, (2, 3)),
    'gate': (1, 2), 'up': (1, 2), 'down': (1, 2),
    'expert_gate': (2, 3), 'expert_up': (2, 3), 'expert_down': (2, 3),
    'shared_gate': (1, 2), 'shared_up': (1, 2), 'shared_down': (1, 2),
}  # fmt: skip


OF_MODULES = {'from_embedding': (1, 2), 'from_hidden': (1, 2)}  # the same of multi-token prediction


def _axes(axis: int | tuple[int, ...]) -> tuple[int, ...]:
    return axis if isinstance(axis, tuple) else (axis,)


def round_matrices(layer: Layer, dtype: DTypeLike) -> Layer:
    """The matrices in the dtype in which `gather` sends them to products; the other weights as they are."""
    present = {name: getattr(layer, name) for name in MATRICES if getattr(layer, name) is not None}
    return dataclasses.replace(layer, **{name: w.astype(dtype) for name, w in present.items()})


TABLES = {'embed': (0, 1), 'positions': (0, 1), 'unembed': (0, 1)}


def matrix_dimensions(weights: Any, tables: bool = False) -> Any:
    """The input and output dimensions of each matrix, for optimizers such as Muon; None for other weights.

    In a model other than this decoder, every two-dimensional weight is a matrix.

    Args:
        weights: or a gradient.
        tables: whether the tables of the vocabulary and of positions are matrices too.
    """
    if isinstance(weights, Weights):
        found = _matrices_of(weights, TABLES if tables else {})
        found = dataclasses.replace(found, layers=_matrices_of(weights.layers, MATRICES))
        modules: Any = weights.multi_token
        layer = _matrices_of(modules.layer, MATRICES)
        return dataclasses.replace(
            found, multi_token=dataclasses.replace(_matrices_of(modules, OF_MODULES), layer=layer)
        )
    return jax.tree.map(lambda w: MuonDimensionNumbers() if w.ndim == 2 else None, weights)


def _matrices_of(weights: Any, matrices: Mapping[str, Any]) -> Any:
    """The dimensions of the matrices of a dataclass of weights; None for its other weights."""
    nothing = jax.tree.map(lambda _: None, weights)
    present = {
        name: MuonDimensionNumbers(*axes) for name, axes in matrices.items() if getattr(weights, name) is not None
    }
    return dataclasses.replace(nothing, **present)
