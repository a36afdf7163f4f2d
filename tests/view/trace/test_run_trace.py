"""Traces joined to programs: a real one of a CPU, and those of a GPU and a TPU whose times are worked out by hand."""

import csv
import gzip
import io
import json
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hand_made_traces import Plane, write
from pretrax.cli import main
from pretrax.errors import UserError
from pretrax.storage import BucketPath
from pretrax.view.program.file import write_program
from pretrax.view.trace.run_trace import find_traces, open_newest, open_trace
from pretrax.view.trace.table import advice, as_csv, as_html, as_json, text

FORWARD = 'jit(step)/gradients/jvp(layer_0)/block/feed_forward'
BACKWARD = 'jit(step)/gradients/transpose(jvp(layer_0))/block/feed_forward'
# 4 devices; a gather of weights over pairs of them, a product forward, a product backward, a sum, an update.
PROGRAM = f"""// mesh d=2 t=2
HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (p0: bf16[512,1024], p1: bf16[1024,1024]) -> bf16[1024,1024] {{
  %p0 = bf16[512,1024]{{1,0}} parameter(0), metadata={{op_name="state.weights.up"}}
  %p1 = bf16[1024,1024]{{1,0}} parameter(1), metadata={{op_name="batch.tokens"}}
  %all-gather-start.1 = (bf16[512,1024]{{1,0}}, bf16[1024,1024]{{1,0}}) all-gather-start(%p0), replica_groups={{{{0,2}},{{1,3}}}}, dimensions={{0}}, metadata={{op_name="{FORWARD}/all_gather"}}
  %all-gather-done.1 = bf16[1024,1024]{{1,0}} all-gather-done(%all-gather-start.1), metadata={{op_name="{FORWARD}/all_gather"}}
  %dot.2 = bf16[1024,1024]{{1,0}} dot(%all-gather-done.1, %p1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="{FORWARD}/dot_general" source_file="/home/me/src/pretrax/model/mlp.py" source_line=23}}
  %dot.3 = bf16[1024,1024]{{1,0}} dot(%dot.2, %p1), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="{BACKWARD}/dot_general" source_file="/home/me/src/pretrax/model/mlp.py" source_line=23}}
  ROOT %multiply.4 = bf16[1024,1024]{{1,0}} multiply(%dot.3, %dot.3), metadata={{op_name="jit(step)/optimizer/mul"}}
}}
"""
PRODUCT = 2 * 1024**3  # FLOPs
MICRO = 1000  # nanoseconds


def place(tmp_path, *planes, program: str | None = PROGRAM, about=None, environment=None):
    """A run directory with one trace."""
    folder = tmp_path / 'run' / 'profile' / 'plugins' / 'profile' / '2026_01_01_00_00_00'
    write(folder / 'host.xplane.pb', *planes)
    if program:
        (tmp_path / 'run' / 'profile' / 'program.hlo.txt.gz').write_bytes(gzip.compress(program.encode()))
    if about:
        (folder / 'steps.json').write_text(json.dumps(about))
    if environment:
        (tmp_path / 'run' / 'environment.json').write_text(json.dumps(environment))
    return tmp_path / 'run'


def gpu(number, late=0):
    """Two steps of 100 us on two streams, 20 us apart; `late` delays the second one."""

    def kernel(name, start, end):
        return name.split('.')[0] + '_kernel', MICRO * start, MICRO * end, {'hlo_op': name, 'hlo_module': 'jit_step'}

    compute, network = [], []
    for start in (10, 130 + late):
        network += [kernel('all-gather-start.1', start, start + 30)]
        compute += [
            kernel('dot.2', start + 20, start + 50),  # 10 us of the gather are hidden, 20 are exposed
            kernel('dot.3', start + 50, start + 90),
            kernel('multiply.4', start + 95, start + 100),  # after a gap of 5 us
        ]
    copies = [('MemcpyH2D', MICRO * 115, MICRO * 118)]  # between the steps
    return (
        Plane(f'/device:GPU:{number}')
        .line('Stream #7(Compute)', *compute)
        .line('Stream #9(Nccl)', *network)
        .line('Stream #11(MemcpyH2D)', *copies)
    )


