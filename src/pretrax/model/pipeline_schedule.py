"""The schedules of pipeline stages: which chunk of the layers each stage computes in which tick, for which micro-batch.

The stages are the devices along p. The layers are cut into stages x rounds chunks; a micro-batch goes around the ring
of stages `rounds` times, and chunk c is on stage c % stages (Narayanan et al. 2021, arXiv:2104.04473, section 2.2:
interleaved). With 2 stages, 2 rounds and 4 micro-batches (numbers), chunk by chunk (letters a b c d):

    tick        0   1   2   3   4   5   6   7   8
    stage 0    0a  1a  0c  1c  2a  3a  2c  3c   .
    stage 1     .  0b  1b  0d  1d  2b  3b  2d  3d

Micro-batches come in groups of as many as there are stages, so a result of the last stage arrives at the first one
exactly when its next round begins, and nothing waits. The backward pass visits the chunks in reverse order and takes as
many ticks. In each pass, each stage is idle for stages - 1 ticks; these are the bubble. Two schedules differ in when
the backward pass begins:

interleaved   After the forward pass. Each stage keeps what the backward pass needs of every chunk and micro-batch.
1f1b          As soon as the first micro-batch has passed through all chunks. From then on each stage computes one chunk
              forward and one chunk backward in each tick (one forward, one backward: section 2.2, PipeDream-flush).
              With 3 stages, 1 round and 6 micro-batches, forward/backward:

    tick        0    1    2    3    4    5    6    7    8    9
    stage 0    0/.  1/.  2/.  3/.  4/0  5/1  ./2  ./3  ./4  ./5
    stage 1    ./.  0/.  1/.  2/0  3/1  4/2  5/3  ./4  ./5  ./.
    stage 2    ./.  ./.  0/0  1/1  2/2  3/3  4/4  5/5  ./.  ./.

With 1f1b, the input of the last chunk is kept for one tick, and that of each chunk before it for two ticks more: the
way to the loss and back. So what a stage keeps depends on stages and rounds, not on the number of micro-batches.
Schedulers that run stages out of lockstep keep about half as many inputs, but every stage then needs its own program.
"""

import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from pretrax.errors import UserError
from pretrax.model.architecture import Architecture
from pretrax.shardlib import Choice

Order = Literal['interleaved', '1f1b']
Number = Any  # i32[''] in a program, int in a table
Work = tuple[Any, Number, Number]  # whether a stage is busy in a tick, in which round, with which micro-batch


class PipelineSchedule(NamedTuple):
    """Which stage works on which micro-batch in which tick."""

    stages: int
    rounds: int
    micro_batches: int
    order: Order = 'interleaved'

    @property
    def chunks(self) -> int:
        """The parts that the layers are cut into."""
        return self.stages * self.rounds

    @property
    def ticks(self) -> int:
        """The length of a pass, forward or backward, in units of the time that a stage takes for one chunk."""
        return self.rounds * self.micro_batches + self.stages - 1

    @property
    def backward_starts(self) -> int:
        """The tick of the first backward chunk in 1f1b: that in which the first micro-batch leaves the last chunk."""
        return self.chunks - 1

    @property
    def bubble(self) -> float:
        """The fraction of the time in which a stage is idle: (stages - 1) / (rounds micro_batches + stages - 1)."""
        return (self.stages - 1) / self.ticks

    @property
    def kept(self) -> int:
        """How many inputs of chunks each stage keeps."""
        return int(slots(self).max()) + 1 if self.order == '1f1b' else self.ticks

    @property
    def inputs(self) -> int | None:
        """How many inputs of chunks a stage keeps in 1f1b; None: the schedule is interleaved."""
        return self.kept if self.order == '1f1b' else None

    def forward(self, tick: Number, stage: Number) -> Work:
        """What a stage computes forward in a tick."""
        time = tick - stage
        round_, in_group = time // self.stages % self.rounds, time % self.stages
        micro_batch = time // self.chunks * self.stages + in_group
        return (time >= 0) & (micro_batch < self.micro_batches), round_, micro_batch

    def backward(self, tick: Number, stage: Number) -> Work:
        """What a stage computes backward in a tick of 1f1b: as forward, later, and with the chunks in reverse."""
        busy, round_, micro_batch = self.forward(tick - self.backward_starts, self.stages - 1 - stage)
        return busy, self.rounds - 1 - round_, micro_batch

    def __str__(self) -> str:
        s, r, n, _ = self
        return (
            f'{s} stages, {n} micro-batches, {r} round{"s" * (r > 1)}: bubble {100 * self.bubble:.1f} % = '
            f'({s} - 1) / ({r} x {n} + {s} - 1)'
        )


@functools.cache
def slots(schedule: PipelineSchedule) -> np.ndarray:
    """i32[rounds, micro_batches]: where a stage keeps the input of a chunk until its backward pass in 1f1b.

    The places are those of the first stage, which keeps each input longest: from the other stages it goes on later, and
    to them its gradient returns earlier.
    """
    table, free, n = np.zeros((schedule.rounds, schedule.micro_batches), np.int32), [], 0
    for tick in range(schedule.ticks + schedule.backward_starts):
        busy, round_, micro_batch = schedule.forward(tick, 0)
        if busy:
            free, n = (free, n) if free else ([n], n + 1)
            table[round_, micro_batch] = free.pop()
        busy, round_, micro_batch = schedule.backward(tick, 0)
        if busy:
            free.append(table[round_, micro_batch])
    return table


