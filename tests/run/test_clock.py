"""The clock: checkpoints by minutes, and goodput."""

import json
import time
from pathlib import Path

import pytest

from pretrax import config_from_values, pretrain
from pretrax.checkpoint import read_description, steps_in
from pretrax.observe import attempts
from pretrax.observe.attempts import note, read_attempts
from pretrax.observe.metrics import read_metrics
from pretrax.run.clock import Clock
from pretrax.view.record.run_record import read_run
from runs import Quiet


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
        note(tmp_path, event, step=0)
    monkeypatch.undo()
    clock = Clock(tmp_path, writes=True, step=3, description={'productive_seconds': 50.0})
    assert clock.goodput() == pytest.approx(0.5, rel=0.01)
    clock.rewind({'productive_seconds': 500.0})
    assert clock.goodput() == 1.0


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
    assert work == [(2, 'evaluate'), (3, 'save'), (4, 'evaluate'), (6, 'evaluate'), (6, 'save')]
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
