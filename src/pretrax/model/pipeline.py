"""Pipeline parallelism: layers in stages along the mesh axis p, each of which works on another micro-batch.

The stages are the devices along p. The layers are cut into stages x rounds chunks; a micro-batch goes around the ring of
stages `rounds` times, and chunk c is on stage c % stages (Narayanan et al. 2021, arXiv:2104.04473, section 2.2: interleaved).
With 2 stages, 2 rounds and 4 micro-batches (numbers), chunk by chunk (letters a b c d):

    tick        0   1   2   3   4   5   6   7   8
    stage 0    0a  1a  0c  1c  2a  3a  2c  3c   .
    stage 1     .  0b  1b  0d  1d  2b  3b  2d  3d

At the end of every tick, each stage sends its result to the next one: one `ppermute`. Micro-batches come in groups of as many
as there are stages, so a result of the last stage arrives at the first one exactly when its next round begins, and nothing
waits. JAX makes the backward pass, which is the transpose: the same ticks in reverse order, around the ring in the other
direction. In each pass, each stage is idle for stages - 1 ticks; these are the bubble.

All stages run the same program. An idle stage computes too, on data that no loss depends on: it would have to wait for the
others in any case.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.errors import UserError
from pretrax.model.architecture import Architecture
from pretrax.model.loss import Batch
from pretrax.model.weights import Layer
from pretrax.shardlib import (
    Choice,
    axis_index,
    axis_size,
    bool_,
    f32,
    i32,
    independent,
    match_carry,
    num,
    ppermute,
    psum,
    psum_scatter,
    recompute_by_name,
    scope,
)

PyTree = Any  # of arrays
# x, the layers of one chunk, micro-batch -> x, sums of each layer
Stage = Callable[[jax.Array, Layer, Batch], tuple[jax.Array, PyTree]]


class PipelineSchedule(NamedTuple):
    """Which stage works on which micro-batch in which tick."""

    stages: int
    rounds: int
    micro_batches: int

    @property
    def ticks(self) -> int:
        """The length of a pass, forward or backward, in units of the time that a stage takes for one chunk."""
        return self.rounds * self.micro_batches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The fraction of the time in which a stage is idle: (stages - 1) / (rounds micro_batches + stages - 1)."""
        return (self.stages - 1) / self.ticks

    def work(self, tick: i32[''], stage: i32['']) -> tuple[bool_[''], i32[''], i32['']]:
        """Whether a stage is busy in a tick, in which round, and with which micro-batch."""
        time = tick - stage
        round_, in_group = time // self.stages % self.rounds, time % self.stages
        micro_batch = time // (self.stages * self.rounds) * self.stages + in_group
        return (time >= 0) & (micro_batch < self.micro_batches), round_, micro_batch

    def __str__(self) -> str:
        s, r, n = self
        return (
            f'{s} stages, {n} micro-batches, {r} round{"s" * (r > 1)}: bubble {100 * self.bubble:.1f} % = '
            f'({s} - 1) / ({r} x {n} + {s} - 1)'
        )


def choose_schedule(
    stages: int, rounds: int, micro_batches: int, arch: Architecture
) -> tuple[PipelineSchedule | None, str]:
    """The schedule on `stages` devices along p (None: one stage), and a line for the report.

    Raises:
        UserError: the layers cannot be cut into these stages and rounds.
    """
    if stages == 1:
        return None, 'none (mesh.p = 1)' + (', so pipeline_rounds has no effect' if rounds > 1 else '')
    n_kinds = len(arch.kinds)  # all stages run the same program, so all chunks must have the same kinds of layers

    def fits(stages: int, rounds: int) -> bool:
        return arch.n_layers % (stages * rounds * n_kinds) == 0

    if not fits(stages, rounds):
        chunks = f'mesh.p = {stages}' + (f' x model.pipeline_rounds = {rounds}' if rounds > 1 else '')
        if arch.n_layers % (stages * rounds) == 0:
            why = f'leaves {arch.n_layers // (stages * rounds)} per chunk, and {n_kinds} kinds of layers alternate'
        else:
            why = 'does not divide them'
        fewer = [f'model.pipeline_rounds={n}' for n in range(rounds - 1, 0, -1) if fits(stages, n)]
        fewer += [f'mesh.p={n}' for n in range(stages - 1, 0, -1) if fits(n, rounds) or n == 1]
        raise UserError(f'model.n_layers = {arch.n_layers}: {chunks} {why}\nuse {fewer[0]}')
    schedule = PipelineSchedule(stages, rounds, micro_batches)
    assert micro_batches % stages == 0, schedule
    more = next((n for n in range(rounds + 1, arch.n_layers + 1) if fits(stages, n)), None)
    advice = ''
    if schedule.bubble > 0.1 and more:
        less = schedule._replace(rounds=more).bubble
        advice = f'; model.pipeline_rounds={more} would make it {100 * less:.1f} %'
    return schedule, f'{schedule}{advice}'


