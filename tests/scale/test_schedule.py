"""Communication of scheduled programs: small ones written by hand, and real ones that were read by hand."""

import pytest

from pretrax.scale.schedule import read_schedule
from pretrax.scale.topology import parse_topology

H100 = parse_topology('h100x8')
NVLINK = 450e9
GATHER = (7 / 8) * 8 * 1024 * 4096 * 2 / NVLINK  # seconds of a gather of bf16[8192,4096] in a ring of eight


# Seconds of the product bf16[8192,4096] by bf16[4096,4096] at 79 % of the peak.
PRODUCT = 2 * 8192 * 4096 * 4096 / (0.79 * 989.4e12)


def program(entry: str, rest: str = '') -> str:
    return f"""\
HloModule jit_step, is_scheduled=true

{rest}
ENTRY %main (w: bf16[1024,4096], v: bf16[1024,4096], x: bf16[8192,4096], k: bf16[4096,4096]) -> bf16[8192,4096] {{
  %w = bf16[1024,4096]{{1,0}} parameter(0)
  %v = bf16[1024,4096]{{1,0}} parameter(1)
  %x = bf16[8192,4096]{{1,0}} parameter(2)
  %k = bf16[4096,4096]{{1,0}} parameter(3)
{entry}
}}
"""


def start(name: str, operand: str) -> str:
    return (
        f'  %{name} = (bf16[1024,4096]{{1,0}}, bf16[8192,4096]{{1,0}}) all-gather-start(%{operand}), channel_id=1, '
        'replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true'
    )


def done(name: str, of: str) -> str:
    return f'  %{name} = bf16[8192,4096]{{1,0}} all-gather-done(%{of})'


def dot(name: str) -> str:
    return f'  %{name} = bf16[8192,4096]{{1,0}} dot(%x, %k), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}'


def read(*lines: str, rest: str = '', mesh=None):
    return read_schedule(program('\n'.join(lines), rest), mesh or {'d': 8}, H100)


def test_a_collective_that_nothing_runs_beside_is_exposed():
    schedule = read(start('s', 'w'), done('g', 's'), dot('y'))
    assert schedule.compute == pytest.approx(PRODUCT)
    assert schedule.seconds == pytest.approx(GATHER)
    assert schedule.exposed == pytest.approx(GATHER)


def test_work_between_start_and_end_hides_a_collective():
    assert PRODUCT > GATHER
    (one,) = read(start('s', 'w'), dot('y'), done('g', 's')).transfers
    assert (one.kind, one.axes, one.form, one.times) == ('all-gather', ('d',), 'start, done', 1)
    assert one.bytes == 7 * 1024 * 4096 * 2
    assert one.seconds == pytest.approx(GATHER)
    assert one.exposed == 0


def test_two_collectives_on_the_same_links_share_the_work():
    """Both take longer than the product, so what it does not hide of both together is exposed."""
    many = [f's{n}' for n in range(4)]
    schedule = read(*(start(s, 'w') for s in many), dot('y'), *(done(f'g{s}', s) for s in many))
    assert 4 * GATHER > PRODUCT
    assert schedule.exposed == pytest.approx(4 * GATHER - PRODUCT)


def test_a_synchronous_collective_is_exposed_although_work_follows():
    line = (
        '  %g = bf16[8192,4096]{1,0} all-gather(%w), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, '
        'use_global_device_ids=true'
    )
    (one,) = read(line, dot('y')).transfers
    assert (one.form, one.exposed) == ('waits', pytest.approx(GATHER))
