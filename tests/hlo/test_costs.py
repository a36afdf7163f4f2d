"""Costs by phase, of a program written as XLA writes one for an NVIDIA GPU, with FLOPs and bytes counted by hand."""

import ast
from pathlib import Path

import pytest

from pretrax.cost.devices import lookup
from pretrax.hlo.costs import ASSUMED, PHASES, costs

PROGRAM = """\
HloModule jit_step, is_scheduled=true

FileNames
1 "step.py"
2 "transformer.py"

FunctionNames
1 "make_step.<locals>.step"
2 "Transformer.loss"
3 "attention"
4 "product"
5 "typechecked.<locals>.checked"
6 "attend"
7 "unroll"

FileLocations
1 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=9 end_line=9 column=1 end_column=2}
3 {file_name_id=2 function_name_id=3 line=9 end_line=9 column=1 end_column=2}
4 {file_name_id=2 function_name_id=4 line=9 end_line=9 column=1 end_column=2}
5 {file_name_id=2 function_name_id=6 line=9 end_line=9 column=1 end_column=2}
6 {file_name_id=2 function_name_id=7 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=6 parent_frame_id=3}
4 {file_location_id=3 parent_frame_id=4}
5 {file_location_id=4 parent_frame_id=5}
6 {file_location_id=5 parent_frame_id=5}

%taken (p.0: f32[24,64,128], p.1: s32[]) -> bf16[64,128] {
  %p.0 = f32[24,64,128]{2,1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %one = f32[1,64,128]{2,1,0} dynamic-slice(%p.0, %p.1, %p.1, %p.1), dynamic_slice_sizes={1,64,128}
  ROOT %rounded = bf16[64,128]{1,0} convert(%one)
}

%stored (q.0: f32[24,64,128], q.1: f32[1,64,128], q.2: s32[]) -> f32[24,64,128] {
  %q.0 = f32[24,64,128]{2,1,0} parameter(0)
  %q.1 = f32[1,64,128]{2,1,0} parameter(1)
  %q.2 = s32[] parameter(2)
  ROOT %in_place = f32[24,64,128]{2,1,0} dynamic-update-slice(%q.0, %q.1, %q.2, %q.2, %q.2)
}

ENTRY %main (w: f32[24,64,128], x: bf16[512,64], q: bf16[2,256,2,32], i: s32[], g: f32[1,64,128]) -> f32[24,64,128] {
  %w = f32[24,64,128]{2,1,0} parameter(0)
  %x = bf16[512,64]{1,0} parameter(1)
  %q = bf16[2,256,2,32]{3,2,1,0} parameter(2)
  %i = s32[] parameter(3)
  %g = f32[1,64,128]{2,1,0} parameter(4)
  %weight = bf16[64,128]{1,0} fusion(%w, %i), kind=kLoop, calls=%taken, metadata={op_name="slice" stack_frame_id=3}
  %gather = (bf16[64,128]{1,0}, bf16[512,128]{1,0}) all-gather-start(%weight), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, metadata={op_name="gather" stack_frame_id=4}
  %gathered = bf16[512,128]{1,0} all-gather-done(%gather), metadata={op_name="gather" stack_frame_id=4}
  %y = (bf16[512,128]{1,0}, s8[4194304]{0}) custom-call(%x, %weight), custom_call_target="__cublas$lt$matmul", metadata={op_name="dot" stack_frame_id=5}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %a = (bf16[2,2,256,32]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="attention" stack_frame_id=6}, backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "2", "256", "256"], "tuple_shapes": []}, "mask_type": "CAUSAL"}}
  ROOT %updated = f32[24,64,128]{2,1,0} fusion(%w, %g, %i), kind=kLoop, calls=%stored, metadata={op_name="update" stack_frame_id=1}
}
"""


def test_phases_have_the_flops_and_bytes_of_their_kernels():
    found = {cost.phase: (cost.kernels, cost.flops, cost.bytes) for cost in costs(PROGRAM, lookup('NVIDIA H200'))}
    layer = 64 * 128
    assert found == {  # and nothing of the all-gather, which is no kernel
        'layers taken from their stack': (1, 0, 4 * layer + 4 + 2 * layer),  # one layer of the stack, not all of it
        'products of attention': (1, 2 * 512 * 64 * 128, 2 * (512 * 64 + layer + 512 * 128)),
        'attention': (1, 4 * 2 * 2 * 256 * 256 * 32 / 2, 4 * 2 * 2 * 256 * 2 * 32),
        'optimizer': (1, 0, 4 * layer + 4 * layer + 4),  # one layer is read and written, the rest stays
    }


def test_a_kernel_takes_as_long_as_the_slower_of_its_work_and_its_traffic():
    device = lookup('NVIDIA H200')
    by_phase = {cost.phase: cost.seconds for cost in costs(PROGRAM, device)}
    product = 2 * (512 * 64 + 64 * 128 + 512 * 128) / (0.9 * device.bandwidth)
    assert by_phase['products of attention'] == pytest.approx(product)  # it is small: memory binds
    attention = 4 * 2 * 2 * 256 * 256 * 32 / 2 / (0.52 * device.bf16)
    assert by_phase['attention'] == pytest.approx(max(attention, 4 * 2 * 2 * 256 * 2 * 32 / (0.9 * device.bandwidth)))