def in_stages(
    embed: Callable[[Batch], jax.Array],
    stage: Stage,
    numerators: Callable[[jax.Array, Batch], dict[str, jax.Array]],
    layers: Layer,
    batch: Batch,
    schedule: PipelineSchedule,
    kept: Mapping[str, Choice] | None,
) -> tuple[dict[str, f32['']], PyTree]:
    """The numerators of a batch, and the sums of every layer; the same on all stages.

    Every stage has the embedding and the unembedding. All stages embed all micro-batches: a lookup costs less than sending the
    result. Each stage computes the loss of its share of the micro-batches, so the large products with the vocabulary are
    sharded over p. They run one micro-batch at a time, and again in the backward pass, so the logits of one exist at a time.

    Args:
        embed: micro-batch -> x, the input of the first layer.
        stage: computes one chunk of the layers.
        numerators: x after the last layer, micro-batch -> sums.
        layers: this stage's part of the stacked weights.
        batch: this device's rows.
        schedule: of the micro-batches.
        kept: what the backward pass keeps of each stage and micro-batch besides the input; None: everything.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    assert rows % schedule.micro_batches == 0, f'{rows} rows in {schedule.micro_batches} micro-batches'
    batches = jax.tree.map(lambda a: a.reshape(schedule.micro_batches, -1, *a.shape[1:]), batch)
    with independent('p'):
        x, layer_sums = pipeline(stage, jax.lax.map(embed, batches), layers, batches, schedule, kept)
        share = schedule.micro_batches // schedule.stages
        first = axis_index('p') * share
        own = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, share), batches)
        with scope():
            x = psum_scatter('N B/r/d/e L/c/t M -> N/p B/r/d/e L/c/t M', x)  # zeros except on the last stage
        sums = jax.lax.map(jax.checkpoint(lambda one: numerators(*one)), (x, own))
        return psum('p', jax.tree.map(lambda sums: jnp.sum(sums, axis=0), sums)), layer_sums


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

    def work(now: i32['']) -> tuple[bool_[''], i32[''], i32['']]:
        busy, round_, number = schedule.work(now, here)
        return busy, round_, jnp.clip(number, 0, schedule.micro_batches - 1)

    def compute(arriving: num['B/r/d/e L/c/t M'], now: i32['']) -> tuple[num['B/r/d/e L/c/t M'], PyTree]:
        busy, round_, number = work(now)
        enters = ~busy | ((here == 0) & (round_ == 0))
        chunk, batch = _part(chunks, round_), _part(batches, number)
        with scope():  # B is a micro-batch here
            return stage(jnp.where(enters, _part(x, number), arriving), chunk, batch)

    compute = recompute_by_name(compute, kept)

    @jax.named_scope('tick')
    def tick(carry: tuple[jax.Array, jax.Array, PyTree], now: i32['']) -> tuple[PyTree, None]:
        arriving, finished, sums = carry
        out, new = compute(arriving, now)
        busy, round_, number = work(now)
        leaves = busy & (here == last) & (round_ == schedule.rounds - 1)
        finished = finished.at[number].set(jnp.where(leaves, out, _part(finished, number)))
        sums = jax.tree.map(lambda s, n: s.at[round_].add(jnp.where(busy, n, jnp.zeros_like(n))), sums, new)
        return (ppermute('p', out), finished, sums), None

    of_chunk = jax.eval_shape(compute, x[0], jnp.int32(0))[1]
    zeros = jax.tree.map(lambda like: jnp.zeros((schedule.rounds, *like.shape), like.dtype), of_chunk)
    start, ticks = (jnp.zeros_like(x[0]), jnp.zeros_like(x), zeros), jnp.arange(schedule.ticks)
    (_, finished, sums), _ = jax.lax.scan(tick, match_carry([tick], start, ticks), ticks)
    return finished, jax.tree.map(in_layer_order, sums)


def chunks_of_stage(layers: Layer, rounds: int) -> Layer:
    """The layers that this stage computes in each round: arrays of [layers/p ...] -> [rounds, layers of a chunk ...].

    At rest, layers are in their order for every schedule: stage s has chunks rounds s, rounds s + 1, ... With several rounds,
    each chunk is sent once per step to the stage that computes it. This takes `rounds` turns, in each of which every stage
    sends and receives one chunk. The gradients return the same way.
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
        received = ppermute('p', _part(held, jnp.asarray(which)[here]), to=to.tolist())
        own_round = jnp.asarray(round_)[here]
        ordered = jax.tree.map(lambda all_, new, i=own_round: all_.at[i].set(new), ordered, received)
    return ordered


def in_layer_order(sums: jax.Array) -> jax.Array:
    """The stages' sums of their chunks, [rounds, layers of a chunk ...] -> [layers ...] on all stages."""
    rounds, stages = sums.shape[0], axis_size('p')
    own = jnp.arange(stages).reshape(-1, *[1] * (sums.ndim - 1)) == axis_index('p')
    table = jnp.where(own, sums[:, None], jnp.zeros((), sums.dtype))
    return psum('p', table).reshape(rounds * stages * sums.shape[1], *sums.shape[2:])


def _part(stacked: PyTree, i: i32['']) -> PyTree:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), stacked)
