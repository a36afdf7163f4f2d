"""The schedules: every micro-batch visits every chunk of layers once, in order,
and nobody waits longer than is said.
"""

import re

import jax
import numpy as np
import pytest

from pretrax.errors import UserError
from pretrax.model import pipeline_schedule
from pretrax.model.pipeline_forward import chunks_of_stage, in_layer_order
from pretrax.model.pipeline_schedule import PipelineSchedule, slots
from pretrax.shardlib import Array, f32, independent, pytree_dataclass, typed_shard_map
from pretrax.train.step import make_gradients
from small import GPT2, LLAMA, MIXTURE, assert_same, mesh_of, random_batch, random_weights, transformer

SCHEDULES = [(2, 1, 2), (2, 1, 7), (4, 1, 8), (2, 2, 4), (4, 3, 8), (3, 4, 3), (8, 2, 16)]


def worked(schedule, direction='forward', first=0):
    """{(micro-batch, chunk): (tick, stage)}, and the ticks and stages of a pass in which a stage is idle."""
    done, idle = {}, []
    for tick in range(first, first + schedule.ticks):
        for stage in range(schedule.stages):
            busy, round_, micro_batch = getattr(schedule, direction)(tick, stage)
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


def test_the_tables_in_the_documentation_are_the_schedules():
    """Written by hand: that of Narayanan et al. 2021 (figure 4), and 1f1b with its passes in lockstep."""
    rows = re.findall(r'^    stage (\d)  (.*)$', pipeline_schedule.__doc__, re.MULTILINE)
    assert len(rows) == 5
    interleaved = PipelineSchedule(stages=2, rounds=2, micro_batches=4)
    for stage, row in rows[:2]:
        work = (interleaved.forward(tick, int(stage)) for tick in range(interleaved.ticks))
        assert row.split() == [f'{m}{"abcd"[2 * r + int(stage)]}' if busy else '.' for busy, r, m in work]
    one = PipelineSchedule(stages=3, rounds=1, micro_batches=6, order='1f1b')
    for stage, row in rows[2:]:
        both = [(one.forward(tick, int(stage)), one.backward(tick, int(stage))) for tick in range(10)]
        assert row.split() == ['/'.join(str(m) if busy else '.' for busy, _, m in pair) for pair in both]


@pytest.mark.parametrize('sizes', [(2, 1, 2), (4, 1, 8), (2, 2, 4), (4, 3, 8), (8, 2, 16)])
def test_1f1b_runs_each_chunk_backward_one_tick_after_the_next_chunk(sizes):
    schedule = PipelineSchedule(*sizes, order='1f1b')
    forward, _ = worked(schedule)
    backward, _ = worked(schedule, 'backward', schedule.backward_starts)
    last = schedule.chunks - 1
    assert backward.keys() == forward.keys()
    for (micro_batch, chunk), (tick, stage) in backward.items():
        assert stage == forward[micro_batch, chunk][1]
        if chunk == last:
            assert tick == forward[micro_batch, last][0]  # the loss is computed in this tick
        else:
            assert (tick - 1, (stage + 1) % schedule.stages) == backward[micro_batch, chunk + 1]
    # Forward alone, then both, then backward alone: as long as a forward pass and a backward pass one after the other
    ticks = [tick for tick, _ in forward.values()], [tick for tick, _ in backward.values()]
    assert (min(ticks[1]), max(ticks[1]) + 1 - schedule.ticks) == (schedule.backward_starts,) * 2
    assert max(ticks[0]) + 1 == schedule.ticks


@pytest.mark.parametrize('sizes', [(2, 1), (4, 1), (2, 3), (4, 2), (8, 3)])
def test_1f1b_keeps_as_many_inputs_whatever_the_number_of_micro_batches(sizes):
    """As many as Megatron-LM warms up with, plus one: 2 (p - 1) + (v - 1) p + 1 (`get_pp_rank_microbatches`)."""
    stages, rounds = sizes
    for groups in (3, 5, 20):
        schedule = PipelineSchedule(stages, rounds, groups * stages, '1f1b')
        assert schedule.kept == 2 * (stages - 1) + (rounds - 1) * stages + 1
        assert schedule._replace(order='interleaved').kept == rounds * groups * stages + stages - 1


