"""Layers in stages along the mesh axis p: micro-batches go from stage to stage, each stage at work on another one.

The stages are the devices along p. The layers are cut into stages x rounds chunks; a micro-batch goes around the ring of
stages `rounds` times, and chunk c is on stage c % stages (Narayanan et al. 2021, arXiv:2104.04473, section 2.2: interleaved).
With 2 stages, 2 rounds and 4 micro-batches (numbers), chunk by chunk (letters a b c d):

    tick        0   1   2   3   4   5   6   7   8
    stage 0    0a  1a  0c  1c  2a  3a  2c  3c   .
    stage 1     .  0b  1b  0d  1d  2b  3b  2d  3d

At the end of every tick each stage passes its result on: one `ppermute`. Micro-batches come in groups of as many as there
are stages, so that what leaves the last stage arrives at the first one just when its next round is due, and nothing waits.
The backward pass is the transpose of all this, made by JAX: the same ticks in reverse, the ring the other way around.
Each pass has stages - 1 ticks in which a given stage has nothing to do; these are the bubble.

All stages run one program. A stage with nothing to do computes all the same, on data that no loss depends on: the others
are at work in that tick, and would have to be waited for anyway.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.errors import UserError
from pretrax.model.architecture import Architecture
from pretrax.shardlib import (  # fmt: skip
    apart,
    as_carried,
    axis_index,
    axis_size,
    ppermute,
    psum,
    psum_scatter,
    recompute_by_name,
    scope,
)

Stage = Callable[[Any, Any, Any], tuple[Any, Any]]  # x, layers of one chunk, micro-batch -> x, sums of each layer


class Schedule(NamedTuple):
    """Which stage works on what, when."""

    stages: int
    rounds: int
    micro_batches: int

    @property
    def ticks(self) -> int:
        """How long a pass takes, forward or backward, in the time that a stage takes for one chunk."""
        return self.rounds * self.micro_batches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The part of its time in which a stage has nothing to do: (stages - 1) / (rounds micro_batches + stages - 1)."""
        return (self.stages - 1) / self.ticks

    def work(self, tick: Any, stage: Any) -> tuple[Any, Any, Any]:
        """Whether a stage has something to do in a tick, in which round, on which micro-batch. Numbers or arrays."""
        slot = tick - stage
        round_, place = slot // self.stages % self.rounds, slot % self.stages
        micro_batch = slot // (self.stages * self.rounds) * self.stages + place
        return (slot >= 0) & (micro_batch < self.micro_batches), round_, micro_batch

    def __str__(self) -> str:
        s, r, n = self
        return (
            f'{s} stages, {n} micro-batches, {r} round{"s" * (r > 1)}: bubble {100 * self.bubble:.1f} % = '
            f'({s} - 1) / ({r} x {n} + {s} - 1)'
        )


def choose_schedule(stages: int, rounds: int, micro_batches: int, arch: Architecture) -> tuple[Schedule | None, str]:
    """The schedule of a model on `stages` devices along p, none where there is one stage; and a line that tells of it.

    Raises:
        UserError: the layers cannot be cut so, with the nearest mesh or number of rounds that can.
    """
    if stages == 1:
        return None, 'none (mesh.p = 1)' + (', which pipeline_rounds says nothing to' if rounds > 1 else '')
    turns = len(arch.kinds)  # a stage's program is that of every stage, so all chunks have to be alike

    def fits(stages: int, rounds: int) -> bool:
        return arch.n_layers % (stages * rounds * turns) == 0

    if not fits(stages, rounds):
        chunks = f'mesh.p = {stages}' + (f' x model.pipeline_rounds = {rounds}' if rounds > 1 else '')
        if arch.n_layers % (stages * rounds) == 0:
            why = f'leaves {arch.n_layers // (stages * rounds)} in a chunk, and {turns} kinds of layers take turns'
        else:
            why = 'does not divide them'
        fewer = [f'model.pipeline_rounds={n}' for n in range(rounds - 1, 0, -1) if fits(stages, n)]
        fewer += [f'mesh.p={n}' for n in range(stages - 1, 0, -1) if fits(n, rounds) or n == 1]
        raise UserError(f'model.n_layers = {arch.n_layers}: {chunks} {why}\nuse {fewer[0]}')
    schedule = Schedule(stages, rounds, micro_batches)
    assert micro_batches % stages == 0, schedule
    more = next((n for n in range(rounds + 1, arch.n_layers + 1) if fits(stages, n)), None)
    advice = ''
    if schedule.bubble > 0.1 and more:
        less = schedule._replace(rounds=more).bubble
        advice = f'; model.pipeline_rounds={more} would make it {100 * less:.1f} %'
    return schedule, f'{schedule}{advice}'


