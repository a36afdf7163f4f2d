"""metrics.jsonl is standard JSON, survives a kill, shows no step twice after a resume, and outlives its trackers."""

import itertools
import json
import math
import re
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.errors import UserError
from pretrax.observe.metrics import MetricsLog, read_metrics
from pretrax.view.record.columns import read_metrics_columns


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'run' / 'metrics.jsonl'


def fill(path, steps):
    with MetricsLog(path, say=pytest.fail) as log:
        for step in steps:
            log.write({'step': step, 'loss': 1 / step})


def test_records_are_read_back_in_order(path):
    with MetricsLog(path) as log:
        log.write({'step': 1, 'loss': np.float32(2.5), 'tokens': np.int64(4096), 'mfu': None})
        log.write({'step': 2, 'loss': jnp.float32(2.25), 'note': 'first evaluation'})
        # Each line is in the file before the log is closed: a plot of a running training sees it.
        assert len(path.read_text().splitlines()) == 2
    assert read_metrics(path) == [
        {'step': 1, 'loss': 2.5, 'tokens': 4096, 'mfu': None},
        {'step': 2, 'loss': 2.25, 'note': 'first evaluation'},
    ]
    assert list(read_metrics_columns(path, pytest.fail)) == ['loss', 'tokens']


def test_nonfinite_values_are_written_as_standard_json_and_read_back(path):
    with MetricsLog(path) as log:
        log.write({'step': 1, 'loss': math.nan, 'grad_norm': np.float32(np.inf), 'scale': -math.inf, 'ok': 1.0})
    (line,) = path.read_text().splitlines()
    strict = json.loads(line, parse_constant=lambda token: pytest.fail(f'{token} is not JSON'))
    assert strict['loss'] is None
    assert strict['nonfinite'] == {'loss': 'nan', 'grad_norm': 'inf', 'scale': '-inf'}
    (record,) = read_metrics(path)
    assert math.isnan(record.pop('loss'))
    assert record == {'step': 1, 'grad_norm': math.inf, 'scale': -math.inf, 'ok': 1.0}


def test_a_nested_nonfinite_value_is_refused(path):
    with MetricsLog(path) as log, pytest.raises(ValueError, match='JSON compliant'):
        log.write({'step': 1, 'losses': [math.nan]})
    assert path.read_bytes() == b''


@pytest.mark.parametrize('step', [None, 1.5, True, '3'])
def test_a_line_without_an_integer_step_is_refused(path, step):
    with MetricsLog(path) as log, pytest.raises(TypeError, match='integer step'):
        log.write({'step': step, 'loss': 1.0})


def test_a_resumed_run_has_no_step_twice(path):
    fill(path, range(1, 181))
    said = []
    with MetricsLog(path, resumed_step=100, say=said.append) as log:
        for step in range(101, 151):
            log.write({'step': step, 'loss': 7.0})
    records = read_metrics(path)
    assert [record['step'] for record in records] == list(range(1, 151))
    assert [record['loss'] for record in records[99:101]] == [0.01, 7.0]
    assert said == ['metrics.jsonl: removed 80 lines after step 100; those steps are trained again']


def test_resuming_at_the_end_of_the_file_changes_nothing(path):
    fill(path, range(1, 11))
    before = path.read_bytes()
    MetricsLog(path, resumed_step=10, say=pytest.fail).close()
    assert path.read_bytes() == before


def test_a_new_run_starts_with_an_empty_file(path):
    fill(path, range(1, 11))
    MetricsLog(path, say=lambda _: None).close()
    assert read_metrics(path) == []


