"""The noise of the gradient, from two halves of a batch. McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.

It is a program of its own, as the layer statistics are, so the training program does not change.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from pretrax.model.base import weight_shardings
from pretrax.model.loss import Batch
from pretrax.train.average import gradient_point
from pretrax.train.groups import settings_of, trained
from pretrax.train.host_memory import on_device
from pretrax.train.norms import inner_products
from pretrax.train.step import Gradient, Recipe, TrainState, make_gradients, step_keys


class Noise(NamedTuple):
    """Unbiased estimates of one step. Their noise scale is the quotient
    of their means over many steps, in sequences.
    """

    trace: jax.Array  # f32[]: tr(Sigma), the trace of the covariance of the gradients of single sequences
    square: jax.Array  # f32[]: |G|^2, the square of the norm of the expected gradient


def make_noise(recipe: Recipe) -> Callable[[TrainState, Batch], Noise]:
    """The jitted estimates for a step that is about to be taken; it donates nothing. Batches need two sequences or
    more.

    The halves are every other sequence. To get the gradient of a half, the targets of the other one are masked, and the
    whole batch runs: this works with every mesh, pipeline and number of passes, and costs two forward and backward
    passes. With gradients a and b of halves of n sequences, |G_small|^2 of the paper is the mean of |a|^2 and |b|^2,
    and G_big is (a + b) / 2. Its estimates (A.2, A.3) are then

        |G|^2 = a . b        tr(Sigma) = |a - b|^2 / (1/n + 1/n)

    which are unbiased for halves of different sizes too. They are NaN if a half has no target.
    """

    def noise(state: TrainState, batch: Batch) -> Noise:
        state = on_device(state)
        settings = settings_of(recipe, state.weights)
        gradients = make_gradients(recipe.model, recipe.accumulation, settings)
        known = {} if state.loss_scale is None else {'loss_scale': state.loss_scale[0]}
        known |= {} if state.constants is None else {'constants': state.constants}
        point = gradient_point(recipe.optimizer, state.weights, state.optimizer)
        rows = batch.mask.shape[0]
        numbers = jnp.arange(rows)[:, None] % 2

        def half_gradient(half: jax.Array) -> tuple[Gradient, jax.Array]:
            masked = dataclasses.replace(batch, mask=jnp.where(numbers == half, batch.mask, 0.0))
            gradient, terms, _ = gradients(point, masked, *step_keys(recipe, state.step), **known)
            has_targets = jnp.any(jnp.stack([count != 0 for _, count in terms.values()]))
            return trained(gradient, settings), jnp.where(has_targets, 1.0, jnp.nan)

        both, known_of = jax.lax.map(half_gradient, jnp.arange(2))
        a, b = (jax.tree.map(lambda g, half=half: g[half], both) for half in range(2))
        difference = optax.tree.sub(a, b)
        shardings = weight_shardings(recipe.model, state.weights)
        distance, product = inner_products([(difference, difference), (a, b)], shardings) * jnp.prod(known_of)
        return Noise(distance / (1 / ((rows + 1) // 2) + 1 / (rows // 2)), product)

    return jax.jit(noise, out_shardings=NamedSharding(jax.sharding.get_mesh(), PartitionSpec()))
