"""What is read from a compiled program, against programs whose communication is counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pretrax.hlo.parse import Collective, collectives, summarize

MESH = {'r': 2, 'd': 2, 't': 2}


def test_collectives_of_a_loop_by_kind_axes_bytes_and_times():
    mesh = jax.make_mesh((2, 2, 2), tuple(MESH), axis_types=(AxisType.Auto,) * 3)

    def program(x):  # a device has f32[4, 16]
        def layer(y, _):
            whole = jax.lax.all_gather(y, 'd', axis=0, tiled=True)  # f32[8, 16]: 512 bytes, three times
            return jax.lax.psum_scatter(jnp.tanh(whole), 'd', scatter_dimension=0, tiled=True), None  # takes 512 bytes

        y, _ = jax.lax.scan(layer, x, None, length=3)
        y = jnp.tanh(jax.lax.ppermute(y, 't', [(0, 1), (1, 0)]))  # 256 bytes
        y = jax.lax.all_to_all(y, 't', 1, 0, tiled=True)  # 256 bytes
        return jax.lax.psum(jnp.sum(y * y, axis=1), ('r', 't'))  # f32[8]: 32 bytes

    mapped = jax.shard_map(program, mesh=mesh, in_specs=P('d'), out_specs=P('d'), check_vma=False)
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P('d')))
    found = summarize(collectives(jax.jit(mapped).lower(x).compile().as_text(), MESH))
    assert sorted(found) == [
        ('all-gather', ('d',), 3, 3 * 512, 0),
        ('all-reduce', ('r', 't'), 1, 32, 0),
        ('all-to-all', ('t',), 1, 256, 0),
        ('collective-permute', ('t',), 1, 256, 0),
        ('reduce-scatter', ('d',), 3, 3 * 512, 0),
    ]


def test_a_program_of_one_device_has_none():
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).compile()
    assert collectives(compiled.as_text(), dict.fromkeys(MESH, 1)) == []


# How XLA writes an asynchronous gather for a TPU: a fusion that begins it, one that works meanwhile, and one that ends
# it.
TPU = """\
HloModule jit_step

%begin (p: bf16[128,64]) -> (bf16[128,64], bf16[512,64]) {
  %p = bf16[128,64]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[512,64]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, use_global_device_ids=true
  ROOT %start = (bf16[128,64]{1,0}, bf16[512,64]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%meanwhile (p.1: bf16[128,64]) -> bf16[512,64] {
  %p.1 = bf16[128,64]{1,0} parameter(0)
  %all-gather.2 = bf16[512,64]{1,0} all-gather(%p.1), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  ROOT %work = bf16[512,64]{1,0} add(%all-gather.2, %all-gather.2)
}

%condition (s: (s32[], bf16[128,64])) -> pred[] {
  %s = (s32[], bf16[128,64]{1,0}) parameter(0)
  %limit = s32[]{:T(128)} constant(24)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%body (s.1: (s32[], bf16[128,64])) -> (s32[], bf16[128,64]) {
  %s.1 = (s32[], bf16[128,64]{1,0}) parameter(0)
  %x = bf16[128,64]{1,0} get-tuple-element(%s.1), index=1
  %f = (bf16[128,64]{1,0}, bf16[512,64]{1,0}) fusion(%x), kind=kCustom, calls=%begin
  %g = bf16[512,64]{1,0} fusion(%x), kind=kOutput, calls=%meanwhile
  ROOT %t = (s32[], bf16[128,64]{1,0}) tuple(%x, %x)
}

ENTRY %main (a: bf16[128,64]) -> bf16[128,64] {
  %a = bf16[128,64]{1,0} parameter(0)
  %loop = (s32[], bf16[128,64]{1,0}) while(%a), condition=%condition, body=%body
  %r = f32[8]{0} all-reduce(%a), replica_groups=mesh['d'=4,'t'=2] {'d','t'}, to_apply=%add
  ROOT %out = bf16[128,64]{1,0} get-tuple-element(%loop), index=1
}
"""


# How XLA writes a sum over two slices: the hosts send it and add it up.
SLICES = """\
ENTRY %main (a: f32[256,8]) -> f32[256,8] {
  %a = f32[256,8]{1,0} parameter(0)
  %after-all = token[] after-all()
  %send = (f32[256,8]{1,0:T(8,128)}, u32[]{:S(2)}, token[]) send(%a, %after-all), channel_id=22, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[256,8]{1,0:T(8,128)}, u32[]{:S(2)}, token[]) recv(%after-all), channel_id=21, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %sent = token[] send-done(%send), channel_id=22, is_host_transfer=true
  %received = (f32[256,8]{1,0}, token[]) recv-done(%recv), channel_id=21, is_host_transfer=true
  ROOT %out = f32[256,8]{1,0} get-tuple-element(%received), index=0
}
"""


@pytest.mark.parametrize(
    ('groups', 'axes'),
    [
        ("mesh['d'=4,'t'=2] {'t'}", ('t',)),
        ("mesh['axis_0'=8] {'axis_0'}", ('d', 't')),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ('d',)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ('t',)),
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_0','axis_2'}", ('d', 't')),
    ],
)
def test_the_axes_of_a_mesh_that_xla_made_itself(groups, axes):
    """XLA writes such groups for programs with automatic sharding."""
    program = f"""\
ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} all-reduce(%a), replica_groups={groups}, to_apply=%add
}}
"""
    assert [found.axes for found in collectives(program, {'d': 4, 't': 2})] == [axes]


def test_a_sum_over_tpu_slices_counts_once_and_as_overlapped():
    assert collectives(SLICES, {'r': 2, 'd': 4}) == [Collective('all-reduce', ('r',), 256 * 8 * 4, 1, True)]


# How XLA writes a scattered sum for a TPU: a fusion that adds up what is padded to whole tiles, and keeps a slice.
SCATTER = """\
HloModule jit_step