@pytest.mark.parametrize(
    'torn', [b'{"step": 11, "lo', b'{"step"', b'\x00\x00\x00', b'{"step": 11, "note": "caf\xc3', b'17']
)
def test_an_incomplete_line_is_dropped_and_reported(path, torn):
    fill(path, range(1, 11))
    with path.open('ab') as file:
        file.write(torn)
    assert [record['step'] for record in read_metrics(path)] == list(range(1, 11))  # as `pretrax plot` sees it
    said = []
    with MetricsLog(path, resumed_step=10, say=said.append) as log:
        log.write({'step': 11, 'loss': 3.0})
    assert said == ['metrics.jsonl: removed 1 line left incomplete when the run was stopped']
    assert [record['step'] for record in read_metrics(path)] == list(range(1, 12))


def test_a_file_cut_at_any_byte_loses_only_that_line(path):
    fill(path, range(1, 4))
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with MetricsLog(path, resumed_step=3, say=lambda _: None) as log:
            log.write({'step': 4, 'loss': 0.25})
        steps = [record['step'] for record in read_metrics(path)]
        complete = whole[:size].count(b'}')
        assert steps == [*[1, 2, 3][:complete], 4]


def test_a_killed_process_leaves_a_file_that_can_be_resumed(path):
    """SIGKILL a real process in the middle of writing."""
    code = (
        'import itertools, sys; from pretrax.observe.metrics import MetricsLog\n'
        'log = MetricsLog(sys.argv[1])\n'
        'for step in itertools.count(1):\n'
        '    log.write({"step": step, "loss": 1 / step, "padding": "x" * 5000})\n'
        '    if step == 200: print("ready", flush=True)\n'
    )
    process = subprocess.Popen([sys.executable, '-c', code, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as out:
        out.readline()
        process.kill()
        assert process.wait() == -signal.SIGKILL
    MetricsLog(path, resumed_step=150, say=lambda _: None).close()
    assert [record['step'] for record in read_metrics(path)] == list(range(1, 151))


def test_a_full_disk_is_reported_and_lines_are_kept_until_there_is_space(path):
    """The file may not grow past a limit for a while: a line is written in part, as on a disk that is full."""
    code = (
        'import resource, sys; from pretrax.observe.metrics import MetricsLog\n'
        'log = MetricsLog(sys.argv[1])\n'
        'limit = resource.getrlimit(resource.RLIMIT_FSIZE)\n'
        'resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))\n'
        'for step in range(1, 100): log.write({"step": step, "loss": 1.0})\n'
        'resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))\n'
        'if sys.argv[2].isdigit(): log.rewind(int(sys.argv[2]))\n'
        'resource.setrlimit(resource.RLIMIT_FSIZE, limit)\n'
        'if sys.argv[2] == "room": log.write({"step": 100, "loss": 1.0})\n'
        'if sys.argv[2].isdigit(): log.write({"step": int(sys.argv[2]) + 1, "loss": 1.0})\n'
        'log.close()\n'
    )

    def out_of(ending):
        run = subprocess.run(
            [sys.executable, '-c', code, str(path), ending], capture_output=True, text=True, check=True
        )
        return run.stdout

    out = out_of('no room')
    whole = path.read_bytes().count(b'\n')
    assert 99 - whole >= 32  # lines that wait: reported at first, and each time when twice as many bytes wait
    assert 5 <= out.count('WARNING: cannot write') <= 7
    assert 'File too large. Training continues' in out
    assert 'bytes of metrics could not be written' in out
    MetricsLog(path, resumed_step=100, say=lambda _: None).close()
    assert [record['step'] for record in read_metrics(path)] == list(range(1, whole + 1))

    path.unlink()
    out = out_of('room')
    assert 'could not be written' not in out
    assert out.endswith(f'{path} is written again\n')
    assert [record['step'] for record in read_metrics(path)] == list(range(1, 101))

    for step in (60, 20):  # among the lines that wait, and among those that are written
        path.unlink()
        out_of(f'{step}')
        assert [record['step'] for record in read_metrics(path)] == list(range(1, step + 2))


def test_a_removed_file_is_created_again(path):
    said = []
    log = MetricsLog(path, say=said.append)
    log.write({'step': 1, 'loss': 1.0})
    path.unlink()
    path.parent.rmdir()
    log.write({'step': 2, 'loss': 1.0})
    log.close()
    assert [record['step'] for record in read_metrics(path)] == [2]
    assert said == [f'WARNING: {path} was removed while training; it is created again, with the lines from now on']


def test_a_rewound_file_continues_from_there(path):
    log = MetricsLog(path, say=lambda _: None)
    for step in (1, 2, 3):
        log.write({'step': step, 'loss': 1.0})
    log.rewind(1)
    log.write({'step': 2, 'loss': 5.0})
    log.close()
    assert [(record['step'], record['loss']) for record in read_metrics(path)] == [(1, 1.0), (2, 5.0)]


FOREIGN = [b'<<<<<<< HEAD', b'[' * 9999, b'{"step": 3, "nonfinite": 1}', b'{"step": 3, "nonfinite": {"loss": []}}']


@pytest.mark.parametrize('foreign', FOREIGN)
def test_a_foreign_line_in_the_middle_is_reported_and_skipped(path, foreign):
    fill(path, [1, 2])
    path.write_bytes(path.read_bytes() + foreign + b'\n{"step": 3, "loss": 1.0}\n')
    said = []
    assert [record['step'] for record in read_metrics(path, said.append)] == [1, 2, 3]
    start = re.escape(foreign[:60].decode())
    [warning] = said
    assert re.search(rf"metrics\.jsonl, line 3 is not a line of metrics, and is skipped: '{start}'", warning)
    with MetricsLog(path, resumed_step=3, say=lambda _: None) as log:
        log.write({'step': 4, 'loss': 0.25})
    assert [record['step'] for record in read_metrics(path, pytest.fail)] == [1, 2, 3, 4]


def test_reading_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match='no such file'):
        read_metrics(tmp_path / 'metrics.jsonl')
    with pytest.raises(UserError, match='is a directory'):
        read_metrics(tmp_path)


class Recorder:
    name, where = 'recorder', 'here'

    def __init__(self, fails_at=None):
        self.seen, self.flushed, self.closed, self.fails_at = [], [], 0, fails_at

    def resume(self, step):
        return {}

    def log(self, lines):
        for step, numbers, _ in lines:
            if step == self.fails_at:
                raise ConnectionError('server gone\nwith details')
            self.seen.append((step, dict(numbers)))

    def flush(self):
        self.flushed.append(len(self.seen))

    def close(self, succeeded):
        self.closed += 1


def test_trackers_receive_only_numbers(path):
    tracker = Recorder()
    with MetricsLog(path, [tracker]) as log:
        log.write({'step': 1, 'loss': 2.0, 'mfu': None, 'note': 'text', 'tokens': np.int64(5)})
        log.close()  # twice is once
    assert tracker.seen == [(1, {'loss': 2.0, 'tokens': 5})]
    assert tracker.closed == 1


def test_a_failing_tracker_is_reported_once_and_dropped(path):
    broken, sound = Recorder(fails_at=3), Recorder()
    said = []
    with MetricsLog(path, [broken, sound], say=said.append) as log:
        for step in range(1, 6):
            log.write({'step': step, 'loss': 1.0})
    assert said == [
        'WARNING: recorder stopped working (ConnectionError: server gone). '
        'It receives no more numbers of this run; metrics.jsonl has all of them.'
    ]
    assert [step for step, _ in broken.seen] == [1, 2]
    assert [step for step, _ in sound.seen] == [1, 2, 3, 4, 5]
    assert len(read_metrics(path)) == 5


def test_a_tracker_that_fails_at_the_end_is_reported(path):
    tracker = Recorder()
    tracker.close = lambda succeeded: next(itertools.repeat(None, 0))
    said = []
    MetricsLog(path, [tracker], say=said.append).close()
    assert 'recorder could not be finished (StopIteration' in said[0]
