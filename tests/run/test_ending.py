"""How a run ended is in attempts.jsonl, whether it finished, was stopped or failed; the report never ends a run."""

from pathlib import Path

import pytest

from pretrax import config_from_values, pretrain
from pretrax.observe.attempts import read_attempts
from pretrax.run import run_log
from pretrax.view.record.run_record import read_run
from runs import At, Quiet, StoppedAt


def last_event(values):
    event = read_attempts(Path(values['run_dir']))[-1]
    return {key: value for key, value in event.items() if key not in ('time', 'alive')}


def test_a_finished_run_says_so(small):
    pretrain(config_from_values(small), progress=Quiet())
    assert last_event(small) == {'event': 'finished', 'step': 6, 'why': ''}
    assert read_run(small['run_dir']).state == ('finished', '')


def test_a_stopped_run_says_why(small):
    pretrain(config_from_values(small), progress=StoppedAt(2))
    assert last_event(small) == {'event': 'stopped', 'step': 3, 'why': 'signal'}
    assert read_run(small['run_dir']).state == ('stopped', 'signal')


def test_a_failed_run_says_why_and_fails_as_before(small):
    def fail():
        raise RuntimeError('the disk is\non fire')

    with pytest.raises(RuntimeError, match='on fire'):
        pretrain(config_from_values(small), progress=At(2, fail))
    assert last_event(small) == {'event': 'failed', 'step': 2, 'why': 'RuntimeError: the disk is'}
    assert read_run(small['run_dir']).state.name == 'failed'


def test_every_end_writes_a_report_of_the_state(small):
    def fail():
        raise RuntimeError('no more')

    values = small | {'log': {'every': 1}}
    path = Path(small['run_dir']) / 'report.html'
    with pytest.raises(RuntimeError, match='no more'):
        pretrain(config_from_values(values), progress=At(2, fail))
    assert '<span class="state" data-state="failed">' in path.read_text()
    pretrain(config_from_values(values), progress=Quiet())
    assert '<span class="state" data-state="finished">' in path.read_text()
    path.unlink()
    pretrain(config_from_values(small | {'log': {'report': False}}), progress=Quiet())
    assert not path.exists()


def test_what_fails_at_the_end_is_one_warning(small, monkeypatch):
    def fail(log, how, report):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(run_log, '_AT_THE_END', {'writing the report': fail, 'noting how the run ended': fail})
    progress = Quiet()
    result = pretrain(config_from_values(small), progress=progress)
    assert int(result.state.step) == 6
    assert [line for line in progress.said if 'WARNING' in line] == [
        'WARNING: writing the report failed (OSError: [Errno 28] No space left on device)',
        'WARNING: noting how the run ended failed (OSError: [Errno 28] No space left on device)',
    ]
