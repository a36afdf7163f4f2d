"""The training step: state, metrics = step(state, batch). It is pure; training applies it again and again.

The gradient is computed per device with explicit communication (`typed_shard_map`), the update on
sharded arrays under `jit`. In the update, only norms and some optimizers communicate.
"""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pretrax.model.axes import TOKENS
from pretrax.model.base import AutomaticModel, Model, weight_shardings
from pretrax.model.loss import Batch, LossTerms, means, nonzero
from pretrax.shardlib import check, f32, key, psum, scope, typed_shard_map
from pretrax.train.accumulation import defer_replicas, reduce_replicas, reduce_tables, sum_micro_batches, survey_step
from pretrax.train.average import Optimizer, gradient_point, next_average, next_weights
from pretrax.train.groups import Group, adjusted, settings_of, stop_frozen, trained
from pretrax.train.host_memory import on_device, to_host
from pretrax.train.norms import global_norm
from pretrax.train.skipping import LossScale, outcome_of

Weights = optax.Params  # a pytree of arrays
Gradient = optax.Updates  # a pytree of arrays, shaped like the weights
Metrics = dict[str, jax.Array]  # scalars by name
# weights, batch -> gradient of the mean loss, total sums of its terms, tables
Gradients = Callable[..., tuple[Gradient, dict[str, Any], dict[str, Any]]]


class TrainState(NamedTuple):
    """Everything that training changes."""

    step: jax.Array  # i32[]: steps taken, skipped ones included
    batch: jax.Array  # i32[]: number of the next batch; ahead of `step` after a rollback, which skips batches
    skipped: jax.Array  # i32[]: steps that changed no weight: there was no target, or a fault or spike
    skipped_in_a_row: jax.Array  # i32[]: faults and spikes since a step changed the weights
    usual_loss: jax.Array  # f32[3]: decaying sums over the other steps: of 1, of the loss, of its square
    weights: Weights
    optimizer: optax.OptState  # arrays shaped and sharded like the weights, and scalars
    ema: Weights | None = None  # moving average of the weights; None: not wanted
    loss_scale: jax.Array | None = None  # f32[2] in fp16: what the loss is multiplied by, and steps since it changed
    constants: Any = None  # that the loss reads; no step changes them, and no checkpoint has them


class Recipe(NamedTuple):
    """The parts of a training step that the configuration chooses."""

    model: Model
    optimizer: Optimizer
    rate: Callable[[jax.Array], jax.Array]  # step -> learning rate
    weight_decay: float
    no_decay: tuple[str, ...]  # patterns of the names of weights that do not decay
    clip_norm: float | None
    accumulation: int  # forward and backward passes per step
    seed: int = 0  # of the random numbers that a model draws in training
    offload: tuple[str, ...] = ()  # parts of the state that are in host memory between steps
    width_power: float = 1.0  # muP: the rate of a matrix is in proportion to width^-power
    groups: tuple[Group, ...] = ()  # weights with a learning rate or a decay of their own; frozen ones too
    cautious_decay: bool = False  # weights decay only where the step shrinks them too
    ema_decay: float | None = None  # of the moving average of the weights; None: there is none
    loss_scale: LossScale | None = None  # of fp16; None: the loss is not scaled
    section: Any = None  # `name` and `options` of the optimizer, for its cost
    spike: float | None = None  # a loss this many standard deviations above the usual loss is skipped


