"""Compiled programs, read and compared with figures counted by hand and with formulas.

`programs/` contains steps of a model of d_model 64, 2 heads of 32, feed-forward 192 and a vocabulary of 512, on 8
sequences of 256 tokens, as XLA wrote them: for four CPU devices and four TPUs (mesh.d=2 mesh.t=2, two layers in a
loop), and for one H200 (one layer). They are files of `pretrax compile CONFIG --graph FILE.txt.gz [--topology v5e:2x2 |
h200]` without the options of the backends.
"""

import gzip
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pretrax.hlo.parse import collectives, summarize
from pretrax.hlo.program import parse_program

PROGRAMS = Path(__file__).parent / 'programs'
TOKENS, LENGTH, M, F, V = 2048, 256, 64, 192, 512
LAYER, HEAD = 4 * M**2 + 3 * M * F, V * M  # parameters in products


def text_of(name: str) -> str:
    return gzip.decompress((PROGRAMS / f'{name}.hlo.txt.gz').read_bytes()).decode()


# A loop of three iterations whose body has a product in a fusion and a copy without a name of its own.
LOOP = """\
HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/.venv/lib/python3.13/site-packages/jax/_src/numpy/einsum.py"
2 "/home/me/project/src/pretrax/model/mlp.py"

FunctionNames
1 "einsum"
2 "feed_forward"

FileLocations
1 {file_name_id=1 function_name_id=1 line=700 end_line=700 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=23 end_line=23 column=1 end_column=2}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}

%contents (a: bf16[8,16], b: bf16[16,32]) -> f32[8,32] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = bf16[16,32]{1,0} parameter(1)
  %dot.1 = bf16[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/gradients/jvp()/while/body/block/feed_forward/ab,bc->ac/dot_general" stack_frame_id=2}
  ROOT %convert.1 = f32[8,32]{1,0} convert(%dot.1), metadata={op_name="jit(step)/gradients/jvp()/while/body/block/norm/convert" stack_frame_id=1}
}

%body (s: (s32[], bf16[8,16], bf16[16,32])) -> (s32[], bf16[8,16], bf16[16,32]) {
  %s = (s32[], bf16[8,16]{1,0}, /*index=2*/bf16[16,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[8,16]{1,0} get-tuple-element(%s), index=1
  %w = bf16[16,32]{1,0} get-tuple-element(%s), index=2
  %copy.1 = bf16[8,16]{0,1} copy(%x)
  %fused = f32[8,32]{1,0} fusion(%copy.1, %w), kind=kOutput, calls=%contents
  ROOT %t = (s32[], bf16[8,16]{1,0}, bf16[16,32]{1,0}) tuple(%i, %x, %w)
}

%condition (s.1: (s32[], bf16[8,16], bf16[16,32])) -> pred[] {
  %s.1 = (s32[], bf16[8,16]{1,0}, bf16[16,32]{1,0}) parameter(0)
  %limit = s32[] constant(3)
  %j = s32[] get-tuple-element(%s.1), index=0
  ROOT %lt = pred[] compare(%j, %limit), direction=LT
}

ENTRY %main (state_weights_up.1: bf16[16,32], batch_tokens.1: s32[]) -> f32[] {
  %state_weights_up.1 = bf16[16,32]{1,0} parameter(0)
  %batch_tokens.1 = s32[] parameter(1)
  %zero = bf16[8,16]{1,0} constant({...})
  %all = (s32[], bf16[8,16]{1,0}, bf16[16,32]{1,0}) tuple(%batch_tokens.1, %zero, %state_weights_up.1)
  %loop = (s32[], bf16[8,16]{1,0}, bf16[16,32]{1,0}) while(%all), condition=%condition, body=%body, metadata={op_name="jit(step)/gradients/jvp()/while"}
  %w.1 = bf16[16,32]{1,0} get-tuple-element(%loop), index=2
  ROOT %norm = f32[] fusion(%w.1), kind=kLoop, calls=%sum, metadata={op_name="jit(step)/optimizer/reduce_sum"}
  strange line = that no version writes
  %alien = q7[3,<=4] teleport(%zero, f32[2]{0} %w.1), to=somewhere
}
"""


def test_a_loop_read_by_hand():
    program = parse_program(LOOP)
    found = program.operations
    assert program.name == 'jit_step'
    assert program.turns == {'body': 3}
    assert program.mesh == {'devices': 1}
    fused = found['fused']
    assert (fused.scope, fused.phase) == (('layer', 'feed_forward'), 'forward')  # of the product, not of the conversion
    assert program.source(fused) == 'pretrax/model/mlp.py:23'  # the caller of the library
    assert [frame.line for frame in program.stack(fused)] == [700, 23]
    assert fused.times == 3
    assert fused.flops == 2 * 8 * 16 * 32
    assert (fused.read, fused.written) == (2 * (8 * 16 + 16 * 32), 4 * 8 * 32)
    assert fused.shape == 'f32[8,32]'
    assert [one.name for one in program.contents(fused)] == ['a', 'b', 'dot.1', 'convert.1']
    assert found['copy.1'].scope == ('layer', 'feed_forward')  # of its user
    assert found['state_weights_up.1'].phase == 'input'
    assert found['state_weights_up.1'].scope == ('weights',)
    assert found['norm'].phase == 'update'
    assert {one.name for one in program.kernels()} >= {'fused', 'copy.1', 'norm'}
    assert not {'dot.1', 'lt', 'loop', 'x'} & {one.name for one in program.kernels()}
    assert program.flops == 3 * 2 * 8 * 16 * 32


