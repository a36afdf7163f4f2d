"""Signals and the time limit that stop or save a run, and steps that hang."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from preloaded import programs
from pretrax import config_from_values, pretrain
from pretrax.checkpoint import steps_in
from pretrax.config.schema import Faults
from pretrax.errors import UserError
from pretrax.run import watch
from pretrax.run.watch import Watchdog
from runs import At, Quiet, write_yaml


def test_two_signals_at_once_count_as_one(capfd, monkeypatch):
    """`uv run` passes on what its process group got as well; a second one that is meant comes later."""
    ended = []
    monkeypatch.setattr(watch.os, '_exit', ended.append)
    with watch.Requests(None).listening() as requests:
        requests.begin()
        assert not requests.stop(1)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert (requests.stop(2), requests.why, ended) == (True, 'signal', [])
        assert capfd.readouterr().err.count('stopping after this step, and saving the state') == 1
        later = time.monotonic() + 1.5
        monkeypatch.setattr(watch.time, 'monotonic', lambda: later)
        signal.raise_signal(signal.SIGINT)
        assert ended == [130]


def test_a_closed_terminal_saves_and_stops_unless_it_is_ignored(small):
    closed = At(3, lambda: signal.raise_signal(signal.SIGHUP))
    result = pretrain(config_from_values(small), progress=closed)
    assert (result.stopped, int(result.state.step)) == ('signal', 4)
    assert steps_in(Path(small['run_dir']) / 'checkpoints') == [4]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        again = pretrain(config_from_values(small), progress=At(5, closed.what))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (again.stopped, int(again.state.step)) == (None, 6)


def test_a_second_closed_terminal_does_not_end_the_process(monkeypatch):
    """Both the shell and Linux send SIGHUP."""
    ended = []
    monkeypatch.setattr(watch.os, '_exit', ended.append)
    with watch.Requests(None).listening() as requests:
        requests.begin()
        signal.raise_signal(signal.SIGHUP)
        later = time.monotonic() + 1.5
        monkeypatch.setattr(watch.time, 'monotonic', lambda: later)
        signal.raise_signal(signal.SIGHUP)
        assert (requests.stop(2), ended) == (True, [])


@pytest.mark.parametrize(('number', 'error'), [
    (signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit),
])  # fmt: skip
def test_before_the_first_step_a_request_to_stop_ends_the_run_at_once(number, error):
    with watch.Requests(None).listening(), pytest.raises(error) as ended:
        signal.raise_signal(number)
    if error is SystemExit:
        assert ended.value.code == 128 + number


TERMINAL = """
import os, pathlib, sys
run = pathlib.Path(sys.argv[1])
main, other = os.openpty()
if os.fork():
    os.close(other)
    while b'step 20/' not in os.read(main, 10000):
        pass
    os.close(main)  # as sshd does when the connection is lost
    code = os.waitstatus_to_exitcode(os.wait()[1])
    print(code)
    sys.exit(0)
os.login_tty(other)
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves_its_state(small, tmp_path):
    """A real terminal, whose output fails from then on."""
    values = small | {'steps': 100_000, 'mesh': {'r': 1, 'd': 1, 't': 1}, 'checkpoint': {'every': 1_000_000}}
    config = write_yaml(values | {'plugins': [str(Path(__file__).parents[1] / 'runs.py')]}, tmp_path / 'run.yaml')
    environment = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
    command = [sys.executable, '-m', 'pretrax', 'train', config]
    done = subprocess.run(
        [sys.executable, '-c', TERMINAL, small['run_dir'], *command], capture_output=True, text=True, timeout=300,
        env=environment | {'PYTHONPATH': str(Path(__file__).parents[1]), 'TERM': 'dumb'},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ('0\n', '')
    [step] = steps_in(Path(small['run_dir']) / 'checkpoints')
    assert step >= 20


def test_sigusr1_saves_and_continues(small):
    progress = At(3, lambda: signal.raise_signal(signal.SIGUSR1))
    result = pretrain(config_from_values(small | {'checkpoint': {'every': 100}}), progress=progress)
    assert (result.stopped, int(result.state.step)) == (None, 6)
    assert steps_in(Path(small['run_dir']) / 'checkpoints') == [4, 6]


def test_a_time_limit_saves_and_stops(small):
    result = pretrain(config_from_values(small | {'faults': {'time_limit_minutes': 1e-6}}), progress=Quiet())
    assert (result.stopped, int(result.state.step)) == ('time limit', 1)
    assert steps_in(Path(small['run_dir']) / 'checkpoints') == [1]


HANGING = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[3])
from pretrax import config_from_values, pretrain, register
from pretrax.data.batches.source import Source
from bigram import Bigram
import json

