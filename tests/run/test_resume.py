"""Checks before a run is resumed: one process, a writable directory, the same configuration."""

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pretrax import config_from_values, pretrain
from pretrax.cli import main
from pretrax.errors import UserError
from pretrax.run.resume import lock_run
from runs import Quiet, StoppedAt, write_yaml


def test_a_run_is_trained_by_one_process_at_a_time(small):
    directory = Path(small['run_dir'])
    holder = subprocess.Popen(
        [sys.executable, '-c', 'import pathlib, sys; from pretrax.run.resume import lock_run\n'
         'with lock_run(pathlib.Path(sys.argv[1])): print("held", flush=True); sys.stdin.read()', str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        assert holder.stdout.readline() == b'held\n'
        with pytest.raises(UserError, match=f'is being trained by process {holder.pid} on ') as refusal:
            pretrain(config_from_values(small), progress=Quiet())
        assert 'use another name=' in str(refusal.value)
        assert sorted(path.name for path in directory.iterdir()) == ['lock']
        holder.kill()
    assert 'process' in (directory / 'lock').read_text()  # left by the dead process, and no obstacle
    with lock_run(directory):
        pass


def test_a_process_that_is_started_again_waits_for_the_lock_of_a_lost_host(tmp_path, monkeypatch):
    monkeypatch.setenv('PRETRAX_LOCK_SECONDS', '60')
    told = []
    with contextlib.ExitStack() as lost:
        lost.enter_context(lock_run(tmp_path))

        def report(text):
            told.append(text)
            lost.close()

        with lock_run(tmp_path, report):
            assert told == [f'{tmp_path} is locked by process {os.getpid()} on {socket.gethostname()}; '
                            'waiting up to 60 s, since it may be lost']  # fmt: skip
            monkeypatch.setenv('PRETRAX_LOCK_SECONDS', '0.1')
            with pytest.raises(UserError, match='is being trained by'), lock_run(tmp_path, told.append):
                pass


def test_without_file_locks_a_run_warns_and_trains(tmp_path, monkeypatch):
    """As some cluster file systems say it; there is none here to mount."""

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, 'flock', no_locks)
    said = []
    with lock_run(tmp_path / 'run', said.append):
        assert (tmp_path / 'run' / 'lock').read_text().startswith(f'process {os.getpid()} on ')
    [warning] = said
    assert 'cannot be locked (No locks available), so nothing prevents a second process' in warning


def test_resume_refuses_a_changed_configuration_with_a_diff(small, tmp_path, capsys):
    config = write_yaml(small, tmp_path / 'run.yaml')
    pretrain(config_from_values(small), progress=StoppedAt(1))
    metrics = (tmp_path / 'run' / 'metrics.jsonl').read_bytes()
    resolved = (tmp_path / 'run' / 'config.yaml').read_bytes()
    with pytest.raises(SystemExit) as stopped:
        main(['train', config, 'optimizer.learning_rate=0.5', 'batch.tokens=256'])
    assert stopped.value.code == 2
    complaint = capsys.readouterr().err
    assert 'trained with another configuration' in complaint
    assert 'optimizer.learning_rate: 0.01 -> 0.5' in complaint
    assert 'batch.tokens: 128 -> 256' in complaint
    assert '--allow-changes' in complaint
    assert len(complaint.splitlines()) <= 10
    assert (tmp_path / 'run' / 'metrics.jsonl').read_bytes() == metrics
    assert (tmp_path / 'run' / 'config.yaml').read_bytes() == resolved


def test_changes_can_be_allowed_and_harmless_changes_always_are(small):
    pretrain(config_from_values(small), progress=StoppedAt(1))
    small['log'], small['checkpoint'], small['name'] = {'every': 2}, {'every': 50}, 'renamed'
    harmless = StoppedAt(4)
    pretrain(config_from_values(small), progress=harmless)
    assert not any('changed since' in line for line in harmless.said)

    small['optimizer']['learning_rate'] = 0.5
    changed = Quiet()
    result = pretrain(config_from_values(small), allow_changes=True, progress=changed)
    assert any('changed since the run began: optimizer.learning_rate: 0.01 -> 0.5' in line for line in changed.said)
    assert result.metrics['step'] == 6


@pytest.mark.parametrize('place', ['file', 'file/below', '/dev/null'])
def test_an_unwritable_run_directory_is_reported_before_the_data_is_read(place, values, tmp_path):
    (tmp_path / 'file').write_text('')
    values |= {'run_dir': str(tmp_path / place), 'data': {'text': 'nothing/here'}}
    with pytest.raises(UserError, match=r'run_dir: .* cannot be used: .* is a file'):
        pretrain(config_from_values(values), progress=Quiet())


@pytest.mark.parametrize('lose', [shutil.rmtree, lambda path: shutil.rmtree(path / '6')])
def test_a_run_whose_checkpoints_are_gone_is_refused_and_keeps_its_metrics(lose, small):
    run = Path(small['run_dir'])
    pretrain(config_from_values(small), progress=Quiet())
    lose(run / 'checkpoints')
    metrics = (run / 'metrics.jsonl').read_bytes()
    with pytest.raises(UserError, match=r'has no checkpoint, but .* has steps of this run\nrestore .* from a backup'):
        pretrain(config_from_values(small), progress=Quiet())
    assert (run / 'metrics.jsonl').read_bytes() == metrics
    (run / 'metrics.jsonl').rename(run / 'old.jsonl')
    assert pretrain(config_from_values(small), progress=Quiet()).metrics['step'] == 6


def test_resume_refuses_changed_text(small, documents):
    short = small | {'steps': 2, 'schedule': {}}
    pretrain(config_from_values(short), progress=Quiet())
    lines = documents.read_text().splitlines(keepends=True)
    documents.write_text(''.join(lines[:-1]))
    with pytest.raises(UserError, match='was trained on other tokens: the text or the tokenizer has changed'):
        pretrain(config_from_values(short), progress=Quiet())
