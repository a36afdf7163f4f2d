"""Programs that find silent corruption: the digests of a step's gradient on each device, and those of the state.

A faulty device computes wrong numbers without an error (Hochschild et al. 2021, "Cores that don't count"; Dixit et al.
2021, arXiv:2102.11245). The first program is run twice with the same inputs, and once with the batch moved to other
devices; what a device sends must be the same bit for bit. The second one compares replicas of the state.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from pretrax.model.base import AutomaticModel, weight_shardings
from pretrax.model.loss import Batch
from pretrax.shardlib.digests import MIXED, Digested, Loop, digest_sent, digest_shards
from pretrax.train.average import gradient_point
from pretrax.train.groups import settings_of
from pretrax.train.host_memory import on_device
from pretrax.train.step import Recipe, TrainState, make_gradients, step_keys

AXIS = 'd'  # along which the batch moves

type Places = list[Digested | Loop]


def make_replay(recipe: Recipe) -> tuple[Callable[[TrainState, Batch, jax.Array], jax.Array], Places]:
    """The jitted digests of the gradient of a step, u32[devices, digests], and their places, known once it is traced.

    It donates nothing. Its third argument, bool[], is whether the batch moves to the next device along `d`. Where XLA
    chooses the communication (`AutomaticModel`), there are only the digests of the whole gradient, after all sums.
    """
    places: Places = []

    def replay(state: TrainState, batch: Batch, ahead: jax.Array) -> jax.Array:
        state, model = on_device(state), recipe.model
        gradients = make_gradients(model, recipe.accumulation, settings_of(recipe, state.weights))
        point, keys = gradient_point(recipe.optimizer, state.weights, state.optimizer), step_keys(recipe, state.step)
        known = {} if state.loss_scale is None else {'loss_scale': state.loss_scale[0]}
        known |= {} if state.constants is None else {'constants': state.constants}
        if isinstance(model, AutomaticModel):
            gradient = gradients(point, batch, *keys, **known)[0]
            paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(gradient)]
            places[:] = [Digested(f'the gradient{jax.tree_util.keystr(path)}', MIXED) for path in paths]
            return digest_shards(gradient, weight_shardings(model, point))[0]
        args, moving = (point, model.with_seeds(batch, *keys), *keys), ((False, True, *(False for _ in keys)), False)
        digests, places[:] = digest_sent(gradients, args, known, moving=moving, axis=AXIS, ahead=ahead)
        return digests

    return jax.jit(replay), places


def arrays_of(state: TrainState) -> tuple[tuple[jax.Array, ...], tuple[NamedSharding, ...]]:
    """The arrays of a state, and their shardings: the arguments of `compare_replicas`."""
    arrays = tuple(jax.tree.leaves(state))
    return arrays, tuple(x.sharding for x in arrays)


@functools.partial(jax.jit, static_argnums=1)
def compare_replicas(arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding]) -> tuple[jax.Array, jax.Array]:
    """u32[devices, arrays], the digests of what each device has of an array, and bool of whether replicas differ."""
    return digest_shards(on_device(arrays), shardings)


@functools.partial(jax.jit, static_argnums=1)
def do_replicas_differ(arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding]) -> jax.Array:
    """bool[], whether the replicas of any array differ."""
    return jnp.any(compare_replicas(arrays, shardings)[1])