@pytest.mark.parametrize('sizes', [(2, 1, 8), (4, 2, 12), (2, 3, 8)])
def test_no_input_is_overwritten_before_its_backward_pass(sizes):
    schedule = PipelineSchedule(*sizes, order='1f1b')
    forward, _ = worked(schedule)
    backward, _ = worked(schedule, 'backward', schedule.backward_starts)
    places = slots(schedule)
    for stage in range(schedule.stages):
        kept = {}  # (place, tick): which input
        for (micro_batch, chunk), (tick, where) in forward.items():
            if where == stage:
                place = places[chunk // schedule.stages, micro_batch]
                for now in range(tick, backward[micro_batch, chunk][0] + 1):
                    assert kept.setdefault((place, now), (micro_batch, chunk)) == (micro_batch, chunk)


FOUR = {'n_layers': 4, 'layers': 'scan', 'save': 'none'}


def program(options, mesh, micro_batches, rows=16):
    """The gradients on a mesh, traced; weights and a batch for it."""
    model = transformer(options, mesh, micro_batches=micro_batches)
    run = jax.jit(make_gradients(model, 1), compiler_options={'xla_backend_optimization_level': 0})
    return run.trace(random_weights(model), random_batch(rows))


def gradients(options, mesh, micro_batches):
    with jax.set_mesh(mesh):
        compiled = program(options, mesh, micro_batches).lower().compile()
        model = transformer(options, mesh, micro_batches=micro_batches)
        gradient, terms, _ = compiled(random_weights(model), random_batch(16))
        return jax.device_get((gradient, terms))


@pytest.mark.parametrize(
    ('options', 'sizes', 'more'),
    [
        (LLAMA | {'z_loss': 0.02}, {'p': 4}, {'loss_chunks': 2}),
        pytest.param(GPT2, {'d': 2, 'p': 2}, {'save': 'full'}, marks=pytest.mark.slow),
        pytest.param(
            MIXTURE | {'router_z_loss': 0.02, 'balance_loss': 0.3}, {'t': 2, 'p': 2}, {'pipeline_rounds': 2},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_1f1b_gives_the_gradient_of_one_device(options, sizes, more):
    expected, terms = gradients(options | FOUR, mesh_of(), 1)
    staged, staged_terms = gradients(options | FOUR | more | {'pipeline_schedule': '1f1b'}, mesh_of(**sizes), 8)
    length = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(expected)))
    assert_same(staged, expected, rtol=1e-5, floor=1e-6 * length)
    assert_same(staged_terms, terms, rtol=2e-6)


@pytest.mark.slow
def test_the_memory_of_1f1b_does_not_grow_with_the_number_of_micro_batches():
    mesh = mesh_of(p=2)

    def temporaries(schedule, micro_batches):
        with jax.set_mesh(mesh):
            traced = program(
                LLAMA | {'layers': 'scan', 'save': 'none', 'pipeline_schedule': schedule},
                mesh,
                micro_batches,
                rows=micro_batches,
            )
            return traced.lower().compile().memory_analysis().temp_size_in_bytes

    one_input = 4 * 16 * 32  # a sequence, f32
    assert temporaries('interleaved', 32) - temporaries('interleaved', 8) > 24 * one_input
    assert temporaries('1f1b', 32) - temporaries('1f1b', 8) < one_input


REFUSED = {
    'balance': (MIXTURE | {'balance_over': 'batch'}, {'p': 2},
    r'balance_over=sequence, or model.pipeline.schedule=inter'),
    'tokens': (LLAMA, {'p': 4, 't': 2},
    r'4 stages cannot share the loss of 2 tokens .*\nuse another batch.sequence_length'),
}  # fmt: skip


@pytest.mark.parametrize('case', REFUSED)
def test_what_1f1b_does_not_support_is_refused_and_runs_interleaved_otherwise(case):
    options, mesh, message = REFUSED[case]
    options, sizes = options | FOUR, {'length': 4 if case == 'tokens' else 16, 'micro_batches': 8}
    with pytest.raises(UserError, match=message):
        transformer(options | {'pipeline_schedule': '1f1b'}, mesh_of(**mesh), **sizes)
    plan = transformer(options, mesh_of(**mesh), **sizes).plan
    assert plan.pipeline.order == 'interleaved'
    assert 'interleaved: a stage keeps the inputs of' in plan.reasons['pipeline']


@pytest.mark.parametrize(
    ('save', 'micro_batches', 'order', 'reason'),
    [
        ('none', 8, '1f1b', '1f1b: a stage keeps 3 inputs of chunks, interleaved 9 (model.save=none)'),
        ('all', 8, 'interleaved', 'the activations of 9 chunks (1f1b recomputes them from 3 inputs: model.save=none)'),
    ],
)
def test_the_schedule_is_chosen_by_what_is_kept(save, micro_batches, order, reason):
    plan = transformer(LLAMA | FOUR | {'save': save}, mesh_of(p=2), micro_batches=micro_batches).plan
    assert (plan.pipeline.order, reason in plan.reasons['pipeline']) == (order, True), plan.reasons['pipeline']


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
