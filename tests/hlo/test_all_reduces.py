"""What all-reduces stand for, in small programs written like those of XLA for TPUs."""

import pytest

from pretrax.hlo.all_reduces import stands_for
from pretrax.hlo.parse import computations_of

PROGRAM = """\
HloModule step

%pad (part: bf16[4,8], into: bf16[32,8], at: s32[]) -> bf16[32,8] {
  %part = bf16[4,8]{1,0} parameter(0)
  %into = bf16[32,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %padded = bf16[32,8]{1,0} dynamic-update-slice(%into, %part, %at, %zero)
}

ENTRY %main (w: bf16[4,8], other: bf16[32,8], at: s32[]) -> bf16[32,8] {
  %w = bf16[4,8]{1,0} parameter(0)
  %other = bf16[32,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %none = bf16[] constant(0)
  %zeros = bf16[32,8]{1,0} broadcast(%none), dimensions={}
  %full = bf16[32,8]{1,0} fusion(%w, INTO, %at), kind=kLoop, calls=%pad
  %sum = bf16[32,8]{1,0} all-reduce(%full), replica_groups={}, to_apply=%add
  %first = s32[] constant(0)
  ROOT %out = USE
}
"""
WHOLE = 'bf16[32,8]{1,0} copy(%sum)'
SLICE = 'bf16[4,8]{1,0} dynamic-slice(%sum, %at, %first), dynamic_slice_sizes={4,8}'


@pytest.mark.parametrize(
    ('into', 'use', 'expected'),
    [
        ('%zeros', WHOLE, 'gather'),  # every device adds its slice to zeros
        ('%other', WHOLE, ''),  # the rest is another array, which is summed too
        ('%other', SLICE, 'scatter'),
    ],
)
def test_what_an_all_reduce_stands_for(into, use, expected):
    computations = computations_of(PROGRAM.replace('INTO', into).replace('USE', use))
    body = computations['ENTRY']
    start = next(one for one in body if one.operation == 'all-reduce')
    assert stands_for(start, 'sum', body, computations) == expected