@pytest.fixture
def gpus(tmp_path):
    about = {'first_step': 41, 'last_step': 42, 'reason': 'log.profile', 'device_kind': 'NVIDIA H100 80GB HBM3',
             'memory': {'by_owner': {'optimizer': 8_000_000, 'weights': 4_000_000},
             'memory_peak_bytes_after': 20_000_000}}  # fmt: skip
    predicted = {'phases': [
        {'name': 'products of the layers', 'seconds': 5e-5, 'exposed': 5e-5, 'bound': 'products'},
        {'name': 'head and loss', 'seconds': 2e-5, 'exposed': 2e-5, 'bound': 'memory'},
        {'name': 'optimizer', 'seconds': 1e-5, 'exposed': 1e-5, 'bound': 'memory'},
        {'name': 'weights and gradients over d', 'seconds': 3e-5, 'exposed': 1e-5, 'bound': 'd'},
    ]}  # fmt: skip
    return place(tmp_path, gpu(0), gpu(1), about=about, environment={'predicted': predicted, 'compute': 'bf16'})


def test_a_step_of_gpus_divides_into_phases_gaps_and_the_wait_for_the_host(gpus):
    steps = open_newest(gpus)
    assert (steps.first, steps.steps, steps.devices, steps.reason) == (41, 2, 2, 'log.profile')
    # The first step lasts until the second begins, 120 us; the second 100 us. Of the 20 us between them 3 are a copy.
    assert steps.seconds == pytest.approx(110e-6)
    expected = {
        'forward': 30e-6, 'backward': 40e-6, 'optimizer': 5e-6, 'communication': 20e-6, 'copies': 1.5e-6,
        'gaps': 5e-6 + 2.5e-6, 'between steps': 6e-6,
    }  # fmt: skip
    assert steps.phases() == pytest.approx(expected)
    assert sum(expected.values()) == pytest.approx(steps.seconds)
    assert steps.communicating == pytest.approx(30e-6)
    assert (steps.gaps[0].before, steps.gaps[0].after) == ('dot.3', 'multiply.4')


def test_operations_have_work_traffic_and_their_part_of_the_roofline(gpus):
    rows = {row.name: row for row in open_newest(gpus).rows('operation')}
    product = rows['dot.2']
    assert (product.runs, product.seconds, product.elapsed) == pytest.approx((1, 30e-6, 30e-6))
    assert (product.flops, product.bytes) == (PRODUCT, 3 * 2 * 1024**2)  # reads two matrices in bf16, writes one
    assert product.best == pytest.approx(PRODUCT / 989.4e12)
    assert product.roofline == pytest.approx(PRODUCT / 989.4e12 / 30e-6)
    update = rows['multiply.4']
    assert update.best == pytest.approx(
        2 * 2 * 1024**2 / 3.35e12, rel=0.51
    )  # it reads one matrix, or the same one twice
    gather = rows['all-gather-start.1']
    assert (gather.seconds, gather.elapsed) == pytest.approx((20e-6, 30e-6))


def test_rows_by_scope_and_by_source_line_sum_to_the_same_time(gpus):
    steps = open_newest(gpus)
    for by in ('operation', 'scope', 'source'):
        assert sum(row.seconds for row in steps.rows(by)) == pytest.approx(steps.busy)
    scopes = {(row.name, row.phase): row.seconds for row in steps.rows('scope')}
    assert scopes['layers/feed_forward', 'forward'] == pytest.approx(30e-6)
    assert scopes['layers/feed_forward', 'communication'] == pytest.approx(20e-6)
    lines = {(row.name, row.phase): row.seconds for row in steps.rows('source')}
    assert lines['pretrax/model/mlp.py:23', 'backward'] == pytest.approx(40e-6)


def test_one_step_can_be_chosen(gpus):
    assert open_newest(gpus, 42).seconds == pytest.approx(100e-6)
    assert open_newest(gpus, 41).seconds == pytest.approx(120e-6)
    with pytest.raises(UserError, match='41 to 42'):
        open_newest(gpus, 43)


def test_the_terminal_shows_phases_rows_prediction_memory_and_what_to_try(gpus):
    shown = text(open_newest(gpus), 'scope', 140)
    tables = text(open_newest(gpus), 'scope', 80).split('\n\n')[1:3]
    assert max(len(line) for table in tables for line in table.splitlines()) <= 80
    assert all({'time', 'share'} <= set(table.split()) for table in tables)
    assert 'step 110 us: busy 96.5 us (87.7%)' in shown
    assert 'communication 30.0 us, of which 20.0 us exposed (33% hidden)' in shown
    phases = {line.split('  ')[0].strip(): line.split()[-1] for line in shown.split('\n\n')[1].splitlines()}
    assert phases['forward and backward'] == '1.00'  # 70 us, as predicted
    assert phases['optimizer'] == '0.50'  # 5 us, 10 us predicted
    assert phases['communication'] == '2.00'  # 20 us exposed, 10 us predicted
    assert 'optimizer 8 MB, weights 4 MB, at the peak, others 8 MB' in shown
    assert '18%  exposed communication over d: gathers weights' in shown
    assert max(map(len, shown.splitlines()[:20])) <= 140


