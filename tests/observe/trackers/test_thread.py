"""A tracker that is slow, hangs, or fails costs a run nothing but a warning."""

import threading
import time

import pytest

from pretrax.observe.metrics import MetricsLog
from pretrax.observe.trackers import thread as thread_module
from pretrax.observe.trackers.base import Line
from pretrax.observe.trackers.thread import TrackerThread


class Recorder:
    """A tracker that can be stopped: `gate` is closed while its server does not answer."""

    name, where = 'recorder', 'here'

    def __init__(self, has=(), rewinds=True):
        self.lines, self.texts, self.calls, self.has, self.rewinds = [], [], [], dict(has), rewinds
        self.gate = threading.Event()
        self.gate.set()

    def resume(self, step):
        self.calls.append(('resume', step))
        return self.has

    def rewind(self, step):
        self.calls.append(('rewind', step))
        return self.rewinds

    def log(self, lines):
        self.gate.wait()
        self.lines += [(step, dict(numbers)) for step, numbers, _ in lines]

    def show(self, step, key, content):
        self.texts.append((step, key, content))

    def flush(self):
        self.calls.append('flush')

    def close(self, succeeded):
        self.calls.append(('close', succeeded))


def test_lines_that_the_tracker_does_not_have_are_sent_first(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_text(''.join(f'{{"step": {step}, "loss": {step}.5, "tokens": {step}}}\n' for step in (1, 2, 3)))
    tracker = Recorder(has={'loss': 2, 'tokens': 1})  # killed in the middle of a line
    with MetricsLog(path, [tracker], resumed_step=3) as log:
        log.write({'step': 4, 'loss': 4.5})
    assert tracker.lines == [
        (2, {'tokens': 2}),
        (3, {'loss': 3.5, 'tokens': 3}),
        (4, {'loss': 4.5}),
    ]


@pytest.mark.parametrize('rewinds', [True, False])
def test_steps_after_a_rollback_replace_the_earlier_ones_or_are_left_out(tmp_path, rewinds):
    tracker = Recorder(rewinds=rewinds)
    with MetricsLog(tmp_path / 'metrics.jsonl', [tracker], say=lambda _: None) as log:
        for step in (1, 2, 3):
            log.write({'step': step, 'loss': 1.0})
        log.show(3, 'samples', 'before')
        log.rewind(1)
        for step in (2, 3, 4):
            log.write({'step': step, 'loss': 2.0})
        log.show(3, 'samples', 'after')
    again = [(2, {'loss': 2.0}), (3, {'loss': 2.0})] if rewinds else []
    assert tracker.lines == [(step, {'loss': 1.0}) for step in (1, 2, 3)] + again + [(4, {'loss': 2.0})]
    assert [text for *_, text in tracker.texts] == (['before', 'after'] if rewinds else ['before'])


def test_a_hanging_tracker_does_not_delay_lines_or_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(thread_module, 'CLOSE_SECONDS', 1.0)
    monkeypatch.setattr('pretrax.observe.metrics.FLUSH_SECONDS', 1.0)
    hangs, sound, said = Recorder(), Recorder(), []
    hangs.gate.clear()
    log = MetricsLog(tmp_path / 'metrics.jsonl', [hangs, sound], say=said.append)
    began = time.monotonic()
    for step in range(1, 101):
        log.write({'step': step, 'loss': 1.0})
        log.flush()
    assert time.monotonic() - began < 50  # 100 checkpoints; one has waited 1 s
    log.close()
    assert [step for step, _ in sound.lines] == [*range(1, 101)]
    assert hangs.lines == []
    assert [line for line in said if 'recorder' in line] == [
        'WARNING: recorder could not be finished (it took longer than 1 s). '
        'It receives no more numbers of this run; metrics.jsonl has all of them.'
    ]
    hangs.gate.set()


def test_a_tracker_that_is_too_slow_is_dropped_when_its_queue_is_full(monkeypatch):
    monkeypatch.setattr(thread_module, 'WAITING', 5)
    tracker, said = Recorder(), []
    tracker.gate.clear()
    thread = TrackerThread(tracker, [], 0, said.append, close_seconds=5)
    for step in range(1, 600):
        thread.log(Line(step, {'loss': 1.0}, 0.0))
    assert [line.split(' (')[0] for line in said] == ['WARNING: recorder is too slow']
    tracker.gate.set()
    thread.close(True)
    assert len(said) == 1


def test_a_tracker_that_fails_while_it_resumes_is_dropped(tmp_path):
    tracker, said = Recorder(), []
    tracker.resume = lambda step: 1 // 0
    with MetricsLog(tmp_path / 'metrics.jsonl', [tracker], say=said.append) as log:
        log.write({'step': 1, 'loss': 1.0})
        log.flush()
    assert [line.split(':')[0] for line in said] == ['WARNING']
    assert 'ZeroDivisionError' in said[0]
