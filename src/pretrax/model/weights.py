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
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from optax.contrib import MuonDimensionNumbers

from pretrax.model.architecture import Architecture, LayerKind
from pretrax.model.attention import AttentionWeights, OwnHeads, in_attention
from pretrax.model.mlp import FeedForwardWeights
from pretrax.model.moe import ExpertWeights
from pretrax.model.part import Part, all_fields, flat_dataclass, matrices, weight_types
from pretrax.model.recurrent import RecurrentWeights
from pretrax.shardlib import Array, f32, make_abstract, num, pytree_dataclass


@flat_dataclass
class Layer(Part):
    """One layer: its norms and its parts. Weights that a family or this kind of layer does not have are None."""

    norm1: f32['M'] | None
    norm1_bias: f32['M'] | None
    attention: AttentionWeights | None
    recurrent: RecurrentWeights | None
    norm1_after: f32['M'] | None
    norm2: f32['M'] | None
    norm2_bias: f32['M'] | None
    feed_forward: FeedForwardWeights | None
    experts: ExpertWeights | None
    norm2_after: f32['M'] | None
    layer_scale: f32[''] | None
    own_heads: OwnHeads | None

    @classmethod
    def optional(cls, arch: Architecture, kind: LayerKind) -> Mapping[str, bool]:
        """The parts of this kind of layer, and the norms around them."""
        before, after, own = arch.block.norms != 'post', arch.block.norms != 'pre', not arch.block.shared_norm
        return {
            'norm1': before,
            'norm1_bias': arch.norm.bias,
            'attention': kind.mixer == 'attention' and not kind.own_heads,
            'recurrent': kind.mixer != 'attention',
            'norm1_after': after,
            'norm2': kind.feed_forward and before and own,
            'norm2_bias': kind.feed_forward and arch.norm.bias and own,
            'feed_forward': kind.is_dense,
            'experts': kind.experts,
            'norm2_after': kind.feed_forward and after,
            'layer_scale': arch.block.layer_scale,
            'own_heads': kind.own_heads,
        }

    @property
    def projections(self) -> AttentionWeights | None:
        """The weights of attention, whichever heads the layer has; None: it has no attention."""
        return self.attention if self.own_heads is None else self.own_heads.projections()

    @classmethod
    def products_in(cls, arch: Architecture) -> list[list[str]]:
        """The names of the matrices of each layer, as products have them."""
        fields = (cls.fields_in(arch, kind) for kind in arch.kinds)
        return [[in_attention(name) for name in matrices(cls) if name in names] for names in fields]


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


def layers_with(arch: Architecture, name: str) -> tuple[int, ...]:
    """The numbers of the layers that have a weight or a part."""
    has = {kind: name in Layer.fields_in(arch, kind) for kind in set(arch.kinds)}
    return tuple(i for i, kind in enumerate(arch.kinds) if has[kind])


def kinds_of(layers: Layer, arch: Architecture) -> tuple[LayerKind, ...]:
    """The kinds of stacked layers: all of the decoder, or those of a pipeline stage."""
    name, w = next(iter(layers.named().items()))
    return arch.kinds[: w.shape[0] * arch.n_layers // len(layers_with(arch, name))]


def abstract_weights(arch: Architecture) -> Weights:
    """Shapes and shardings of the weights on the current mesh."""
    absent = {
        'positions': arch.positions != 'learned',
        'unembed': arch.embedding.tied,
        'unembed_bias': not arch.head.bias,
        'norm_bias': not arch.norm.bias,
        'multi_token': True,
        'hidden_projection': True,
    }
    counts = {f'layers.{name}': len(layers_with(arch, name)) for name in weight_types(Layer)}
    of_layers = [Layer.fields_in(arch, kind) for kind in arch.kinds]
    omit = *(name for name in absent if absent[name]), *(all_fields(Layer) - set().union(*of_layers))
    weights = make_abstract(Weights, arch.sizes | counts, omit=omit, num=jnp.float32)
    if not arch.multi_token.n_layers:
        return dataclasses.replace(weights, multi_token=_NO_MODULE)
    paths = [*weight_types(MultiToken), *(f'layer.{name}' for name in weight_types(Layer))]
    counts = dict.fromkeys(paths, arch.multi_token.n_layers)
    omit = tuple(all_fields(Layer) - of_layers[-1])
    modules = make_abstract(Array['_', MultiToken], arch.sizes | counts, omit=omit, num=jnp.float32)
    return dataclasses.replace(weights, multi_token=modules)


_NO_MODULE = MultiToken(None, None, None, None, Layer.from_named({}), None)


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
        std = residual if name in INTO_RESIDUAL else arch.init.std
        if arch.mup:
            std *= arch.mup.init(name, name in MATRICES)
        if arch.init.kind == 'truncated':
            return std * jax.random.truncated_normal(own_key, -3.0, 3.0, like.shape)
        if arch.init.kind == 'xavier' and name in MATRICES:
            inputs, outputs = MATRICES[name]
            batch = tuple(axis for axis in range(len(like.shape)) if axis not in (*_axes(inputs), *_axes(outputs)))
            return jax.nn.initializers.glorot_uniform(inputs, outputs, batch)(own_key, like.shape)
        return std * jax.random.normal(own_key, like.shape)

    return jax.tree_util.tree_map_with_path(init, abstract_weights(arch))


_INITIAL = {**RecurrentWeights.initial, 'layer_scale': lambda _, shape: jnp.ones(shape)}

# The axes of the inputs and outputs of the matrices of a layer and of multi-token prediction
MATRICES = matrices(MultiToken)
INTO_RESIDUAL = {name for name in MATRICES if weight_types(MultiToken)[name].dims[-1].name == 'M'}


def _axes(axis: int | tuple[int, ...]) -> tuple[int, ...]:
    return axis if isinstance(axis, tuple) else (axis,)


def round_matrices(layer: Layer, dtype: DTypeLike) -> Layer:
    """The matrices in the dtype in which `gather` sends them to products; the other weights as they are."""
    return Layer.from_named({name: w.astype(dtype) if name in MATRICES else w for name, w in layer.named().items()})


TABLES = {'embed': (0, 1), 'positions': (0, 1), 'unembed': (0, 1)}


def matrix_dimensions(weights: Any, tables: bool = False) -> Any:
    """`Model.matrix_dimensions` of the decoder. In a tree without a model, every two-dimensional array is a matrix."""
    if not isinstance(weights, Weights):
        return jax.tree.map(lambda w: MuonDimensionNumbers((0,), (1,)) if w.ndim == 2 else None, weights)
    known = MATRICES | (TABLES if tables else {})
    return jax.tree_util.tree_map_with_path(
        lambda path, _: MuonDimensionNumbers(*map(_axes, known[path[-1].name])) if path[-1].name in known else None,
        weights,
    )
