"""The schedule: every micro-batch visits every chunk of layers once, in order, and nobody waits longer than is said."""

import re

import jax
import numpy as np
import pytest

from pretrax.model import pipeline
from pretrax.model.pipeline import PipelineSchedule, chunks_of_stage, in_layer_order
from pretrax.shardlib import Array, f32, independent, pytree_dataclass, typed_shard_map
from small import mesh_of

SCHEDULES = [(2, 1, 2), (2, 1, 7), (4, 1, 8), (2, 2, 4), (4, 3, 8), (3, 4, 3), (8, 2, 16)]


def worked(schedule):
    """{(micro-batch, chunk): (tick, stage)}, and the slots in which a stage is idle."""
    done, idle = {}, []
    for tick in range(schedule.ticks):
        for stage in range(schedule.stages):
            busy, round_, micro_batch = schedule.work(tick, stage)
            if not busy:
                idle.append((tick, stage))
                continue
            what = micro_batch, round_ * schedule.stages + stage
            assert what not in done
            done[what] = tick, stage
    return done, idle


@pytest.mark.parametrize('sizes', SCHEDULES)
def test_every_chunk_runs_one_tick_after_the_one_before_on_the_next_stage(sizes):
    schedule = PipelineSchedule(*sizes)
    done, _ = worked(schedule)
    chunks = schedule.stages * schedule.rounds
    assert set(done) == {(m, c) for m in range(schedule.micro_batches) for c in range(chunks)}
    for (micro_batch, chunk), (tick, stage) in done.items():
        if chunk:
            assert (tick - 1, (stage - 1) % schedule.stages) == done[micro_batch, chunk - 1]


@pytest.mark.parametrize('sizes', SCHEDULES)
def test_the_bubble_is_the_idle_slots_over_all_slots(sizes):
    schedule = PipelineSchedule(*sizes)
    _, idle = worked(schedule)
    assert schedule.bubble == pytest.approx(len(idle) / (schedule.ticks * schedule.stages), abs=1e-12)
    stages, rounds, micro_batches = sizes
    # Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2: the idle time over that of the work
    assert schedule.bubble / (1 - schedule.bubble) == pytest.approx((stages - 1) / (rounds * micro_batches))


def test_the_table_in_the_documentation_is_the_schedule():
    rows = dict(re.findall(r'^    stage (\d)  (.*)$', pipeline.__doc__, re.MULTILINE))
    schedule = PipelineSchedule(stages=2, rounds=2, micro_batches=4)
    for stage in range(2):
        work = (schedule.work(tick, stage) for tick in range(schedule.ticks))
        assert rows[str(stage)].split() == [f'{m}{"abcd"[2 * r + stage]}' if busy else '.' for busy, r, m in work]


@pytest.mark.parametrize(('stages', 'rounds'), [(2, 3), (4, 2), (4, 6), (8, 1)])
def test_each_stage_gets_the_layers_of_its_rounds_and_their_sums_return_in_order(stages, rounds):
    """Chunk c is on stage c % stages, in round c // stages."""
    layers = 2 * stages * rounds

    @pytree_dataclass
    class Stack:
        number: Array['layers/p', f32['M']]

    @typed_shard_map
    def run(w: Stack) -> tuple[f32['rounds held/p M'], f32['layers M']]:
        with independent('p'):
            mine = chunks_of_stage(w.number, rounds)
            return mine, in_layer_order(mine)

    with jax.set_mesh(mesh_of(p=stages)):
        mine, every = jax.jit(run)(Stack(np.arange(layers, dtype=np.float32)[:, None]))
    # [rounds, stages, 2]: consecutive layers, two by two, from stage to stage and then round the ring again
    np.testing.assert_array_equal(mine.reshape(-1), np.arange(layers))
    np.testing.assert_array_equal(every.reshape(-1), np.arange(layers))
