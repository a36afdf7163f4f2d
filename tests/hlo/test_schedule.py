"""Communication of scheduled programs: small ones written by hand, and real ones that were read by hand."""

import gzip
from pathlib import Path

import pytest

from pretrax.cost.topology import parse_topology
from pretrax.hlo.program import parse_program
from pretrax.hlo.schedule import read_schedule
from pretrax.plan.report import _schedule

PROGRAMS = Path(__file__).parent / 'programs'
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


# An iteration ends the gather that the one before it began, after its own product.
LOOP = """\
%condition (s: (s32[], bf16[1024,4096], (bf16[1024,4096], bf16[8192,4096]))) -> pred[] {
  %s = (s32[], bf16[1024,4096]{1,0}, (bf16[1024,4096]{1,0}, bf16[8192,4096]{1,0})) parameter(0)
  %limit = s32[] constant(24)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%body (b: (s32[], bf16[1024,4096], (bf16[1024,4096], bf16[8192,4096]))) -> (s32[], bf16[1024,4096], (bf16[1024,4096], bf16[8192,4096])) {
  %b = (s32[], bf16[1024,4096]{1,0}, (bf16[1024,4096]{1,0}, bf16[8192,4096]{1,0})) parameter(0)
  %n = s32[] get-tuple-element(%b), index=0
  %own = bf16[1024,4096]{1,0} get-tuple-element(%b), index=1
  %before = (bf16[1024,4096]{1,0}, bf16[8192,4096]{1,0}) get-tuple-element(%b), index=2
  %rows = bf16[8192,4096]{1,0} constant({...})
  %square = bf16[4096,4096]{1,0} constant({...})
  %y = bf16[8192,4096]{1,0} dot(%rows, %square), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %whole = bf16[8192,4096]{1,0} all-gather-done(%before)
  %next = (bf16[1024,4096]{1,0}, bf16[8192,4096]{1,0}) all-gather-start(%own), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  ROOT %t = (s32[], bf16[1024,4096]{1,0}, (bf16[1024,4096]{1,0}, bf16[8192,4096]{1,0})) tuple(%n, %own, %next)
}
"""


def test_a_gather_for_the_next_iteration_is_hidden_by_the_work_of_that_iteration():
    loop = '  %loop = (s32[], bf16[1024,4096]{1,0}) while(%w), condition=%condition, body=%body'
    (one,) = read(loop, rest=LOOP).transfers
    assert (one.times, one.exposed) == (24, 0)
    too_small = LOOP.replace('bf16[8192,4096]{1,0} dot', 'bf16[1,4096]{1,0} dot').replace(
        '%rows = bf16[8192,', '%rows = bf16[1,'
    )
    (one,) = read(loop, rest=too_small).transfers
    assert one.exposed > 0.8 * GATHER


def test_permutes_in_opposite_directions_run_at_the_same_time():
    """Two of bf16[1024,4096] around a ring of 16 TPUs, one each way: together they take as long as one."""

    def program_of(second: str) -> str:
        one_way = ','.join(f'{{{n},{(n + 1) % 16}}}' for n in range(16))
        back = ','.join(f'{{{n},{(n - 1) % 16}}}' for n in range(16))
        starts = '\n'.join(
            f'  %{name} = (bf16[1024,4096]{{1,0}}, bf16[1024,4096]{{1,0}}, u32[], u32[]) collective-permute-start(%w), '
            f'channel_id=1, source_target_pairs={{{back if second == "back" and name == "p2" else one_way}}}'
            for name in ('p1', 'p2')
        )
        ends = '\n'.join(f'  %e{n} = bf16[1024,4096]{{1,0}} collective-permute-done(%p{n})' for n in (1, 2))
        return program(f'{starts}\n{ends}')

    v5e = parse_topology('v5e:16x16')
    seconds = 1024 * 4096 * 2 / 4.5e10
    mesh = {'c': 16, 'd': 16}
    opposite, same = (read_schedule(program_of(second), mesh, v5e).exposed for second in ('back', 'on'))
    assert opposite == pytest.approx(seconds)
    assert same == pytest.approx(2 * seconds)