def test_a_tpu_has_peaks_and_asynchronous_collectives(tmp_path):
    plane = (
        Plane('/device:TPU:0')
        .line('XLA Modules', ('jit_step(9)', 0, 100 * MICRO), ('jit_step(9)', 100 * MICRO, 200 * MICRO))
        .line('XLA Ops', *(
            event for start in (0, 100 * MICRO) for event in (
                ('%all-gather-start.1 = bf16[8] all-gather-start(%p0)', start, start + MICRO),
                ('%dot.2 = bf16[1024,1024] dot(%a, %b)', start + MICRO, start + 41 * MICRO),
                ('%all-gather-done.1 = bf16[8] all-gather-done(%x)', start + 41 * MICRO, start + 50 * MICRO),
                ('%dot.3 = bf16[1024,1024] dot(%a, %b)', start + 50 * MICRO, start + 100 * MICRO),
            )
        ))
        .line('Async XLA Ops', *(('%all-gather-start.1 = x', start, start + 50 * MICRO) for start in (0, 100 * MICRO)))
    )  # fmt: skip
    steps = open_newest(place(tmp_path, plane, about={'first_step': 1, 'last_step': 2, 'device_kind': 'TPU v5 lite'}))
    assert steps.seconds == pytest.approx(100e-6)
    assert steps.phases() == pytest.approx({'forward': 40e-6, 'backward': 50e-6, 'communication': 10e-6})
    assert steps.communicating == pytest.approx(50e-6)
    rows = {row.name: row for row in steps.rows('operation')}
    assert rows['dot.2'].roofline == pytest.approx(PRODUCT / 197e12 / 40e-6)


def test_a_step_whose_device_waits_for_the_host_is_advised_to_look_at_its_data(tmp_path):
    steps = open_newest(place(tmp_path, gpu(0, late=500), about={'first_step': 1, 'last_step': 2}))
    assert 'between steps: the device waits for the host' in advice(steps)[0]


def test_a_trace_without_its_program_still_has_operations(tmp_path):
    steps = open_newest(place(tmp_path, gpu(0), program=None))
    assert steps.phases()['computation'] == pytest.approx(75e-6)
    assert {row.name for row in steps.rows('operation')} >= {'dot.2', 'all-gather-start.1', 'MemcpyH2D'}
    assert 'the program of the step is missing' in text(steps, 'operation', 100)


@pytest.fixture(scope='module')
def real(tmp_path_factory):
    """A run directory with a trace of three steps of a small program with scopes
    and a loop, on two devices of a CPU.
    """
    run = tmp_path_factory.mktemp('real')
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ('d',))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('d'))

    def loss(weights, x):
        def layer(x, weight):
            with jax.named_scope('feed_forward'):
                return jnp.tanh(x @ weight), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    @jax.jit
    def step(weights, x):
        gradient = jax.grad(loss)(weights, x)
        with jax.named_scope('optimizer'):
            return weights - 0.01 * gradient

    weights, x = jnp.ones((4, 64, 64)) / 64, jax.device_put(jnp.ones((256, 64)), spread)
    weights = jax.device_put(weights, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    compiled = step.lower(weights, x).compile()
    compiled(weights, x)[0].block_until_ready()
    write_program(run / 'profile', compiled, {'d': 2})
    jax.profiler.start_trace(run / 'profile', create_perfetto_trace=True)
    for _ in range(3):
        weights = compiled(weights, x)
    weights.block_until_ready()
    jax.profiler.stop_trace()
    return run


def busy_by_device(path):
    """Microseconds in which anything of the program ran, from the Perfetto file, counted without pretrax."""
    intervals = defaultdict(list)
    for event in json.loads(gzip.decompress(path.read_bytes()))['traceEvents']:
        if 'hlo_op' in event.get('args', {}):
            intervals[event['args']['device_ordinal']].append((event['ts'], event['ts'] + event['dur']))
    found = {}
    for device, of_device in intervals.items():
        points = np.unique(of_device)
        middles = (points[1:] + points[:-1]) / 2
        starts, ends = np.array(of_device).T
        covered = [bool(np.any((starts < middle) & (middle < ends))) for middle in middles]
        found[device] = float(np.sum(np.diff(points)[covered]))
    return found


def test_the_times_of_a_real_trace_sum_to_the_busy_time_of_the_devices(real):
    steps = open_newest(real)
    assert (steps.steps, steps.devices) == (3, 2)
    (path,) = real.rglob('perfetto_trace.json.gz')
    expected = busy_by_device(path)
    assert steps.busy == pytest.approx(sum(expected.values()) / 2 / 3 * 1e-6, rel=0.01)
    for by in ('operation', 'scope', 'source'):
        assert sum(row.seconds for row in steps.rows(by)) == pytest.approx(steps.busy)
    assert sum(steps.phases().values()) == pytest.approx(steps.seconds)


def test_the_operations_of_a_real_trace_have_their_scope_work_and_line(real):
    steps = open_newest(real)
    # 4 layers on 128 of 256 rows: one product forward, two backward; the first layer's input needs no gradient.
    assert sum(row.flops or 0 for row in steps.operations) == pytest.approx(4 * 3 * 2 * 128 * 64 * 64, rel=0.1)
    assert {'feed_forward', 'optimizer'} <= {row.name.split('/')[-1] for row in steps.rows('scope')}
    assert {'forward', 'backward', 'optimizer', 'communication'} <= set(steps.phases())
    assert any(row.name.endswith(f'test_run_trace.py:{line_of("x @ weight")}') for row in steps.rows('source'))


def test_a_trace_is_joined_to_its_program_from_inside_the_run_too(real, monkeypatch):
    whole = open_newest(real)
    monkeypatch.chdir(whole.path.parent)
    inside = open_newest(Path('.'))
    assert inside.program is not None
    assert inside.phases() == whole.phases()


def line_of(words):
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if words in line)