class Stuck(Source):
    vocab_size = 100
    def batch(self, step, rows, batch_rows):
        from small import random_batch
        if step == 3:
            time.sleep(1000)
        batch = random_batch(batch_rows, seed=step)
        arrays = (batch.tokens, batch.targets, batch.segments, batch.positions, batch.mask)
        return type('Rows', (tuple,), {})(x[rows] for x in arrays)

register('data', 'stuck')(lambda request: Stuck())
register('model', 'bigram-that-hangs')(lambda request: Bigram())
pretrain(config_from_values(json.loads(sys.argv[1])))
"""


def test_a_hanging_step_ends_the_process_and_its_stacks_name_the_line(small):
    values = small | {
        'model': {'name': 'bigram-that-hangs'}, 'data': {'name': 'stuck'}, 'faults': {'hang_seconds': 2.0},
        'mesh': {'r': 1, 'd': 1, 't': 1}, 'checkpoint': {'every': 2},
    }  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
    run = subprocess.run(
        [programs() / 'python', '-c', HANGING, json.dumps(values), '', str(Path(__file__).parents[1])],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 75, run.stderr
    assert 'the process ends; stacks are in' in run.stdout
    stacks = (Path(small['run_dir']) / 'stacks' / 'process-0.txt').read_text()
    assert 'File "<string>", line 14 in batch' in stacks
    assert steps_in(Path(small['run_dir']) / 'checkpoints') == [2]


def test_a_compilation_between_steps_may_take_longer_than_a_step(tmp_path, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(os, '_exit', lambda code: ended.set())
    with Watchdog(tmp_path, Faults(hang_seconds=0.04), lambda text: None) as watchdog:
        with watchdog.paused():
            assert not ended.wait(0.5)
        assert ended.wait(60)


def some_stacks(directory, to, read, monkeypatch, process=0):
    """What a watchdog that writes stacks every 50 ms has written first."""
    monkeypatch.setattr(watch.jax, 'process_index', lambda: process)
    faults = Faults(stack_trace_interval_seconds=0.05, stack_trace_to=to)
    until = time.monotonic() + 60
    with Watchdog(directory, faults, pytest.fail):
        while 'some_stacks' not in (text := read()):
            assert time.monotonic() < until, text
    return text


def test_stacks_go_to_the_run_directory_a_directory_or_the_console_on_a_timer(tmp_path, monkeypatch, capfd):
    run, other = tmp_path / 'run', tmp_path / 'other'
    own = run / 'stacks' / 'process-0.txt'
    some_stacks(run, None, lambda: own.read_text() if own.exists() else '', monkeypatch)
    size = own.stat().st_size
    for process in 0, 3:  # each has its own
        name = other / f'{socket.gethostname()}-process-{process}.txt'
        some_stacks(run, str(other), lambda: name.read_text() if name.exists() else '', monkeypatch, process)  # noqa: B023
    assert len(list(other.iterdir())) == 2
    shown = []
    some_stacks(run, 'console', lambda: shown.append(capfd.readouterr().err) or ''.join(shown), monkeypatch)
    assert own.stat().st_size == size, 'those on the timer go to one place'
    assert not Path('console').exists()


@pytest.mark.parametrize(
    ('faults', 'fix'),
    [
        ({'stack_trace_to': 'console'}, 'give faults.stack_trace_interval_seconds=600 too'),
        ({'stack_trace_to': 'gs://b/stacks', 'stack_trace_interval_seconds': 5.0}, 'in the run directory of a bucket'),
    ],
)
def test_a_place_for_stacks_that_has_no_effect_is_a_mistake(small, faults, fix):
    with pytest.raises(UserError, match=fix):
        config_from_values(small | {'faults': faults})
