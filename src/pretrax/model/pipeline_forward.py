"""The forward pass of pipeline stages, and the weights and sums of their layers.

At the end of every tick, each stage sends its result to the next one: one `ppermute`. JAX makes the backward pass,
which is the transpose: the same ticks in reverse order, around the ring in the other direction. All stages run the same
program. An idle stage computes too, on data that no loss depends on: it would have to wait for the others in any case.

Letters: N micro-batches, B batch, L length, M d_model.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.model.loss import Batch, is_maximum
from pretrax.model.pipeline_schedule import PipelineSchedule, Work
from pretrax.model.weights import Layer
from pretrax.shardlib import (
    Choice,
    axis_index,
    axis_size,
    i32,
    match_carry,
    num,
    ppermute,
    psum,
    recompute_by_name,
    scope,
)

PyTree = Any  # of arrays
# x, the layers of one chunk, micro-batch, the number of the chunk -> x, sums of each layer
Stage = Callable[[jax.Array, Layer, Batch, i32['']], tuple[jax.Array, PyTree]]


def pipeline(
    stage: Stage,
    x: num['N B/r/d/e L/c/t M'],
    layers: Layer,
    batches: Batch,
    schedule: PipelineSchedule,
    kept: Mapping[str, Choice] | None,
) -> tuple[num['N B/r/d/e L/c/t M'], PyTree]:
    """Takes N micro-batches through all layers. Call it inside `independent('p')`: each stage has arrays of its own.

    Args:
        stage: computes one chunk of the layers.
        x: the input of the first layer; only the first stage reads it.
        layers: this stage's part of the stacked weights, of 'layers/p'.
        batches: the micro-batches, stacked; on every stage.
        schedule: of the micro-batches.
        kept: what the backward pass keeps of a stage besides its input, see `recompute_by_name`.

    Returns:
        The result of the last layer on the last stage, zeros on the others; and the sums of every layer over the
        micro-batches, on all stages.
    """
    here, last = axis_index('p'), schedule.stages - 1
    chunks = chunks_of_stage(layers, schedule.rounds)

    def work(now: i32['']) -> Work:
        busy, round_, number = schedule.forward(now, here)
        return busy, round_, jnp.clip(number, 0, schedule.micro_batches - 1)

    def compute(arriving: num['B/r/d/e L/c/t M'], now: i32['']) -> tuple[num['B/r/d/e L/c/t M'], PyTree]:
        busy, round_, number = work(now)
        enters = ~busy | ((here == 0) & (round_ == 0))
        chunk, batch = part(chunks, round_), part(batches, number)
        with scope():  # B is a micro-batch here
            arriving = jnp.where(enters, part(x, number), arriving)
            return stage(arriving, chunk, batch, round_ * schedule.stages + here)

    compute = recompute_by_name(compute, kept)

    @jax.named_scope('tick')
    def tick(carry: tuple[jax.Array, jax.Array, PyTree], now: i32['']) -> tuple[PyTree, None]:
        arriving, finished, sums = carry
        out, new = compute(arriving, now)
        busy, round_, number = work(now)
        leaves = busy & (here == last) & (round_ == schedule.rounds - 1)
        finished = finished.at[number].set(jnp.where(leaves, out, part(finished, number)))
        sums = add_round(sums, jax.tree.map(lambda n: jnp.where(busy, n, jnp.zeros_like(n)), new), round_)
        return (ppermute('p', out), finished, sums), None

    of_chunk = jax.eval_shape(compute, x[0], jnp.int32(0))[1]
    zeros = jax.tree.map(lambda like: jnp.zeros((schedule.rounds, *like.shape), like.dtype), of_chunk)
    start, ticks = (jnp.zeros_like(x[0]), jnp.zeros_like(x), zeros), jnp.arange(schedule.ticks)
    (_, finished, sums), _ = jax.lax.scan(tick, match_carry([tick], start, ticks), ticks)
    return finished, jax.tree.map(in_layer_order, sums)


def add_round(totals: PyTree, new: PyTree, round_: i32['']) -> PyTree:
    """The statistics [rounds, layers of a chunk ...] with those of one more micro-batch in a round."""

    def add(path: Any, total: jax.Array, one: jax.Array) -> jax.Array:
        here = total.at[round_]
        return here.max(one) if is_maximum(path) else here.add(one)

    return jax.tree_util.tree_map_with_path(add, totals, new)


def chunks_of_stage(layers: Layer, rounds: int) -> Layer:
    """The layers that this stage computes in each round: arrays of [layers/p ...] -> [rounds, layers of a chunk ...].

    At rest, layers are in their order for every schedule: stage s has chunks rounds s, rounds s + 1, ... With several
    rounds, each chunk is sent once per step to the stage that computes it. This takes `rounds` turns, in each of which
    every stage sends and receives one chunk. The gradients return the same way.
    """
    stages, here = axis_size('p'), axis_index('p')
    held = jax.tree.map(lambda w: w.reshape(rounds, -1, *w.shape[1:]), layers)
    if rounds == 1:
        return held
    between = stages // math.gcd(stages, rounds)  # stages at this distance have chunks for the same stages
    ordered = jax.tree.map(jnp.zeros_like, held)
    for turn in range(rounds):
        which = (turn + np.arange(stages) // between) % rounds  # the chunk that each stage sends
        chunk = np.arange(stages) * rounds + which
        to, round_ = chunk % stages, np.empty(stages, np.int32)
        round_[to] = chunk // stages  # of the chunk that each stage receives
        received = ppermute('p', part(held, jnp.asarray(which)[here]), to=to.tolist())
        own_round = jnp.asarray(round_)[here]
        ordered = jax.tree.map(lambda all_, new, i=own_round: all_.at[i].set(new), ordered, received)
    return ordered


def in_layer_order(sums: jax.Array) -> jax.Array:
    """The stages' sums of their chunks, [rounds, layers of a chunk ...] -> [layers ...] on all stages."""
    rounds, stages = sums.shape[0], axis_size('p')
    own = jnp.arange(stages).reshape(-1, *[1] * (sums.ndim - 1)) == axis_index('p')
    table = jnp.where(own, sums[:, None], jnp.zeros((), sums.dtype))
    return psum('p', table).reshape(rounds * stages * sums.shape[1], *sums.shape[2:])


def part(stacked: PyTree, i: i32['']) -> PyTree:
    """Element i of each of the stacked arrays."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), stacked)
