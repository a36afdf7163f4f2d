"""What a run notifies of, by a real command: each event once, and nothing that the configuration leaves out."""

import json
import sys
import time
from pathlib import Path

import pytest

from pretrax import config_from_values, pretrain, register
from pretrax.data.batches.source import Source
from pretrax.errors import UserError
from pretrax.observe import notify
from pretrax.observe.attempts import note
from pretrax.observe.notices import RunNotices
from runs import At, Quiet
from small import VOCAB, random_batch

COMMAND = 'import sys; open(sys.argv[1], "a").write(sys.stdin.read() + "\\n")'


@pytest.fixture
def notified(small, tmp_path):
    """Configures the command, and returns a function that reads the events."""
    out = tmp_path / 'events.jsonl'
    small['log'] = small.get('log', {}) | {'notify': {'command': [sys.executable, '-c', COMMAND, str(out)]}}

    def events():
        lines = out.read_text().splitlines() if out.exists() else []
        return [(event['event'], event['step'], event['why']) for event in map(json.loads, lines)]

    return events


class Steps:
    """A run that has no steps but those that the test does."""

    def __init__(self, values, directory, stalled_seconds=600.0):
        values = values | {'log': {'notify': values['log']['notify'] | {'stalled_seconds': stalled_seconds}}}
        self.step = 0
        self.notices = RunNotices(config_from_values(values), directory, lambda: self.step, pytest.fail)


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_run_that_stalls_and_goes_on(small, notified, tmp_path):
    run = Steps(small, tmp_path, stalled_seconds=0.1)
    time.sleep(0.3)  # the step is compiled
    run.step = 3
    wait_for(notified)
    run.step = 4
    wait_for(lambda: len(notified()) >= 2)
    run.notices.ended('finished', '')
    events = notified()
    assert [event for event, *_ in events[:2]] == ['stalled', 'recovered']
    assert events[0][1] == 3
    assert events[0][2].startswith('no step for ')
    assert events[1][1:] == (4, 'the run had stalled')
    assert events[-1] == ('finished', 4, '')


def test_a_run_that_returns_to_an_earlier_step(small, notified, tmp_path):
    run = Steps(small, tmp_path)
    run.step = 4
    run.notices.diverged(2)
    run.step = 2
    run.notices.ended('stopped', 'signal')
    assert notified() == [
        ('diverged', 4, 'too many steps were skipped; the run returns to step 2'),
        ('stopped', 2, 'signal'),
    ]


@pytest.mark.parametrize(
    ('events', 'recovers'),
    [
        ((), False),
        (('began', 'finished'), False),
        (('began', 'stepped'), True),
        (('began', 'failed'), True),
        (('started', 'ended'), True),
    ],
)
def test_a_process_after_one_that_was_killed_or_failed(small, notified, tmp_path, events, recovers):
    for event in events:
        note(tmp_path, event, code=-9)
    run = Steps(small, tmp_path)
    run.step = 1
    run.notices.ended('finished', '')
    assert [event for event, *_ in notified()] == [*['recovered'] * recovers, 'finished']


def test_a_run_notifies_of_its_end_and_a_secret_url_is_in_none_of_its_files(small, notified, monkeypatch):
    monkeypatch.setattr(notify, 'WAIT', 0.0)
    small['log']['notify'] |= {'url': 'http://127.0.0.1:9/services/SECRET'}
    progress = Quiet()
    pretrain(config_from_values(small), progress=progress)
    assert notified() == [('finished', 6, '')]
    assert any('log.notify: "finished" was not sent: 127.0.0.1 does not answer' in line for line in progress.said)
    directory = Path(small['run_dir'])
    files = [path for path in directory.rglob('*') if path.is_file()]
    assert 'config.yaml' in {path.name for path in files}
    assert not [path for path in files if b'SECRET' in path.read_bytes()]
    assert '"${oc.env:PRETRAX_NOTIFY_URL,null}"' in (directory / 'config.yaml').read_text()


@pytest.mark.slow
def test_a_failed_run_and_one_that_continues_it(small, notified):
    def fail():
        raise RuntimeError('the disk is\non fire')

    with pytest.raises(RuntimeError):
        pretrain(config_from_values(small), progress=At(2, fail))
    assert notified() == [('failed', 2, 'RuntimeError: the disk is')]
    pretrain(config_from_values(small), progress=Quiet())
    assert [event for event, *_ in notified()] == ['failed', 'recovered', 'finished']


class Spiking(Source):
    """Batches of the bigram model whose third and fourth give no finite loss."""

    vocab_size = VOCAB

    def batch(self, step, rows, batch_rows):
        batch = random_batch(batch_rows, seed=step)
        if step in (2, 3):
            batch.mask[0, 0] = float('nan')
        return type('Rows', (tuple,), {})(
            x[rows] for x in (batch.tokens, batch.targets, batch.segments, batch.positions, batch.mask)
        )


@register('data', 'spikes-of-test-notices')
def spikes(request):
    return Spiking()


@pytest.mark.slow
def test_a_run_that_diverges_is_rolled_back_and_recovers(small, notified):
    small |= {'data': {'name': 'spikes-of-test-notices'}, 'checkpoint': {'every': 2}, 'faults': {'rollback_after': 2}}
    pretrain(config_from_values(small), progress=Quiet())
    events = notified()
    assert [event for event, *_ in events] == ['diverged', 'recovered', 'finished']
    assert events[0][1:] == (4, 'too many steps were skipped; the run returns to step 2')
    small |= {'run_dir': small['run_dir'] + '-2', 'faults': {'rollback_after': 2, 'rollbacks': 0}}
    with pytest.raises(UserError):
        pretrain(config_from_values(small), progress=Quiet())
    assert notified()[3][0] == 'failed'