%all-reduce-scatter.4 (input: bf16[2048,64]) -> bf16[528,64] {
  %input = bf16[2048,64]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %zero = bf16[] constant(0)
  %pad.72 = bf16[2112,64]{1,0:T(8,128)(2,1)} pad(%input, %zero), padding=0_64x0_0
  %all-reduce.32 = bf16[2112,64]{1,0:T(8,128)(2,1)} all-reduce(%pad.72), channel_id=49, replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true, to_apply=%add
  %at = u32[] constant(0)
  ROOT %slice = bf16[528,64]{1,0} dynamic-slice(%all-reduce.32, %at, %at), dynamic_slice_sizes={528,64}
}

ENTRY %main (a: bf16[2048,64]) -> bf16[528,64] {
  %a = bf16[2048,64]{1,0} parameter(0)
  ROOT %f = bf16[528,64]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.4
}
"""


def test_a_reduce_scatter_of_a_tpu_is_recognized():
    assert collectives(SCATTER, {'d': 4, 't': 2}) == [Collective('reduce-scatter', ('d',), 2112 * 64 * 2, 1, False)]


def test_an_asynchronous_gather_of_a_tpu_counts_once_per_iteration():
    assert collectives(TPU, {'d': 4, 't': 2}) == [
        Collective('all-gather', ('d',), 512 * 64 * 2, 24, True),
        Collective('all-reduce', ('d', 't'), 32, 1, False),
    ]


def test_a_loop_whose_first_iteration_runs_before_it_counts_one_less():
    """XLA does so to send a sum between slices while the next iteration runs."""
    peeled = """\
  %one = s32[]{:T(128)} constant(1)
  %first = s32[]{:T(128)} copy(%one)
  %start = (s32[], bf16[128,64]{1,0}) tuple(%first, %a)
  %loop = (s32[], bf16[128,64]{1,0}) while(%start)"""
    text = TPU.replace('  %loop = (s32[], bf16[128,64]{1,0}) while(%a)', peeled)
    assert [one.times for one in collectives(text, {'d': 4, 't': 2}) if one.kind == 'all-gather'] == [23]