# The programs of `programs/small_steps.py`: four layers with two gathers and two scattered sums each.
MATRIX = 4096 * 8192 * 2  # bytes of a weight in bf16
ROWS = 2 * 1024


def text_of(name: str) -> str:
    return gzip.decompress((PROGRAMS / f'{name}.hlo.txt.gz').read_bytes()).decode()


def real(name: str, mesh: dict[str, int], topology: str, slices: int = 1):
    return read_schedule(text_of(name), mesh, parse_topology(topology, slices))


def seconds_of_a_product(peak: float) -> float:
    return 2 * ROWS * 4096 * 8192 / peak


def summed(schedule):
    return {(row.kind, row.axes, row.form): (row.times, row.bytes) for row in schedule.rows()}


@pytest.mark.parametrize(
    ('name', 'mesh', 'topology', 'slices'),
    [
        ('v5e', {'d': 256}, 'v5e:16x16', 1),
        ('v5p', {'d': 64}, 'v5p:4x4x4', 1),
        ('v5p_sparse_core', {'d': 64}, 'v5p:4x4x4', 1),
        ('v5e_slices', {'r': 2, 'd': 16}, 'v5e:4x4', 2),
        ('h100', {'d': 8}, 'h100x8', 1),
    ],
)
def test_bytes_of_real_programs_are_those_of_the_formulas(name, mesh, topology, slices):
    """Gathers and scattered sums of eight matrices over d; an all-reduce in place of either sends twice as much."""
    schedule = real(name, mesh, topology, slices)
    share = (mesh['d'] - 1) / mesh['d']
    over_d = [one for one in schedule.transfers if one.axes == ('d',) and one.size > 1e6]
    doubled = sum(one.times * one.bytes for one in over_d if one.kind == 'all-reduce')
    assert sum(one.times * one.bytes for one in over_d) - doubled / 2 == 2 * 8 * MATRIX * share
    products = 4 * 2 * 3 * 2 * ROWS * 4096 * 8192
    device = parse_topology(topology).device
    assert products / device.bf16 < schedule.compute < 2 * products / device.bf16


def test_default_options_of_v5e():
    """One gather of a layer waits, the other runs in a fusion with the product (`%async-collective-start`,
    `%fusion.67`); sums are `%all-reduce.4` and `%all-reduce.5`, of which `%convert_dynamic-update-slice_fusion.4` and
    `.5` take a slice.
    """
    schedule, share = real('v5e', {'d': 256}, 'v5e:16x16'), 255 / 256
    assert summed(schedule) == {
        ('all-reduce', ('d',), 'waits, stands for a scatter'): (8, 8 * 2 * MATRIX * share),
        ('all-gather', ('d',), 'waits'): (4, 4 * MATRIX * share),
        ('all-gather', ('d',), 'in fusions'): (4, 4 * MATRIX * share),
        ('all-reduce', ('d',), 'waits'): (1, 2 * 4 * share),  # the loss
    }
    by_name = {one.name: one for one in schedule.transfers}
    # "StrategyND{colors:2": two rings in both directions; "1DAllGather...": one.
    assert by_name['all-reduce.4'].seconds == pytest.approx(2 * MATRIX * share / (4 * 4.5e10))
    assert by_name['all-gather.20'].seconds == pytest.approx(MATRIX * share / (2 * 4.5e10))
    # The gather in a fusion takes 743 us, the product in it 758 us.
    hidden = next(one for one in schedule.transfers if one.form == 'in fusions')
    assert hidden.exposed == 0 < hidden.seconds < seconds_of_a_product(0.92 * 197e12)
    assert schedule.exposed == pytest.approx(schedule.seconds - 4 * hidden.seconds)