ASYNCHRONOUS = """\
HloModule jit_step, is_scheduled=true, num_partitions=2

%scatter (p: f32[8]) -> f32[4] {
  %p = f32[8]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%p), channel_id=1, replica_groups={{0,1}}, dimensions={0}, to_apply=%sum
}

ENTRY %main (x: f32[4], y: f32[8]) -> f32[8] {
  %x = f32[4]{0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %gather-start = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), channel_id=2, replica_groups={{0,1}}, dimensions={0}
  %scatter-start = ((f32[8]{0}), f32[4]{0}) async-start(%y), calls=%scatter
  %copy-start = (f32[8]{0:S(5)}, f32[8]{0}, u32[]) copy-start(%y)
  %copy-done = f32[8]{0:S(5)} copy-done(%copy-start)
  %scatter-done = f32[4]{0} async-done(%scatter-start), calls=%scatter
  ROOT %gather-done = f32[8]{0} all-gather-done(%gather-start)
}
"""


def test_an_asynchronous_operation_counts_once_with_what_it_reads_and_writes():
    program = parse_program(ASYNCHRONOUS)
    assert {one.name: (one.read, one.written) for one in program.kernels()} == {
        'gather-start': (4 * 4, 8 * 4),
        'scatter-start': (8 * 4, 4 * 4),
        'copy-start': (8 * 4, 8 * 4),
    }
    assert {one.name: one.collective.bytes for one in program.kernels() if one.collective} == {
        'gather-start': 8 * 4, 'scatter-start': 8 * 4,
    }  # fmt: skip
    without_devices = parse_program(ASYNCHRONOUS.replace(', num_partitions=2', ''))  # a part of a dump, say
    assert without_devices.operations['gather-start'].collective.axes == ('devices',)


# 6 FLOPs per parameter and token, and 3 times the two products of attention: each block of 128 queries with the keys up
# to it.
BLOCKS = 128 * 128 + 128 * 256
ATTENTION = 3 * 2 * 2 * M * BLOCKS * (TOKENS // LENGTH)


def test_flops_of_a_tpu_step_are_those_of_the_formula():
    """XLA for TPUs writes products as convolutions, whose padding does not count."""
    program = parse_program(text_of('tpu'))
    assert program.flops == (6 * (2 * LAYER + HEAD) * TOKENS + 2 * ATTENTION) / 4  # devices


def test_flops_of_a_cpu_step_are_those_of_the_formula_and_of_one_recomputed_product():
    program = parse_program(text_of('cpu'))
    by_phase = dict.fromkeys(('forward', 'recomputation', 'backward', 'update', 'input'), 0.0)
    for one in program.kernels():
        by_phase[one.phase] += one.flops * one.times
    scores = 2 * ATTENTION / 6 / 4  # one of six products of attention
    assert by_phase['recomputation'] == scores
    assert by_phase['forward'] == by_phase['backward'] / 2 == (2 * (2 * LAYER + HEAD) * TOKENS + 2 * ATTENTION / 3) / 4
    assert by_phase['update'] == by_phase['input'] == 0


def test_flops_of_a_gpu_step_are_those_of_the_formula():
    program = parse_program(text_of('gpu'))
    causal_half = TOKENS * LENGTH * M / 2
    fused = (2 + 5) * 2 * causal_half  # Dao 2023: the backward pass has five products
    assert program.flops == 6 * (LAYER + HEAD) * TOKENS + fused


def test_flops_are_those_of_the_cost_analysis_of_xla():
    def f(x, w):
        return jnp.einsum('abc,cde->abde', x, w)

    compiled = jax.jit(f).lower(jnp.ones((4, 8, 16)), jnp.ones((16, 3, 5))).compile()
    assert parse_program(compiled.as_text()).flops == compiled.cost_analysis()['flops'] == 2 * 4 * 8 * 16 * 3 * 5


@pytest.mark.parametrize('name', ['cpu', 'gpu', 'tpu'])
def test_kernels_have_a_scope_a_source_and_traffic(name):
    program = parse_program(text_of(name))
    kernels = list(program.kernels())
    products = [one for one in kernels if one.flops]
    assert {scope for one in kernels for scope in one.scope} >= {
        'attention',
        'feed_forward',
        'norm',
        'optimizer',
        'unembedding',
    }
    assert all(one.scope for one in products)
    assert all('.py:' in program.source(one) for one in products)
    assert {one.phase for one in products} == {'forward', 'backward'} | (set() if name == 'gpu' else {'recomputation'})
    assert sum(one.scope != () for one in kernels) > 0.95 * len(kernels)
    assert all(one.read >= 0 and one.written >= 0 for one in kernels)


@pytest.mark.parametrize('name', ['cpu', 'tpu'])
def test_collectives_of_operations_are_those_of_the_summary(name):
    text = text_of(name)
    program = parse_program(text)
    assert program.mesh == {'r': 1, 'd': 2, 'e': 1, 'c': 1, 't': 2, 'p': 1}
    assert sorted(program.turns.values()) == [2, 2]  # the layers, forward and backward
    inside = [one for body in program.computations.values() for one in body if one.collective and not one.calls]
    assert summarize([one.collective for one in inside]) == summarize(collectives(text, program.mesh))


def test_nonsense_is_an_empty_program():
    for text in ('', 'HloModule', 'ENTRY %main {\n  %a = \n  = b\n  %c = f32[2]{0} while(%c), body=\n}\n', '\x00 = {'):
        assert parse_program(text).flops == 0
