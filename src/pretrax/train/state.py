"""The state of a run: a fresh one, its shardings, and its shapes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pretrax.model.base import weight_shardings
from pretrax.shardlib.types import current_mesh
from pretrax.train import soap
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
    zero, shardings = jnp.zeros((), jnp.int32), weight_shardings(recipe.model, weights)
    optimizer = jax.tree.map(
        lambda x: soap.fresh(x, recipe.model.matrix_dimensions, shardings) if _is_soap(x) else x,
        recipe.optimizer.init(without_frozen(weights, settings_of(recipe, weights))),
        is_leaf=_is_soap,
    )
    average = first_average(weights, recipe.ema_decay)
    scale = first_scale(recipe.loss_scale)
    return TrainState(zero, zero, zero, zero, jnp.zeros(3), weights, optimizer=optimizer, ema=average, loss_scale=scale)


def state_shardings(recipe: Recipe, like: TrainState) -> TrainState:
    """The sharding of every array of a state: weights by their types, the optimizer's moments like their weights.

    Means over some dimensions are sharded along the others. SOAP's state of a matrix is at its owner.
    """
    mesh = current_mesh()
    replicated = NamedSharding(mesh, PartitionSpec())
    weights = weight_shardings(recipe.model, like.weights)
    flat, shardings = jax.tree_util.tree_leaves_with_path(like.weights), jax.tree.leaves(weights)
    by_path = {path: (w.shape, sharding) for (path, w), sharding in zip(flat, shardings, strict=True)}

    def moment(path: tuple[Any, ...], x: Any) -> Any:
        """The path of a moment ends with that of its weight."""
        if _is_owned(x):
            return soap.shardings_of(x, jax.tree_util.tree_map_with_path(moment, (x.m, x.v)))
        for start in range(len(path)):
            shape, sharding = by_path.get(path[start:], ((), replicated))
            if shape == x.shape:
                return sharding
            if x.ndim == len(shape) > 1 and all(n in (1, whole) for n, whole in zip(x.shape, shape, strict=True)):
                kept = zip(x.shape, [*sharding.spec, *[None] * x.ndim], strict=False)
                return NamedSharding(mesh, PartitionSpec(*(None if n == 1 else axis for n, axis in kept)))
            for i in range(len(shape)):  # a mean over one dimension, which Adafactor leaves out
                if x.ndim and x.shape == (*shape[:i], *shape[i + 1 :]):
                    axes = [*sharding.spec, *[None] * len(shape)][: len(shape)]
                    return NamedSharding(mesh, PartitionSpec(*axes[:i], *axes[i + 1 :]))
        return replicated

    moments = jax.tree_util.tree_map_with_path(moment, like.optimizer, is_leaf=_is_owned)
    scalars = jax.tree.map(lambda _: replicated, like._replace(weights=None, optimizer=None, ema=None))
    ema = None if like.ema is None else weights
    return in_host(scalars._replace(weights=weights, optimizer=moments, ema=ema), like, recipe.offload)


def abstract_state(recipe: Recipe, seed: int = 0, other: TrainState | None = None) -> TrainState:
    """Shapes, dtypes and shardings of a state on the current mesh: to restore one, or to compile without one.

    Args:
        other: the same on another mesh, if it is known: tracing takes most of the time.
    """
    if other is None:
        weights = jax.eval_shape(lambda: recipe.model.init(jax.random.key(seed)))
    else:
        weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), other.weights)
    by_mesh = other and any(map(_is_owned, jax.tree.leaves(other.optimizer, is_leaf=_is_owned)))
    like = jax.eval_shape(lambda w: _fresh(recipe, w), weights) if other is None or by_mesh else other
    like = jax.tree.map(_with_sharding, like, state_shardings(recipe, like))
    return like._replace(constants=recipe.model.abstract_constants())


def by_weight(state: Any) -> Any:
    """A state as checkpoints have it: what SOAP's owners have is by weight, so that it does not depend on the mesh.

    Args:
        state: or a part of it, of arrays or of their shapes and shardings.
    """

    def stored(x: Any) -> Any:
        if not _is_owned(x):
            return x
        if isinstance(x.gradients, jax.Array):
            return _by_weight(x)
        return jax.tree.map(_with_sharding, jax.eval_shape(_by_weight, x), soap.stored_shardings(x))

    return jax.tree.map(stored, state, is_leaf=_is_owned)


def at_owners(state: Any, like: Any) -> Any:
    """A restored state, or a part of it, as a run has it: with the shapes and shardings of `like`."""

    def owned(like: Any, x: Any) -> Any:
        if not _is_owned(like):
            return x
        shardings = jax.tree.map(lambda one: one.sharding, like)
        return jax.jit(lambda x: soap.at_owners(on_device(x), like), out_shardings=shardings)(x)

    return jax.tree.map(owned, like, state, is_leaf=_is_owned)


@jax.jit
def _by_weight(state: soap.OwnedState) -> soap.SoapState:
    return soap.by_weight(on_device(state))


def _is_owned(x: Any) -> bool:
    return isinstance(x, soap.OwnedState)


def _is_soap(x: Any) -> bool:
    return isinstance(x, soap.SoapState)


def _with_sharding(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
