"""The groups of a program's picture, against programs whose structure is known."""

import gzip
from collections import Counter
from pathlib import Path

import pytest

from pretrax.hlo.parse import collectives
from pretrax.hlo.program import parse_program
from pretrax.view.program.graph import Group, communication_name, edges_of, groups_of

PROGRAMS = Path(__file__).parents[2] / 'hlo' / 'programs'


def text_of(name: str) -> str:
    return gzip.decompress((PROGRAMS / f'{name}.hlo.txt.gz').read_bytes()).decode()


# a -> exp -> (loop of five: i + 1, sin) -> neg. The loop carries (i, x); u is passed on unchanged.
LOOP = """\
HloModule jit_step

%body (s: (s32[], f32[8], f32[4])) -> (s32[], f32[8], f32[4]) {
  %s = (s32[], f32[8]{0}, f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %u = f32[4]{0} get-tuple-element(%s), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one), metadata={op_name="jit(step)/gradients/jvp()/while/body/add"}
  %view = f32[8]{0} bitcast(%x)
  %sin = f32[8]{0} sine(%view), metadata={op_name="jit(step)/gradients/jvp()/while/body/block/attention/sin"}
  ROOT %t = (s32[], f32[8]{0}, f32[4]{0}) tuple(%next, %sin, %u)
}

%condition (s.1: (s32[], f32[8], f32[4])) -> pred[] {
  %s.1 = (s32[], f32[8]{0}, f32[4]{0}) parameter(0)
  %limit = s32[] constant(5)
  %j = s32[] get-tuple-element(%s.1), index=0
  ROOT %lt = pred[] compare(%j, %limit), direction=LT
}

ENTRY %main (batch_a.1: f32[8], state_weights_u.1: f32[4]) -> (f32[8], f32[4]) {
  %batch_a.1 = f32[8]{0} parameter(0)
  %state_weights_u.1 = f32[4]{0} parameter(1)
  %zero = s32[] constant(0)
  %exp = f32[8]{0} exponential(%batch_a.1), metadata={op_name="jit(step)/gradients/jvp(embed)/exp"}
  %all = (s32[], f32[8]{0}, f32[4]{0}) tuple(%zero, %exp, %state_weights_u.1)
  %loop = (s32[], f32[8]{0}, f32[4]{0}) while(%all), condition=%condition, body=%body, metadata={op_name="jit(step)/gradients/jvp()/while"}
  %y = f32[8]{0} get-tuple-element(%loop), index=1
  %v = f32[4]{0} get-tuple-element(%loop), index=2
  %neg = f32[8]{0} negate(%y), metadata={op_name="jit(step)/gradients/jvp(loss)/neg"}
  %log = f32[4]{0} log(%v), metadata={op_name="jit(step)/optimizer/log"}
  ROOT %out = (f32[8]{0}, f32[4]{0}) tuple(%neg, %log)
}
"""


def names(group: Group) -> dict:
    """Names of groups and operations as nested dictionaries."""
    return {inner.name: names(inner) for inner in group.groups.values()} | {one.name: None for one in group.operations}


def test_the_groups_of_a_loop():
    assert names(groups_of(parse_program(LOOP))) == {
        'inputs': {'batch': {'batch_a.1': None}, 'weights': {'state_weights_u.1': None}},
        'forward': {
            'embedding': {'exp': None},
            'layer × 5': {'attention': {'sin': None}, 'next': None},
            'loss': {'neg': None},
        },
        'update / optimizer': {'log': None},
    }


def test_edges_pass_through_tuples_views_and_loops():
    found = {(edge.source, edge.target, edge.type, edge.bytes) for edge in edges_of(parse_program(LOOP))}
    assert found == {
        ('batch_a.1', 'exp', 'f32[8]', 32),
        ('exp', 'sin', 'f32[8]', 32),
        ('sin', 'neg', 'f32[8]', 32),
        ('state_weights_u.1', 'log', 'f32[4]', 16),  # the loop does not change it
    }


@pytest.mark.parametrize('name', ['cpu', 'gpu', 'tpu'])
def test_totals_of_the_whole_are_those_of_the_program(name):
    text = text_of(name)
    program = parse_program(text)
    root = groups_of(program)
    shown = list(root.everything())
    assert len({one.name for one in shown}) == len(shown)
    assert {one.name for one in program.kernels()} <= {one.name for one in shown}
    assert root.flops == program.flops
    assert root.kernels == sum(one.times for one in program.kernels())
    expected: Counter[str] = Counter()
    for one in collectives(text, program.mesh):
        expected[f'{one.kind} over {" ".join(one.axes)}'] += one.times * one.bytes
    assert root.communication == expected
    by_operation: Counter[str] = Counter()
    for one in shown:
        if one.collective:
            by_operation[communication_name(one)] += one.times * one.collective.bytes
    assert by_operation == expected


@pytest.mark.parametrize('name', ['cpu', 'tpu'])
def test_layers_in_a_loop_are_one_box_forward_and_one_backward(name):
    root = groups_of(parse_program(text_of(name)))
    for phase in ('forward', 'backward'):
        layers = [group for group in root.groups[phase].groups.values() if group.turns > 1]
        assert [group.name for group in layers] == ['layer × 2']
    (backward,) = [group for group in root.groups['backward'].groups.values() if group.turns > 1]
    assert 'recomputation' in {group.name for group in backward.groups.values()}


def test_a_loop_of_micro_batches_contains_both_passes():
    text = LOOP.replace('/body/add"', '/body/gradients/transpose(jvp(loss))/add"')
    assert names(groups_of(parse_program(text)))['micro-batches × 5'] == {
        'backward / loss': {'next': None}, 'forward / layer / attention': {'sin': None},
    }  # fmt: skip
