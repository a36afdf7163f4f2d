"""Traces as they are read: a real one of a CPU,
and those of a GPU and a TPU that `hand_made_traces.py` writes by hand.
"""

import gzip
import json
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from hand_made_traces import Plane, write
from pretrax.errors import UserError
from pretrax.view.trace.file import Event, read_trace, trace_files


@pytest.fixture(scope='module')
def real(tmp_path_factory):
    """A trace of three executions of a program with a loop, on one device of a CPU."""
    folder = tmp_path_factory.mktemp('real')

    @jax.jit
    def program(x):
        return jax.lax.fori_loop(0, 5, lambda _, y: jnp.tanh(y @ x), x).sum()

    x = jnp.eye(64)
    program(x).block_until_ready()
    jax.profiler.start_trace(folder, create_perfetto_trace=True)
    for _ in range(3):
        program(x).block_until_ready()
    jax.profiler.stop_trace()
    return folder


def test_a_trace_of_a_cpu_has_the_operations_of_each_execution(real):
    (path,) = trace_files(real)
    assert path.name.endswith('.xplane.pb')
    events = read_trace(path)
    assert {event.device for event in events} == {'CPU 0'}
    assert {event.module for event in events} == {'jit_program'}
    assert len({event.run for event in events}) == 3
    loops = [event for event in events if event.name.startswith('while')]
    assert len(loops) == 3
    inside = [event for event in events if loops[0].start < event.start and event.end <= loops[0].end]
    assert 5 in Counter(event.name for event in inside).values()  # operations of the loop's body run five times


def test_the_perfetto_file_has_the_same_events_and_is_read_without_the_other(real, tmp_path):
    (path,) = trace_files(real)
    copy = tmp_path / 'perfetto_trace.json.gz'
    copy.write_bytes((path.parent / 'perfetto_trace.json.gz').read_bytes())
    assert trace_files(tmp_path) == [copy]

    def facts(events):
        return sorted((event.name, event.device, event.module, event.run, round(event.start)) for event in events)

    assert facts(read_trace(copy)) == facts(read_trace(path))


def test_kernels_and_copies_of_a_gpu_are_read_by_stream(tmp_path):
    kernel = {'hlo_op': 'fusion.3', 'hlo_module': 'jit_step'}
    plane = (
        Plane('/device:GPU:1')
        .line('Stream #20(Compute)', ('loop_fusion_kernel', 100, 150, kernel), ('Memset', 150, 155))
        .line('Stream #21(MemcpyH2D)', ('MemcpyH2D', 120, 160))
        .line('XLA Ops', ('fusion.3', 100, 150))  # derived from the streams: it would count twice
    )
    path = write(tmp_path / 'host.xplane.pb', plane, Plane('/host:CPU').line('python', ('call', 0, 900)))
    assert read_trace(path) == [
        Event('GPU 1', 'Stream #20(Compute)', 'fusion.3', 'jit_step', 100, 150),
        Event('GPU 1', 'Stream #20(Compute)', 'Memset', '', 150, 155),
        Event('GPU 1', 'Stream #21(MemcpyH2D)', 'MemcpyH2D', '', 120, 160),
    ]


def test_operations_of_a_tpu_belong_to_the_execution_in_which_they_start(tmp_path):
    plane = (
        Plane('/device:TPU:0')
        .line('Steps', ('1', 0, 500))
        .line('XLA Modules', ('jit_step(77)', 10, 200), ('jit_metrics(5)', 210, 220), ('jit_step(77)', 230, 400))
        .line('XLA Ops', ('%fusion.3 = bf16[8,128]{1,0} fusion(%a)', 12, 90), ('%copy.1 = f32[2] copy(%b)', 211, 219),
              ('%fusion.3 = bf16[8,128]{1,0} fusion(%a)', 232, 310))
        .line('Async XLA Ops', ('%all-gather-start.2 = (bf16[8]) all-gather-start(%c)', 20, 60))
    )  # fmt: skip
    path = write(tmp_path / 'host.xplane.pb', plane)
    assert [(event.name, event.stream, event.module, event.run) for event in read_trace(path)] == [
        ('fusion.3', 'XLA Ops', 'jit_step', 0),
        ('copy.1', 'XLA Ops', 'jit_metrics', 1),
        ('fusion.3', 'XLA Ops', 'jit_step', 2),
        ('all-gather-start.2', 'Async XLA Ops', 'jit_step', 0),
    ]


@pytest.mark.parametrize(
    ('name', 'content'),
    [
        ('host.xplane.pb', b'not a trace at all'),
        ('perfetto_trace.json.gz', b'\x1f\x8bcut'),
        ('perfetto_trace.json.gz', gzip.compress(b'{"traceEvents": [{"ph": "X", "ts"')),
        ('perfetto_trace.json.gz', gzip.compress(b'[1, 2]')),
        ('perfetto_trace.json.gz', gzip.compress(json.dumps({'traceEvents': [{'ph': 'M', 'pid': 1}]}).encode())),
        ('perfetto_trace.json.gz', gzip.compress(b'{"traceEvents": []}')),
        ('host.xplane.pb', b''),
    ],
    ids=['no-trace', 'cut-gzip', 'cut-json', 'a-list', 'no-operations', 'no-events', 'empty'],  # gzip writes the time
)
def test_a_damaged_or_empty_trace_is_refused_with_the_fix(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r'log\.profile=3'):
        read_trace(tmp_path / name)


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(UserError, match='cannot read'):
        read_trace(tmp_path / 'host.xplane.pb')
    assert trace_files(tmp_path / 'profile') == []
