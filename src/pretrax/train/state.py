"""The state of a run: a fresh one, its shardings, and its shapes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pretrax.model.base import weight_shardings
from pretrax.shardlib.types import current_mesh
from pretrax.train.average import first_average
from pretrax.train.groups import settings_of, without_frozen
from pretrax.train.host_memory import in_host, on_device
from pretrax.train.skipping import first_scale
from pretrax.train.step import Recipe, TrainState, Weights


def init_state(recipe: Recipe, seed: int, weights: Weights | None = None) -> TrainState:
    """A fresh state. Each device makes its own slice of the weights, unless `weights` are given, which are donated."""

    def init(given: Weights | None) -> TrainState:
        return _fresh(recipe, recipe.model.init(initial_key(seed)) if given is None else on_device(given))

    shardings = state_shardings(recipe, jax.eval_shape(init, weights))
    return jax.jit(init, out_shardings=shardings, donate_argnums=0)(weights)


def initial_key(seed: int) -> jax.Array:
    """The random key of the initial weights of a run."""
    return jax.random.fold_in(jax.random.key(seed), 0)


def _fresh(recipe: Recipe, weights: Weights) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    optimizer = recipe.optimizer.init(without_frozen(weights, settings_of(recipe, weights)))
    average = first_average(weights, recipe.ema_decay)
    scale = first_scale(recipe.loss_scale)
    return TrainState(zero, zero, zero, zero, jnp.zeros(3), weights, optimizer=optimizer, ema=average, loss_scale=scale)


def state_shardings(recipe: Recipe, like: TrainState) -> TrainState:
    """The sharding of every array of a state: weights by their types, the optimizer's moments like their weights.

    The square matrices that SOAP has for a weight are sharded like it along the dimensions that count matrices, and
    over d and t along the rows and columns, if these divide them. Means over some dimensions are sharded along the
    others.
    """
    mesh = current_mesh()
    replicated = NamedSharding(mesh, PartitionSpec())
    weights = weight_shardings(recipe.model, like.weights)
    flat, shardings = jax.tree_util.tree_leaves_with_path(like.weights), jax.tree.leaves(weights)
    by_path = {path: (w.shape, sharding) for (path, w), sharding in zip(flat, shardings, strict=True)}

    def moment(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> NamedSharding:
        """The path of a moment ends with that of its weight."""
        for start in range(len(path)):
            shape, sharding = by_path.get(path[start:], ((), replicated))
            if shape == x.shape:
                return sharding
            if x.ndim == len(shape) > 1 and all(n in (1, whole) for n, whole in zip(x.shape, shape, strict=True)):
                kept = zip(x.shape, [*sharding.spec, *[None] * x.ndim], strict=False)
                return NamedSharding(mesh, PartitionSpec(*(None if n == 1 else axis for n, axis in kept)))
            if x.ndim > 1 and x.shape[-1] == x.shape[-2] and shape[: x.ndim - 2] == x.shape[:-2] and len(shape) > 1:
                many = [*sharding.spec, *[None] * x.ndim][: x.ndim - 2]
                rest = [axis if n % mesh.shape[axis] == 0 else None for axis, n in zip('dt', x.shape[-2:], strict=True)]
                return NamedSharding(mesh, PartitionSpec(*many, *rest))
            for i in range(len(shape)):  # a mean over one dimension, which Adafactor leaves out
                if x.ndim and x.shape == (*shape[:i], *shape[i + 1 :]):
                    axes = [*sharding.spec, *[None] * len(shape)][: len(shape)]
                    return NamedSharding(mesh, PartitionSpec(*axes[:i], *axes[i + 1 :]))
        return replicated

    moments = jax.tree_util.tree_map_with_path(moment, like.optimizer)
    scalars = jax.tree.map(lambda _: replicated, like._replace(weights=None, optimizer=None, ema=None))
    ema = None if like.ema is None else weights
    return in_host(scalars._replace(weights=weights, optimizer=moments, ema=ema), like, recipe.offload)


def abstract_state(recipe: Recipe, seed: int = 0) -> TrainState:
    """Shapes, dtypes and shardings of a state on the current mesh: to restore one, or to compile without one."""
    like = jax.eval_shape(lambda: _fresh(recipe, recipe.model.init(jax.random.key(seed))))
    shardings = state_shardings(recipe, like)
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), like, shardings)
    return state._replace(constants=recipe.model.abstract_constants())