def test_every_phase_belongs_to_functions_that_exist():
    """A function that is renamed would move its kernels to another phase, or to none."""
    names = {
        node.name
        for path in (Path(__file__).parents[2] / 'src' / 'pretrax').rglob('*.py')
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert sorted(set(PHASES) - names) == []


@pytest.mark.parametrize(('kernel', 'products'), [('fwd', 2), ('dkv', 4), ('dq', 3)])
def test_attention_kernels_of_tpus_multiply_the_causal_half(kernel, products):
    """`splash_attention` of JAX: scores and values; scores, d values, d scores, d keys; scores, d scores, d queries."""
    queries, keys = 'bf16[2,32,4096,128]{3,2,1,0}', 'bf16[2,8,4096,128]{3,2,1,0}'
    text = (
        f'HloModule m, is_scheduled=true\n\nENTRY %main (p: {queries}) -> {queries} {{\n  %p = {queries} parameter(0)\n'
        f'  ROOT %splash_mha_{kernel}_segmented.1 = {queries} custom-call(%p), custom_call_target="tpu_custom_call", '
        f'operand_layout_constraints={{s8[1,32,32]{{2,1,0}}, {queries}, {keys}, {keys}}}\n}}\n'
    )
    flops = sum(cost.flops for cost in costs(text, lookup('TPU v5')))
    assert flops == products * 2 * (2 * 32) * 4096 * (4096 / 2) * 128


def test_an_update_in_place_may_read_the_slice_that_it_replaces():
    """A gradient of one expert is added to those of all: only its own is read and written."""
    text = """HloModule m, is_scheduled=true

%added (p: f32[8,64,128], q: f32[1,64,128], i: s32[]) -> f32[8,64,128] {
  %p = f32[8,64,128]{2,1,0} parameter(0)
  %q = f32[1,64,128]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %old = f32[1,64,128]{2,1,0} dynamic-slice(%p, %i, %i, %i), dynamic_slice_sizes={1,64,128}
  %new = f32[1,64,128]{2,1,0} add(%old, %q)
  ROOT %all = f32[8,64,128]{2,1,0} dynamic-update-slice(%p, %new, %i, %i, %i)
}

ENTRY %main (p: f32[8,64,128], q: f32[1,64,128], i: s32[]) -> f32[8,64,128] {
  %p = f32[8,64,128]{2,1,0} parameter(0)
  %q = f32[1,64,128]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %sum = f32[8,64,128]{2,1,0} fusion(%p, %q, %i), kind=kLoop, calls=%added
}
"""
    assert sum(cost.bytes for cost in costs(text, lookup('NVIDIA H200'))) == 3 * 4 * 64 * 128 + 4


def test_a_kernel_of_experts_multiplies_each_row_by_one_matrix():
    """Forward, and the gradient of the matrices: 2 N K F for all experts together."""
    x, w, y = 'bf16[96,64]{1,0}', 'bf16[8,64,128]{2,1,0}', 'bf16[96,128]{1,0}'
    text = (
        f'HloModule m, is_scheduled=true\n\nENTRY %main (p: {x}, q: {w}, r: {y}) -> {w} {{\n  %p = {x} parameter(0)\n'
        f'  %q = {w} parameter(1)\n  %r = {y} parameter(2)\n'
        + ''.join(
            f'  {name} = {result} custom-call(%p, {operand}), custom_call_target="__gpu$xla.gpu.triton", '
            'metadata={op_name="jit(f)/experts/pallas_call"}\n'
            for name, result, operand in (('%a', y, '%q'), ('ROOT %b', w, '%r'))
        )
        + '}\n'
    )
    assert sum(cost.flops for cost in costs(text, lookup('NVIDIA H200'))) == 2 * 2 * 96 * 64 * 128


def test_a_product_with_scales_of_blocks_has_the_peak_of_its_format():
    """2 N M K operations; the B200 datasheet has 4.5 PFLOP/s in fp8 and 9 in fp4."""
    for kind, scale, length, peak in (('f8e4m3fn', 'f8e8m0fnu', 32, 4.5e15), ('f4e2m1fn', 'f8e4m3fn', 16, 9e15)):
        x, s = f'{kind}[1,8192,8192]{{2,1,0}}', f'{scale}[1,8192,{8192 // length}]{{2,1,0}}'
        y = '(bf16[1,8192,8192]{2,1,0}, u8[0]{0})'
        text = (
            f'HloModule m, is_scheduled=true\n\nENTRY %main (p: {x}, q: {x}, r: {s}, s: {s}) -> {y} {{\n'
            f'  %p = {x} parameter(0)\n  %q = {x} parameter(1)\n  %r = {s} parameter(2)\n  %s = {s} parameter(3)\n'
            f'  ROOT %y = {y} custom-call(%p, %q, %r, %s), custom_call_target="__cudnn$blockScaledDot"\n}}\n'
        )
        (cost,) = costs(text, lookup('NVIDIA B200'))
        assert cost.flops == 2 * 8192**3
        assert cost.seconds == pytest.approx(cost.flops / (peak * ASSUMED['cuda'].products))