def in_stages(
    enter: Callable[[Any], Any],
    stage: Stage,
    judge: Callable[[Any, Any], Any],
    layers: Any,
    batch: Any,
    schedule: Schedule,
    kept: Mapping[str, Any] | None,
) -> tuple[Any, Any]:
    """Sums over a batch of what comes out of the last layer, and of what every layer finds out, the same on all stages.

    Every stage has what comes before and after the layers. At the entrance all of them compute the same: that is a lookup,
    and costs less than to send it. At the exit each takes its share of the micro-batches: the products with the
    vocabulary, large ones, are shared out over p, and are made one micro-batch at a time and again in the backward pass,
    so that the logits of no more than one are ever there.

    Args:
        enter: micro-batch -> x, what goes into the first layer.
        stage: computes one chunk of the layers.
        judge: x after the last layer, micro-batch -> sums.
        layers: this stage's part of the stacked weights.
        batch: this device's rows.
        schedule: of the micro-batches.
        kept: what of each stage and micro-batch is kept for the backward pass besides the input; None: everything.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    assert rows % schedule.micro_batches == 0, f'{rows} rows in {schedule.micro_batches} micro-batches'
    batches = jax.tree.map(lambda a: a.reshape(schedule.micro_batches, -1, *a.shape[1:]), batch)
    with apart('p'):
        x, found = pipeline(stage, jax.lax.map(enter, batches), layers, batches, schedule, kept)
        share = schedule.micro_batches // schedule.stages
        first = axis_index('p') * share
        own = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, share), batches)
        with scope():
            x = psum_scatter('N B/r/d/e L/c/t M -> N/p B/r/d/e L/c/t M', x)  # zeros but on the last stage
        judged = jax.lax.map(jax.checkpoint(lambda one: judge(*one)), (x, own))
        return psum('p', jax.tree.map(lambda sums: jnp.sum(sums, axis=0), judged)), found


def pipeline(
    stage: Stage, x: Any, layers: Any, batches: Any, schedule: Schedule, kept: Mapping[str, Any] | None
) -> tuple[Any, Any]:
    """Takes every micro-batch through all layers. Call it `apart('p')`: each stage has arrays of its own.

    Args:
        stage: computes one chunk of the layers.
        x: num[N ...], the micro-batches at the entrance; only what the first stage has of it is read.
        layers: this stage's part of the stacked weights, of 'layers/p'.
        batches: what `stage` has to know of the micro-batches besides x, N in front; on every stage.
        schedule: of N micro-batches.
        kept: what of a stage is kept from the forward to the backward pass besides its input, see `recompute_by_name`.

    Returns:
        The micro-batches at the exit, on the last stage, zeros on the others; and the sums of every layer, added up over
        the micro-batches, on all stages.
    """
    here, last = axis_index('p'), schedule.stages - 1
    chunks = dealt(layers, schedule.rounds)

    def at_work(now: Any) -> tuple[Any, Any, Any]:
        busy, round_, number = schedule.work(now, here)
        return busy, round_, jnp.clip(number, 0, schedule.micro_batches - 1)

    def compute(arriving: Any, now: Any) -> tuple[Any, Any]:
        busy, round_, number = at_work(now)
        enters = ~busy | ((here == 0) & (round_ == 0))
        chunk, batch = _part(chunks, round_), _part(batches, number)
        with scope():  # B is a micro-batch, and letters of a stage are its own
            return stage(jnp.where(enters, _part(x, number), arriving), chunk, batch)

    compute = recompute_by_name(compute, kept)

    def tick(carry: tuple[Any, Any, Any], now: Any) -> tuple[Any, None]:
        arriving, finished, sums = carry
        out, new = compute(arriving, now)
        busy, round_, number = at_work(now)
        leaves = busy & (here == last) & (round_ == schedule.rounds - 1)
        finished = finished.at[number].set(jnp.where(leaves, out, _part(finished, number)))
        sums = jax.tree.map(lambda s, n: s.at[round_].add(jnp.where(busy, n, jnp.zeros_like(n))), sums, new)
        return (ppermute('p', out), finished, sums), None

    of_a_chunk = jax.eval_shape(compute, x[0], jnp.int32(0))[1]
    nothing = jax.tree.map(lambda like: jnp.zeros((schedule.rounds, *like.shape), like.dtype), of_a_chunk)
    start, ticks = (jnp.zeros_like(x[0]), jnp.zeros_like(x), nothing), jnp.arange(schedule.ticks)
    (_, finished, sums), _ = jax.lax.scan(tick, as_carried([tick], start, ticks), ticks)
    return finished, jax.tree.map(in_order, sums)


def dealt(layers: Any, rounds: int) -> Any:
    """This stage's layers as the rounds want them: arrays of [layers/p ...] -> [rounds, layers of a chunk ...].

    At rest they lie in their order, whatever the schedule: stage s has chunks rounds s, rounds s + 1, ... With several
    rounds each is sent to the stage that it is for, once a step, in `rounds` turns; in a turn every stage sends one chunk
    and gets one. Their gradients come back the same way.
    """
    stages, here = axis_size('p'), axis_index('p')
    held = jax.tree.map(lambda w: w.reshape(rounds, -1, *w.shape[1:]), layers)
    if rounds == 1:
        return held
    between = stages // math.gcd(stages, rounds)  # stages so far from each other have chunks for the same ones
    ordered = jax.tree.map(jnp.zeros_like, held)
    for turn in range(rounds):
        which = (turn + np.arange(stages) // between) % rounds  # of its chunks each stage sends
        chunk = np.arange(stages) * rounds + which
        to, round_ = chunk % stages, np.empty(stages, np.int32)
        round_[to] = chunk // stages  # of the chunk that each stage gets
        got = ppermute('p', _part(held, jnp.asarray(which)[here]), to=to.tolist())
        place = jnp.asarray(round_)[here]
        ordered = jax.tree.map(lambda all_, new, place=place: all_.at[place].set(new), ordered, got)
    return ordered


def in_order(sums: Any) -> Any:
    """What the stages found out about their chunks, on all stages in the order of the layers: [layers ...]."""
    rounds, stages = sums.shape[0], axis_size('p')
    own = jnp.arange(stages).reshape(-1, *[1] * (sums.ndim - 1)) == axis_index('p')
    table = jnp.where(own, sums[:, None], jnp.zeros((), sums.dtype))
    return psum('p', table).reshape(rounds * stages * sums.shape[1], *sums.shape[2:])


def _part(stacked: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), stacked)