def test_files_have_every_row(real, tmp_path):
    steps = open_newest(real)
    rows = steps.rows('operation')
    read = list(csv.DictReader(io.StringIO(as_csv(steps, 'operation'))))
    assert [(row['name'], float(row['seconds'])) for row in read] == [(row.name, row.seconds) for row in rows]
    assert 'feed_forward' in {row['scope'].split('/')[-1] for row in read}
    found = json.loads(as_json(steps, 'scope'))
    assert sum(row['seconds'] for row in found['rows']) == pytest.approx(found['busy'])
    assert as_html(steps, 'operation', 'A run').count('<tr>') == len(rows) + len(steps.phases()) + 2


def test_names_in_the_page_are_escaped(gpus):
    page = as_html(open_newest(gpus), 'scope', '<script>alert(1)</script>')
    assert '<script' not in page
    assert '&lt;script&gt;' in page
    assert 'http:' not in page.replace('xmlns="http://www.w3.org/2000/svg"', '')
    assert 'https:' not in page


def test_the_command_prints_and_writes(gpus, tmp_path, capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(['trace', *map(str, arguments)])
        return ended.value.code, capsys.readouterr()

    code, shown = run(gpus, '--by', 'source', '--step', 42)
    assert code == 0
    assert 'pretrax/model/mlp.py:23' in shown.out
    for suffix in ('csv', 'json', 'html'):
        code, shown = run(gpus, '--out', tmp_path / f'table.{suffix}')
        assert (code, (tmp_path / f'table.{suffix}').exists()) == (0, True)
    for wrong, said in (
        ((tmp_path / 'nothing',), 'does not exist'),
        ((tmp_path,), 'has no trace'),
        ((gpus, '--out', 'table.xlsx'), '.csv, .json, .html'),
        ((gpus, '--out', tmp_path / 'table.csv' / 'below.csv'), 'cannot write'),
        ((gpus, '--step', '7'), 'step 7'),
    ):
        code, shown = run(*wrong)
        assert (code, said in shown.err) == (2, True), shown.err


def test_a_trace_of_another_program_alone_is_refused_and_one_may_be_given_itself(gpus, tmp_path):
    (path,) = find_traces(gpus)
    assert open_trace(find_traces(path)[0]).steps == 2
    host = write(tmp_path / 'other' / 'host.xplane.pb', Plane('/host:CPU').line('python', ('call', 0, 900)))
    with pytest.raises(UserError, match=r'log\.profile=3'):
        open_trace(host)


def test_a_trace_in_a_bucket_is_read_as_one_on_a_disk(gpus, bucket):
    run = BucketPath(bucket.url) / 'runs/a'
    for path in gpus.rglob('*'):
        if path.is_file():
            (run / path.relative_to(gpus).as_posix()).write_bytes(path.read_bytes())
    here, there = open_newest(gpus, 41), open_newest(run, 41)
    assert there.operations == here.operations
    assert there.phases() == here.phases()
