"""The clock: checkpoints by minutes, and what the time of a run was spent on."""

import dataclasses
import json
import os
import statistics
import threading
import time
import types
from concurrent.futures import Future
from pathlib import Path

import pytest

from pretrax import config_from_values, pretrain
from pretrax.checkpoint import Memory, read_description, steps_in
from pretrax.checkpoint.memory_pieces import VARIABLE
from pretrax.observe import attempts
from pretrax.observe.attempts import note, read_attempts
from pretrax.observe.goodput import goodput
from pretrax.observe.metrics import read_metrics
from pretrax.run import clock as clock_module
from pretrax.run.clock import Clock
from pretrax.run.loop import train
from pretrax.run.measure import seconds_of_steps
from pretrax.run.step_metrics import StepMetrics
from pretrax.view.record.run_record import read_run
from runs import BIGRAM, At, Quiet, lines_of


class Killed(BaseException):
    """Ends a run at once."""


def test_checkpoints_are_also_saved_by_minutes(small):
    values = small | {'checkpoint': {'every': 100, 'minutes': 1e-9, 'keep': 9}}
    pretrain(config_from_values(values), progress=Quiet())
    assert steps_in(Path(small['run_dir']) / 'checkpoints') == [1, 2, 3, 4, 5, 6]


def test_goodput_counts_kept_steps_over_all_time(small):
    values = small | {'checkpoint': {'every': 2}}
    pretrain(config_from_values(values | {'steps': 4, 'schedule': {}}), progress=Quiet())
    run = Path(small['run_dir'])
    kept = read_description(run / 'checkpoints', 4)['productive_seconds']
    attempts = [json.loads(line) for line in (run / 'attempts.jsonl').read_text().splitlines()]
    attempts[0]['time'] -= 1000  # as if it had begun long before
    (run / 'attempts.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in attempts))
    pretrain(config_from_values(values | {'steps': 6, 'schedule': {}}), progress=Quiet())
    last = read_metrics(run / 'metrics.jsonl')[-1]
    assert kept / 1100 < last['goodput'] < (kept + 100) / 1000
    events = [(event['event'], event['step']) for event in read_attempts(run)]
    assert events == [
        ('began', 0), ('stepped', 1), ('finished', 4), ('began', 4), ('stepped', 5), ('finished', 6),
    ]  # fmt: skip


def test_a_clock_that_was_set_back_keeps_goodput_between_0_and_1(tmp_path, monkeypatch):
    """By an hour, after 100 s; then half of 200 s by the clock,
    which the second process does not know, were training.
    """
    now = time.time() + 3600
    for seconds, event in ((0, 'began'), (100, 'stepped')):
        monkeypatch.setattr(attempts.time, 'time', lambda seconds=seconds: now + seconds)
        note(tmp_path, event, step=0, compile=0.0)
    monkeypatch.undo()
    for kept, expected in (50.0, 0.5), (500.0, 0.5):  # no more than there was
        clock = Clock(tmp_path, writes=True, step=3, description={'productive_seconds': kept})
        assert goodput(clock.seconds()) == pytest.approx(expected, rel=0.01)


def test_the_causes_of_two_attempts_are_all_of_the_time_in_metrics_and_report(small):
    """The first attempt began 100 s before it did, was alive for 2 s more, and is killed after step 5."""
    values = small | {'checkpoint': {'every': 3}, 'eval': {'every': 3}}
    run, began = Path(small['run_dir']), time.time()

    def kill():
        raise Killed

    with pytest.raises(Killed):
        pretrain(config_from_values(values), progress=At(5, kill))
    killed = time.time()
    for path in run / 'attempts.jsonl', run / 'pauses.jsonl':
        records = [json.loads(line) for line in path.read_text().splitlines() if '"failed"' not in line]
        path.write_text(''.join(json.dumps(one | {'time': one['time'] - 100}) + '\n' for one in records))
    os.utime(run / 'attempts.jsonl', (killed, killed - 98))
    pretrain(config_from_values(values), progress=Quiet())
    seconds = 100 + time.time() - began
    last = lines_of(small, 'goodput')[-1]
    causes = {key.removeprefix('seconds/'): n for key, n in last.items() if key.startswith('seconds/')}
    assert seconds - (time.time() - killed) < sum(causes.values()) < seconds
    assert last['goodput'] == pytest.approx(causes['kept'] / sum(causes.values()), abs=1e-4)
    assert 2 < causes['lost'] < 2 + killed - began
    assert 97 < causes['scheduling'] < 98 + time.time() - killed
    assert {'kept', 'compile', 'checkpoint', 'restore', 'startup', 'evaluation'} <= causes.keys()
    shown = read_run(run).seconds
    assert sum(causes.values()) < sum(shown.values()) < seconds
    for cause in 'lost', 'scheduling', 'restore', 'startup', 'compile':
        assert shown[cause] == pytest.approx(causes[cause], abs=0.05), cause


def test_a_wait_for_a_batch_is_counted_from_when_the_device_has_nothing_to_do(tmp_path):
    clock = Clock(tmp_path, writes=True, step=0, description={})
    clock.start(0)
    metrics = StepMetrics.__new__(StepMetrics)
    metrics.clock = clock
    device, batch = Device(host=0.0, dispatch=lambda step: 'nothing'), Future()
    metrics._pending = 1, device.step({'loss': 1.0})
    timer = threading.Timer(0.1, batch.set_result, [None])
    timer.start()
    with metrics.waiting(batch):  # the device is busy until after the batch is there
        pass
    timer.join()
    assert (clock.done, device.is_busy()) == (0, True)
    device.now += 2.0
    batch = Future()
    with metrics.waiting(batch):
        time.sleep(0.05)
    assert clock.done == 1
    clock.stepped(1, pytest.fail)
    assert 0.05 <= clock.seconds()['data'] < 0.1


def test_the_wait_for_a_state_in_memory_is_before_the_line_of_a_step_and_not_in_its_time(small, tmp_path, monkeypatch):
    logged, metrics = [], Path(small['run_dir']) / 'metrics.jsonl'

    def settle(memory):
        time.sleep(0.1)
        logged.append(max((line['step'] for line in read_metrics(metrics)), default=0))

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(Memory, 'settle', settle)
    pretrain(config_from_values(small | {'checkpoint': {'every': 0, 'memory': {'every': 1}}}), progress=Quiet())
    assert logged == [0, 1, 2, 3, 4, 6]  # before the last checkpoint, all are logged
    assert read_metrics(metrics)[-1]['seconds/checkpoint'] >= 5 * 0.1  # the line is written before the last wait


def test_a_state_in_memory_is_no_interruption_after_which_slow_steps_are_not_looked_for(tmp_path):
    clock, counts = Clock(tmp_path, writes=True, step=0, description={}), []
    for work in ('_remember', '_save', 'remember', 'trace'):
        with clock.paused(work, 1):
            counts.append(clock.interruptions)
    assert counts == [0, 1, 1, 2]


def test_torn_and_foreign_events_do_not_prevent_a_start(small):
    small |= {'steps': 2, 'schedule': {}}
    path = Path(small['run_dir']) / 'attempts.jsonl'
    path.parent.mkdir()
    path.write_bytes(b'[1]\n{"time": null, "event": "began"}\n{"event": "began"}\n{"time": 17')
    for _ in range(2):
        pretrain(config_from_values(small), progress=Quiet())
    assert [event['event'] for event in read_attempts(path.parent)] == [
        'began', 'stepped', 'finished', 'began', 'finished',
    ]  # fmt: skip


def test_pauses_are_written_with_their_work_and_time(small):
    values = small | {'checkpoint': {'every': 3}, 'eval': {'every': 2}}
    began = time.time()
    pretrain(config_from_values(values), progress=Quiet())
    seconds = time.time() - began
    pauses = [json.loads(line) for line in (Path(small['run_dir']) / 'pauses.jsonl').read_text().splitlines()]
    work = [(pause['step'], pause['work']) for pause in pauses]
    assert work == [(2, 'evaluate'), (3, 'save'), (4, 'evaluate'), (6, 'evaluate'), (6, 'save'), (6, 'finish')]
    assert all(began <= pause['time'] <= began + seconds for pause in pauses)
    assert 0 < sum(pause['seconds'] for pause in pauses) < seconds


def test_a_rollback_is_an_event_and_takes_its_time_back(tmp_path):
    clock = Clock(tmp_path, writes=True, step=0, description={})
    for step in (1, 2, 3):
        clock.stepped(step, pytest.fail)
    clock.rolled_back(1, {'productive_seconds': 0.0})
    events = [(event['event'], event['step'], event.get('from_step')) for event in read_attempts(tmp_path)]
    assert events == [('began', 0, None), ('stepped', 1, None), ('rolled back', 1, 3)]
    assert read_run(tmp_path).rollbacks[0]['from_step'] == 3


@dataclasses.dataclass
class Device:
    """A device that takes 1 s for a step; only it and the host's own work, also of 1 s, move the time.

    Args:
        host: seconds that the host needs after each step, to show it.
        dispatch: a step -> what its dispatch waits for: 'nothing', the step 'before', or the step 'itself'.
    """

    host: float
    dispatch: object
    now: float = 0.0
    free: float = 0.0  # when all steps that were dispatched are done
    steps: int = 0

    def step(self, metrics):
        self.steps += 1
        before, self.free = self.free, max(self.now, self.free) + 1.0
        self.now = max(self.now, {'nothing': 0, 'before': before, 'itself': self.free}[self.dispatch(self.steps)])
        return {name: Later(self, self.free, float(value)) for name, value in metrics.items()}

    def is_busy(self):
        return self.now < self.free


@dataclasses.dataclass
class Later:
    """A number that is known when its step is done."""

    device: Device
    at: float
    value: float

    def is_ready(self):
        return self.device.now >= self.at

    def __float__(self):
        self.device.now = max(self.device.now, self.at)
        return self.value

    def __int__(self):
        return int(float(self))

    def __bool__(self):
        return bool(float(self))


class Slow(Quiet):
    """Takes time to show a step."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def update(self, metrics):
        self.device.now += self.device.host


@pytest.mark.parametrize(
    ('host', 'dispatch', 'seconds'),
    [
        (0.0, lambda step: 'nothing', 1),
        (0.0, lambda step: 'before', 1),
        (0.0, lambda step: 'itself', 1),
        (0.0, lambda step: ('nothing', 'itself')[step % 2], 1),
        (0.0, lambda step: ('nothing', 'before', 'itself')[step % 3], 1),
        (2.0, lambda step: 'nothing', 2),
        (2.0, lambda step: 'itself', 3),
        (0.9, lambda step: ('nothing', 'itself')[step % 2], 1.45),
    ],
    ids=[
        'asynchronous',
        'waits for the step before',
        'synchronous',
        'mixed',
        'all',
        'slow host',
        'slow and sync',
        'both',
    ],
)
def test_logged_speeds_are_those_of_the_device_however_steps_are_dispatched(
    values, monkeypatch, host, dispatch, seconds
):
    device = Device(host, dispatch)

    def load(run, lowered):
        compiled = lowered.compile()

        def call(state, batch):
            state, metrics = compiled(state, batch)
            return state, device.step(metrics)

        return call

    fake = types.SimpleNamespace(perf_counter=lambda: device.now, time=time.time)
    monkeypatch.setattr(clock_module, 'time', fake)
    small = values | {'model': BIGRAM, 'data': {'name': 'synthetic', 'vocab_size': 96}}
    small |= {'steps': 24, 'schedule': {}, 'eval': {'every': 9}}
    train(config_from_values(small), progress=Slow(device), compiled=load)
    speeds = [line['tokens_per_second'] / 128 for line in lines_of(small)]
    assert len(speeds) == 24
    assert statistics.median(speeds) == pytest.approx(1 / seconds, rel=0.1)
    assert max(speeds) <= 1.0 + 1e-9, 'a device of 1 step a second'
    assert min(speeds[1:]) > 0.5 / seconds
    assert statistics.harmonic_mean(speeds) == pytest.approx(24 / device.free, rel=0.1)


def test_the_seconds_of_measured_steps_are_shared_by_steps_that_were_found_done_together():
    assert seconds_of_steps([(1, 10.0), (2, 11.0), (3, 12.5)]) == [1.0, 1.5]
    assert seconds_of_steps([(2, 10.0), (2, 12.0), (4, 14.0), (5, 15.0)]) == [2.0, 2.0, 1.0]