def test_a_fusion_with_a_collective_moves_only_the_arrays_of_its_own_work():
    """`%fusion.67` reads x and `%all-gather.20`, and writes tanh twice into stacks and once for the next product; what
    the gather in it needs passes through.
    """
    step = parse_program(text_of('v5e')).operations['fusion.67']
    index = 4
    assert step.read == ROWS * 4096 * 2 + MATRIX + index
    assert step.written == 3 * ROWS * 8192 * 2


def test_sums_in_fusions_of_v5e():
    """`%async-collective-start.1` to `%async-collective-done.1`, and `.2`, with one product in a fusion between the
    two. What comes out is copied to the memory on the chip, and a fusion slices it.
    """
    schedule = real('v5e_async_sums', {'d': 256}, 'v5e:16x16')
    assert summed(schedule)['all-reduce', ('d',), 'in fusions, stands for a scatter'] == (8, 8 * 2 * MATRIX * 255 / 256)
    for one in schedule.transfers:
        if one.kind == 'all-reduce' and one.form == 'in fusions':
            assert one.exposed == pytest.approx(one.seconds - seconds_of_a_product(0.92 * 197e12), rel=0.01)


def test_default_options_of_v5p():
    """`%all-reduce.8` and `.9` sum arrays of zeros in which `%fusion.59`
    and `.60` put a slice: they stand for gathers.
    """
    assert summed(real('v5p', {'d': 64}, 'v5p:4x4x4')) == {
        ('all-reduce', ('d',), 'waits, stands for a gather'): (8, 8 * 2 * MATRIX * 63 / 64),
        ('all-reduce', ('d',), 'waits, stands for a scatter'): (8, 8 * 2 * MATRIX * 63 / 64),
        ('all-reduce', ('d',), 'waits'): (1, 2 * 4 * 63 / 64),
    }


def test_sparse_cores_of_v5p():
    """A transfer begins at `call-update`, which brings the operand, not at `call-start`, and ends at `call-done`.

    Of the second gather, the product x @ up stands between (`%bitcast_dynamic-update-slice_fusion.7`); of the first,
    only `%bitcast_dynamic-update-slice_fusion.8`, which writes x. Between the ends of a sum stands one product
    (`%convolution_bitcast_fusion.5`; `%fusion.65`).
    """
    schedule, share = real('v5p_sparse_core', {'d': 64}, 'v5p:4x4x4'), 63 / 64
    assert summed(schedule) == {
        ('all-gather', ('d',), 'SparseCore'): (8, 8 * MATRIX * share),
        ('reduce-scatter', ('d',), 'SparseCore'): (8, 8 * MATRIX * share),
        ('all-reduce', ('d',), 'waits'): (1, 2 * 4 * share),
    }
    first, second, *sums = (one for one in schedule.transfers if one.form == 'SparseCore')
    assert first.seconds == pytest.approx(MATRIX * share / (6 * 9e10))  # six "phase_rings"
    written = ROWS * 4096 * 2 / (0.9 * 2.765e12)
    assert first.exposed == pytest.approx(first.seconds - written, rel=0.02)
    assert second.exposed == 0
    product = seconds_of_a_product(0.92 * 459e12)
    for one in sums:
        assert one.seconds == pytest.approx(
            MATRIX * share / (2 * 9e10)
        )  # two: a ring through all 64, in both directions
        assert one.exposed == pytest.approx(one.seconds - product, rel=0.05)


def test_sums_over_two_slices_wait_for_the_hosts():
    """`%send` to `%recv-done` of the same rendezvous; nothing but the sum of the loss stands between."""
    schedule = real('v5e_slices', {'r': 2, 'd': 16}, 'v5e:4x4', 2)
    first, second, _ = (one for one in schedule.transfers if one.form == 'hosts')
    for one in (first, second):  # a shard of 256 rows of each layer in f32, through 3.125 GB/s
        assert (one.kind, one.axes, one.size) == ('all-reduce', ('r',), 4 * 256 * 8192 * 4)
        assert one.seconds == pytest.approx(one.size / 3.125e9)
        assert one.exposed == pytest.approx(one.seconds, rel=0.02)
    assert summed(schedule)['reduce-scatter', ('d',), 'waits'] == (8, 8 * MATRIX * 15 / 16)


