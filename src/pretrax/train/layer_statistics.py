"""Statistics of a training step by layer: of activations (`model.statistics`), and of the gradient, weights and update.

They are a program of their own, which runs before the step in the steps that are logged, and computes the step without
taking it. So the training program is the same with and without statistics, and other steps cost nothing.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pretrax.model.architecture import Architecture
from pretrax.model.base import weight_shardings
from pretrax.model.loss import Batch
from pretrax.model.statistics import forward_statistics
from pretrax.model.transformer import Transformer
from pretrax.model.weights import layers_with
from pretrax.shardlib import i32
from pretrax.train.average import gradient_point
from pretrax.train.host_memory import on_device
from pretrax.train.norms import squares_and_maxima
from pretrax.train.step import Gradient, Recipe, TrainState, Weights, training_step

Statistics = dict[str, jax.Array]
# the state before a step, its batch, the source of each row -> statistics by name
LayerStatisticsOf = Callable[[TrainState, Batch, jax.Array], Statistics]
STACKED = 'layers.'  # what the names of weights that are stacked over layers begin with


def make_layer_statistics(recipe: Recipe, n_sources: int) -> LayerStatisticsOf:
    """The jitted statistics of a step. They donate nothing, and every device has all of them.

    Args:
        recipe: recipe of the training step.
        n_sources: how many sources the rows have; 0: they have none.

    Returns:
        A function of the state, the batch and i32[rows], the number of each row's source (anything if there are none).
    """
    step = training_step(recipe)

    def statistics(state: TrainState, batch: Batch, sources: i32['B']) -> Statistics:
        state = on_device(state)
        after, _, gradient = step(state, batch)
        model = recipe.model
        activations, arch = {}, None
        if isinstance(model, Transformer):
            weights: Any = gradient_point(recipe.optimizer, state.weights, state.optimizer)  # those of a Transformer
            activations, arch = (
                forward_statistics(model, recipe.accumulation, n_sources, weights, batch, sources),
                model.arch,
            )
        shardings = weight_shardings(model, state.weights)
        return activations | weight_statistics(state.weights, gradient, on_device(after.weights), shardings, arch)

    return jax.jit(statistics, out_shardings=NamedSharding(jax.sharding.get_mesh(), PartitionSpec()))


def weight_statistics(
    before: Weights, gradient: Gradient, after: Weights, shardings: Any, arch: Architecture | None = None
) -> Statistics:
    """Norms, RMS and maxima of the gradient before clipping, of the update and of the weights before it.

    A bare name, such as `gradient_norm`, is f32[layers], over all weights of a layer. `gradient_norm/q` is that of one
    kind of weight: f32[layers] if it is stacked over layers, NaN in layers that do not have it; otherwise f32[].

    Args:
        shardings: the sharding of each weight.
        arch: of a decoder, whose weights `layers.*` are stacked over the layers; None: no weight is stacked.
    """
    trees = {'gradient': gradient, 'update': jax.tree.map(jnp.subtract, after, before), 'weight': before}
    named = [
        (jax.tree_util.keystr(path, simple=True, separator='.'), w)
        for path, w in jax.tree_util.tree_leaves_with_path(before)
    ]
    stacked = [arch is not None and name.startswith(STACKED) for name, _ in named]
    by_row = jax.tree.structure(before).unflatten(stacked)
    found: Statistics = {}
    norms: dict[str, Statistics] = {}
    for what, reduced in zip(trees, squares_and_maxima(list(trees.values()), shardings, by_row), strict=True):
        norms[what], layers = {}, []
        for (name, w), square, largest in zip(named, *map(jax.tree.leaves, reduced), strict=True):
            weight = name.removeprefix(STACKED)
            if arch is None or weight == name:
                norms[what][f'/{name}'] = jnp.sqrt(square[0])
                continue
            one = _InLayers(square, largest, size=jnp.full(len(w), math.prod(w.shape[1:]), jnp.float32))
            norms[what][f'/{weight}'] = jnp.sqrt(one.square)
            has = np.array(layers_with(arch, weight))
            if len(has) < arch.n_layers:
                nothing = jnp.zeros(arch.n_layers)
                one = _InLayers(*(nothing.at[has].set(x) for x in one))
                norms[what][f'/{weight}'] = jnp.full_like(nothing, jnp.nan).at[has].set(norms[what][f'/{weight}'])
            layers.append(one)
        if layers:
            total = sum(one.square for one in layers)
            norms[what][''] = jnp.sqrt(total)
            found[f'{what}_rms'] = jnp.sqrt(total / sum(one.size for one in layers))
            found[f'{what}_max'] = jnp.max(jnp.stack([one.largest for one in layers]), axis=0)
        found |= {f'{what}_norm{name}': norm for name, norm in norms[what].items()}
    ratios = {name: norms['update'][name] / weight for name, weight in norms['weight'].items()}
    return found | {f'update_ratio{name}': ratio for name, ratio in ratios.items()}


class _InLayers(NamedTuple):
    """Statistics of one weight in each layer, f32[layers]."""

    square: jax.Array  # the sum of squares
    largest: jax.Array
    size: jax.Array  # how many numbers
