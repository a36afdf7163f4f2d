"""Experts: rows and bytes by hand, and against traced and compiled steps."""

import math
import re

import jax
import pytest

from decoders import gpt
from pretrax.config import from_values
from pretrax.cost.experts import rows_of_experts
from pretrax.cost.roofline import predict
from pretrax.cost.step_facts import StepFacts
from pretrax.cost.topology import parse_topology
from pretrax.hlo.parse import collectives
from pretrax.run.setup import prepare, step_facts
from pretrax.train.step import make_step

WIDTH, D_FF = 64, 192
MIXTURE = {
    'family': 'mixtral', 'n_layers': 2, 'd_model': WIDTH, 'attention': {'n_heads': 4, 'n_kv_heads': 2},
    'feed_forward': {'d_ff': D_FF}, 'experts': {'n_experts': 8, 'experts_per_token': 2},
}  # fmt: skip


def mixture(**changes):
    return gpt(**{'n_experts': 8, 'experts_per_token': 2, 'd_ff': D_FF, 'family': 'mixtral'} | changes)


def run_on(mesh, **experts):
    """A run of the small mixture with 128 tokens per sequence, 2 sequences per device."""
    n = math.prod(mesh.values())
    values = {
        'name': 'experts', 'steps': 3, 'data': {'name': 'synthetic', 'vocab_size': 256}, 'mesh': mesh,
        'batch': {'tokens': 256 * n, 'sequence_length': 128}, 'optimizer': {'learning_rate': 1e-3},
        'model': MIXTURE | {'save': 'none', 'experts': MIXTURE['experts'] | experts},
    }  # fmt: skip
    return prepare(from_values(values), lambda text: None, jax.devices()[:n])


def rows_of(run):
    return rows_of_experts(run.recipe.model.arch, step_facts(run), 128)


def products_of(jaxpr, times=1):
    """(shapes of the operands, how often) of the products of a jaxpr."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'dot_general':
            yield tuple(x.aval.shape for x in equation.invars), times
        turns = times * equation.params['length'] if equation.primitive.name == 'scan' else times
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')):
            below = getattr(part, 'jaxpr', part)
            if hasattr(below, 'eqns'):
                yield from products_of(below, turns)


def test_rows_in_blocks_after_an_exchange_are_those_counted_by_hand():
    """T = 1024 and k = 2, so C = 2048, an even load of 512 for each of 4 devices. A quarter more: 640."""
    rows = rows_of_experts(mixture(), StepFacts({'e': 4}, 4096, platform='cuda', saved={}), 1024)
    assert (rows.choices, rows.sent) == (2048, 4 * 640)
    # 2560 slots for two experts: blocks of 256; 10 of them, one more for each of the two, and for the empty slots
    assert (rows.block, rows.slots, rows.multiplied) == (256, 12 * 256, 12 * 256)
    # into the order of devices and of experts, forward, again, and for gradients; and back, forward and for gradients
    there, back = 2048 + 2560 + 2560 + 3072, 3072 + 2560 + 2048 + 1024
    assert rows.moved == 3 * there + 2 * back


def test_ragged_rows_are_the_choices_and_a_tile_for_each_border():
    """XLA's program for Ironwood has 383 steps of 256 rows for 65,536 rows of 128 experts."""
    many = mixture(n_experts=128, experts_per_token=8)
    rows = rows_of_experts(many, StepFacts({'d': 8}, 8 * 8192, platform='tpu'), 4096)
    assert (rows.choices, rows.slots, rows.sent) == (65536, 65536, 0)
    assert rows.multiplied == 383 * 256


@pytest.mark.parametrize('capacity', [None, 1.25])
def test_rows_are_those_that_the_traced_step_multiplies(capacity, monkeypatch):
    for module in ('model.plan', 'cost.experts'):  # as on GPUs, where each block is a product
        monkeypatch.setattr(f'pretrax.{module}.choose_grouped', lambda *_: ('blocks', 'as on GPUs'))
    run = run_on({'d': 2}, capacity=capacity)
    with jax.set_mesh(run.mesh):
        jaxpr = jax.make_jaxpr(make_step(run.recipe))(run.like, run.abstract_batch())
    down = [
        math.prod(x) // D_FF * times
        for operands, times in products_of(jaxpr.jaxpr)
        for w, x in (operands, operands[::-1])
        if x[-1] == D_FF and w[-2:] == (D_FF, WIDTH)
    ]
    assert sum(down) == 2 * rows_of(run).multiplied  # of two layers


def test_slots_are_those_of_the_rows_that_a_cpu_multiplies():
    run = run_on({'d': 2})
    with jax.set_mesh(run.mesh):
        jaxpr = jax.make_jaxpr(make_step(run.recipe))(run.like, run.abstract_batch())
    filled = re.findall(rf'\[(\d+),{D_FF}\]\S* = dynamic_update_slice', str(jaxpr))
    assert set(map(int, filled)) == {rows_of(run).slots}


@pytest.mark.parametrize('capacity', [None, 1.25])
def test_bytes_over_e_are_those_of_the_compiled_step(capacity):
    """Of two layers, which send rows five times; not weights and numbers, four bytes a row. The CPU computes in f32."""
    run = run_on({'e': 4}, capacity=capacity)
    with jax.set_mesh(run.mesh):
        compiled = jax.jit(make_step(run.recipe)).lower(run.like, run.abstract_batch()).compile()
    text = compiled.as_text()
    assert text is not None
    found = [one for one in collectives(text, dict(run.mesh.shape)) if one.kind == 'all-to-all']
    rows = rows_of(run)
    sent = sum(one.bytes * one.times for one in found if one.bytes > 4 * rows.sent)
    assert sent == rows.exchanges * 2 * rows.sent * WIDTH * 4


def test_more_tokens_for_each_expert_raise_the_efficiency():
    for platform in ('h100x8', 'v5p:2x2x2'):
        hardware = parse_topology(platform, 1)
        each = [
            predict(
                mixture(d_model=2048, d_ff=1024), 10**9, 0, StepFacts({'d': 8}, n, platform=hardware.platform), hardware
            )
            .phases[0]
            .seconds
            / n
            for n in (2**12, 2**15, 2**18)
        ]
        assert each[0] > 1.2 * each[1] > 1.2 * each[2]