def test_default_options_of_eight_h100():
    """Three of four iterations begin the sum of the one before (`%reduce-scatter-start`) and end it after a copy of a
    weight out of its stack (`%loop_dynamic_slice_fusion`) and four smaller ones; the last sum and the second gather
    stand alone.
    """
    schedule = real('h100', {'d': 8}, 'h100x8')
    by_name = {one.name: one for one in schedule.transfers}
    pipelined, last = by_name['reduce-scatter-start'], by_name['reduce-scatter-start.1']
    assert (pipelined.times, last.times) == (3, 1)
    assert pipelined.size == last.size == 2 * MATRIX
    copy, x = (
        2 * MATRIX / (0.9 * 3.35e12),
        2 * ROWS * 4096 * 2 / (0.9 * 3.35e12),
    )  # a weight, the rows of x: read and written
    assert pipelined.exposed == pytest.approx(pipelined.seconds - copy - x, rel=1e-3)
    assert last.exposed == pytest.approx(last.seconds, rel=0.01)
    first, second = by_name['all-gather-start'], by_name['all-gather-start.1']
    assert first.exposed == pytest.approx(first.seconds - 2 * x, rel=0.02)  # x is copied, and put into its stack
    assert second.exposed == pytest.approx(second.seconds, rel=0.01)
    assert by_name['all-reduce-start'].size == 4


def test_sums_over_an_axis():
    schedule = real('v5e_slices', {'r': 2, 'd': 16}, 'v5e:4x4', 2)
    seconds = {axis: sum(row.seconds for row in schedule.rows() if axis in row.axes) for axis in 'rd'}
    assert seconds['r'] + seconds['d'] == pytest.approx(schedule.seconds)
    behind = sum(row.behind for row in schedule.rows() if 'd' in row.axes)
    assert behind == 4 * MATRIX * 15 / 16  # the gathers in fusions


def test_the_report_has_the_times_and_their_sum():
    lines = list(_schedule(real('v5p_sparse_core', {'d': 64}, 'v5p:4x4x4')))
    words = next(line for line in lines if 'reduce-scatter over d: SparseCore' in line).split()
    assert words[4:] == ['8', '537', 'MB', '528', 'MB', '2.94', '0.329', '89%']
    assert lines[-1].split(';')[0].split() == 'exposed 0.788 ms of 3.91 ms of communication'.split()


def synchronous(name: str) -> str:
    return (
        f'  %{name} = bf16[8192,4096]{{1,0}} all-gather(%w), channel_id=1, replica_groups={{{{0,1,2,3,4,5,6,7}}}}, '
        'dimensions={0}, use_global_device_ids=true'
    )


def test_a_collective_that_waits_uses_links_that_one_under_way_then_lacks():
    assert read(start('s', 'w'), synchronous('g'), done('e', 's')).exposed == pytest.approx(2 * GATHER)


def test_a_loop_hides_a_collective_in_the_time_in_which_it_does_not_use_the_links_itself():
    """24 iterations of a product, and of a product and a collective that waits, with a gather of a thousand times the
    size under way: what the loop hides of it is the time of the products.
    """
    large = start('s', 'w').replace('bf16[8192,', 'bf16[8192000,').replace('bf16[1024,', 'bf16[1024000,')
    loop = '  %loop = (s32[], bf16[1024,4096]{1,0}) while(%w), condition=%condition, body=%body'
    end = done('e', 's').replace('8192', '8192000')
    body = LOOP.split('  %whole')[0] + '  ROOT %t = (s32[]) tuple(%n)\n}\n'
    busy = body.replace('  ROOT', f'{synchronous("g").replace("%w", "%own")}\n  ROOT')
    for rest, waits in ((body, 0), (busy, 24 * GATHER)):
        schedule = read(large, loop, end, rest=rest)
        assert schedule.compute == pytest.approx(24 * PRODUCT)
        assert schedule.exposed == pytest.approx(1000 * GATHER - 24 * PRODUCT + waits)