def make_step(recipe: Recipe) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The jitted training step. It donates the state: the result reuses the buffers of the argument."""
    step = training_step(recipe)
    return jax.jit(lambda state, batch: step(on_device(state), batch)[:2], donate_argnums=0)


def training_step(recipe: Recipe) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics, Gradient]]:
    """The training step, not jitted. It also returns the gradient before clipping."""

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics, Gradient]:
        before, settings = state.weights, settings_of(recipe, state.weights)
        gradients = make_gradients(recipe.model, recipe.accumulation, settings)
        scale = {} if state.loss_scale is None else {'loss_scale': state.loss_scale[0]}
        known = scale if state.constants is None else {**scale, 'constants': state.constants}
        point = gradient_point(recipe.optimizer, before, state.optimizer)
        gradient, terms, tables = gradients(point, batch, *step_keys(recipe, state.step), **known)
        with jax.named_scope('optimizer'):
            of_trained = trained(gradient, settings)
            shardings = weight_shardings(recipe.model, before)
            norm = global_norm(of_trained, shardings)  # Pascanu et al. 2013, arXiv:1211.5063
            clip = jnp.minimum(1.0, recipe.clip_norm / (norm + 1e-6)) if recipe.clip_norm else 1.0
            clipped = jax.tree.map(lambda g: g * clip, of_trained)
            outcome = outcome_of(terms, norm, state, recipe.spike, recipe.loss_scale)
            apply = optax.with_extra_args_support(recipe.optimizer).update  # type: ignore[arg-type]
            inputs = (clipped, state.optimizer, trained(point, settings))
            update = apply(*inputs, shardings=shardings, trains=outcome.trains)
            rate = recipe.rate(state.step)
            weights, optimizer = next_weights(recipe.optimizer, before, point, update, rate, settings)
            weights = adjusted(recipe.model, weights, tables, settings)
            ema = next_average(state.ema, weights, recipe.ema_decay, state.step + 1 - state.skipped)

        after = TrainState(
            step=state.step + 1,
            batch=state.batch + 1,
            skipped=state.skipped + jnp.where(outcome.trains, 0, 1),
            skipped_in_a_row=outcome.skipped_in_a_row,
            usual_loss=outcome.usual_loss,
            weights=outcome.if_trains(weights, before),
            optimizer=outcome.optimizer_state(recipe.optimizer, optimizer, state.optimizer),
            ema=outcome.if_trains(ema, state.ema),
            loss_scale=outcome.loss_scale,
            constants=state.constants,
        )
        metrics = {
            'loss': outcome.loss,
            **means(terms),
            **({'targets': terms['nll'][1]} if 'nll' in terms else {}),
            'grad_norm': norm,
            'clipped_grad_norm': norm * clip,
            'learning_rate': rate,
            **scale,
            'weight_norm': global_norm(after.weights, shardings),
            'skipped_steps': after.skipped,
            'steps_without_targets': jnp.where(outcome.has_targets, 0, 1),
            'skipped_in_a_row': after.skipped_in_a_row,
            **(recipe.model.summarize(tables) if tables else {}),
        }
        return to_host(after, recipe.offload), metrics, gradient

    return step


def make_gradients(model: Model, accumulation: int, settings: Any = None) -> Gradients:
    """weights, batch -> gradient, terms and tables of the mean loss, for any mesh and accumulation.

    The third argument is the key of the step, if the model draws random numbers (`model.draws`). `settings`: of each
    weight; those of frozen weights are not computed, but zero. None: no weight is frozen.
    """
    if isinstance(model, AutomaticModel):
        return model.make_gradients(accumulation)
    weights_type, constants_type = model.Weights, model.Constants

    @typed_shard_map
    def gradients(
        weights: weights_type,
        batch: Batch,
        step_key: key[''] | None = None,
        loss_scale: f32[''] | None = None,
        constants: constants_type = None,
    ) -> tuple[weights_type, dict[str, tuple[f32[''], f32['']]], dict[str, f32['_ _']]]:
        counts = {name: psum(TOKENS, count) for name, count in model.denominators(batch).items()}
        divisors = {name: nonzero(count) for name, count in counts.items()}
        scale = 1.0 if loss_scale is None else loss_scale
        deferred = defer_replicas(weights, model.plan.reduced_by_layer and accumulation == 1)

        def mean_loss(weights: weights_type, micro: Batch, number: Any, *survey: Any) -> tuple[f32[''], Any]:
            weights = stop_frozen(weights, settings) if settings is not None else weights
            keys = {} if step_key is None else {'key': jax.random.fold_in(step_key, number)}
            keys |= {} if constants is None else {'constants': constants}
            with scope():  # B is a micro-batch here
                sums, tables = split(model.loss(weights, micro, *survey, **keys))
            mean = sum(total / divisors[name] for name, total in sums.items())
            return check(scale * psum(TOKENS, mean), f32[''], 'the loss'), (sums, tables)

        def split(terms: LossTerms) -> tuple[dict[str, f32['']], dict[str, f32['_ _']]]:
            tables = {name: table for name, (table, count) in terms.items() if count is None}
            return {name: total for name, (total, _) in terms.items() if name not in tables}, tables

        gradient = jax.grad(mean_loss, has_aux=True)
        if model.gradient is not None:
            total, terms = model.gradient(deferred, batch, {name: count / scale for name, count in divisors.items()})
            sums, tables = split(terms)
        elif accumulation == 1:
            total, (sums, tables) = gradient(deferred, batch, 0)
        else:
            micros = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
            survey = survey_step(model.survey, weights, micros)
            total, (sums, tables) = sum_micro_batches(gradient, deferred, micros, survey)
        sums, tables = reduce_tables((sums, tables), lambda x: psum(TOKENS, x), largest=lambda x: x)
        terms = {name: (total, counts[name]) for name, total in sums.items()}
        return jax.tree.map(lambda g, w: reduce_replicas(g, w, model.plan.wires) / scale, total, weights), terms, tables

    return lambda w, batch, *key, **known: gradients(w, model.with_seeds(batch, *key), *key, **known)


def step_keys(recipe: Recipe, step: jax.Array) -> tuple[jax.Array, ...]:
    """(The random key of a step,), which depends only on the seed and the step; () if the model draws nothing."""
    if not recipe.model.draws:
        return ()
    of_loss = jax.random.fold_in(jax.random.key(recipe.seed), zlib.crc32(b'loss'))
    return (jax.random.fold_in(of_loss, step),)