def choose_schedule(
    wanted: Literal['auto', 'interleaved', '1f1b'],
    sizes: PipelineSchedule,
    arch: Architecture,
    saved: Mapping[str, Choice] | None,
    tokens: int,
) -> tuple[PipelineSchedule | None, str]:
    """The schedule of a training step (None: one stage), and a line for the report.

    Args:
        wanted: `model.pipeline.schedule`.
        sizes: stages, rounds and micro-batches.
        arch: the decoder.
        saved: what the backward pass of a layer keeps; {}: nothing.
        tokens: of a sequence, whose logits a device computes at a time. 1f1b shards them over the stages.

    Raises:
        UserError: the layers cannot be cut into these stages and rounds, or the model does not support the schedule.
    """
    if sizes.stages == 1:
        idle = ['pipeline_rounds'] * (sizes.rounds > 1) + ['pipeline_schedule'] * (wanted != 'auto')
        verb = 'have' if len(idle) > 1 else 'has'
        return None, 'none (mesh.p = 1)' + (f', so {" and ".join(idle)} {verb} no effect' if idle else '')
    _check_layers(sizes, arch)
    assert sizes.micro_batches % sizes.stages == 0, sizes
    problem = _no_1f1b(sizes, arch, tokens)
    if wanted == '1f1b' and problem:
        raise UserError(f'model.pipeline.schedule=1f1b: {problem}')
    one = sizes._replace(order='1f1b')
    better = saved == {} and not problem  # it keeps fewer inputs, and recomputes no more
    schedule = one if wanted == '1f1b' or (wanted == 'auto' and better) else sizes
    return schedule, f'{schedule}{_advice(schedule, arch)}; {_why(schedule, wanted, saved, problem)}'


def _why(schedule: PipelineSchedule, wanted: str, saved: Mapping[str, Choice] | None, problem: str) -> str:
    """What the schedule keeps, and the reason for it."""
    other = schedule._replace(order='interleaved' if schedule.order == '1f1b' else '1f1b')
    if schedule.order == '1f1b':
        why = (
            'model.save=none'
            if saved == {}
            else 'as configured; each chunk runs forward twice, whatever model.save keeps'
        )
        return f'1f1b: a stage keeps {schedule.kept} inputs of chunks, interleaved {other.kept} ({why})'
    kept = f'interleaved: a stage keeps the {"inputs" if saved == {} else "activations"} of {schedule.kept} chunks'
    if wanted == 'interleaved':
        return f'{kept} (as configured)'
    if problem:
        return f'{kept} (1f1b: {problem.splitlines()[0]})'
    return f'{kept} (1f1b recomputes them from {other.kept} inputs: model.save=none)'


def _no_1f1b(sizes: PipelineSchedule, arch: Architecture, tokens: int) -> str:
    """Why a model does not support 1f1b, and the fix; '' if it does."""
    if arch.experts.n_experts and arch.experts.router.balance_loss and arch.experts.router.balance_over == 'batch':
        return (
            'its gradient needs the load of the whole batch before any backward pass '
            '(model.experts.router.balance_over=batch)\n'
            'use model.experts.router.balance_over=sequence, or model.pipeline.schedule=interleaved'
        )
    if tokens % sizes.stages:
        return (
            f'mesh.p = {sizes.stages} stages cannot share the loss of {tokens} tokens '
            '(batch.sequence_length / mesh.c / mesh.t / model.loss_chunks)\n'
            'use another batch.sequence_length or mesh.p, or model.pipeline.schedule=interleaved'
        )
    return ''


def _advice(schedule: PipelineSchedule, arch: Architecture) -> str:
    """More rounds, if the bubble is large."""
    more = next((n for n in range(schedule.rounds + 1, arch.n_layers + 1) if _fits(schedule.stages, n, arch)), None)
    if schedule.bubble <= 0.1 or more is None:
        return ''
    return f'; model.pipeline.rounds={more} would make it {100 * schedule._replace(rounds=more).bubble:.1f} %'


def _fits(stages: int, rounds: int, arch: Architecture) -> bool:
    """Whether all chunks have the same kinds of layers: all stages run the same program."""
    chunk, rest = divmod(arch.n_layers, stages * rounds)
    return rest == 0 and arch.kinds == arch.kinds[:chunk] * (stages * rounds)


def _check_layers(sizes: PipelineSchedule, arch: Architecture) -> None:
    """Raises UserError if the layers cannot be cut into these stages and rounds."""
    stages, rounds = sizes.stages, sizes.rounds
    if _fits(stages, rounds, arch):
        return
    chunks = f'mesh.p = {stages}' + (f' x model.pipeline.rounds = {rounds}' if rounds > 1 else '')
    why = 'does not divide them'
    if arch.n_layers % (stages * rounds) == 0:
        each = arch.n_layers // (stages * rounds)
        why = f'leaves {each} per chunk, and the chunks would have different kinds of layers'
    fewer = [f'model.pipeline.rounds={n}' for n in range(rounds - 1, 0, -1) if _fits(stages, n, arch)]
    fewer += [f'mesh.p={n}' for n in range(stages - 1, 0, -1) if (stages % n == 0 and _fits(n, rounds, arch)) or n == 1]
    raise UserError(f'model.n_layers = {arch.n_layers}: {chunks} {why}\nuse {fewer[0]}')
