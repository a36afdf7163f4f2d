"""The directory of a run in a bucket: its lease, what is fetched, and what is uploaded, on real servers."""

import contextlib
import json
import subprocess
import sys
import time

import pytest

from pretrax import config_from_values
from pretrax.errors import UnavailableError, UserError
from pretrax.run.directory import local_directory, open_directory
from pretrax.storage import lease


@pytest.fixture
def config(s3, small, tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return config_from_values(small | {'run_dir': f'{s3.url}/runs/a', 'faults': {'lease_seconds': 2}})


def test_what_a_run_writes_is_uploaded_at_its_end_and_the_lease_is_released(config, s3):
    with open_directory(config.run_dir, config.faults.lease_seconds, print) as directory:
        assert directory.local == local_directory(config.run_dir)
        (directory.local / 'config.yaml').write_text('a: 1')
        assert json.loads(s3.content('runs/a/lock'))['released'] is False
    assert s3.keys() == ['runs/a/config.yaml', 'runs/a/lock']
    assert json.loads(s3.content('runs/a/lock'))['released'] is True


def test_an_error_keeps_its_name_and_what_was_written_is_uploaded(config, s3):
    with (
        pytest.raises(ZeroDivisionError),
        open_directory(config.run_dir, config.faults.lease_seconds, print) as directory,
    ):
        (directory.local / 'failure.txt').write_text('why')
        raise ZeroDivisionError
    assert s3.content('runs/a/failure.txt') == b'why'


def test_a_bucket_that_is_gone_at_the_end_is_an_error_and_nothing_is_lost(config, s3):
    with (
        pytest.raises(UnavailableError, match='nothing is lost: what is not uploaded is in') as failed,
        open_directory(config.run_dir, config.faults.lease_seconds, print) as directory,
    ):
        (directory.local / 'failure.txt').write_text('why')
        s3.fault(method='PUT', match='failure', times=99, status=503)
    assert str(directory.local) in str(failed.value)
    assert (directory.local / 'failure.txt').read_text() == 'why'
    s3.faults.clear()
    with open_directory(config.run_dir, config.faults.lease_seconds, print):
        pass
    assert s3.content('runs/a/failure.txt') == b'why'


@pytest.mark.parametrize('status', [403, 503])
def test_a_bucket_that_cannot_be_used_is_an_error_before_anything_is_done(config, s3, status):
    s3.fault(times=99, status=status)
    with (
        pytest.raises(UserError, match=r'run_dir: s3://.*/runs/a cannot be used: .*'),
        open_directory(config.run_dir, config.faults.lease_seconds, print),
    ):
        pytest.fail('it was opened')


HOLD = (
    'import sys; from pretrax.storage import BucketPath; from pretrax.storage.lease import Lease\n'
    'with Lease(BucketPath(sys.argv[1]), 2).held(): print("held", flush=True); sys.stdin.read()'
)


def test_a_second_process_is_refused_and_told_who_trains(config, s3):
    command = [sys.executable, '-c', HOLD, f'{s3.url}/runs/a/lock']
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b'held\n'
        refusal = pytest.raises(UserError, match=f'held by process {holder.pid} on .* since')
        with refusal as refused, open_directory(config.run_dir, config.faults.lease_seconds, print):
            pytest.fail('it was opened')
        assert 'its lease expires by itself' in str(refused.value)
        holder.communicate(b'')


def test_a_process_that_is_started_again_waits_for_the_lease_of_a_lost_host(config, monkeypatch):
    monkeypatch.setattr(lease, 'has_ended', lambda process: False)
    monkeypatch.setenv('PRETRAX_LOCK_SECONDS', '60')
    with contextlib.ExitStack() as lost:
        lost.enter_context(lease.Lease(config.run_dir / 'lock', 2).held())

        def report(text):
            if 'waiting, since it may be lost' in text:
                lost.close()

        with open_directory(config.run_dir, config.faults.lease_seconds, report) as directory:
            directory.check()


def test_a_run_that_was_taken_over_stops_and_uploads_nothing(config, s3, monkeypatch):
    monkeypatch.setattr(lease, '_RENEWALS', 100)
    stop = pytest.raises(UserError, match=r'another process has taken over this run: .* is held by robber')
    with stop as stopped, open_directory(config.run_dir, config.faults.lease_seconds, print) as directory:
        s3.put('runs/a/lock', b'{"holder": "robber"}')
        (directory.local / 'failure.txt').write_text('why')
        until = time.monotonic() + 60
        while time.monotonic() < until:
            directory.check()
            time.sleep(0.02)
    assert f'its files are in {directory.local}' in str(stopped.value)
    assert s3.keys() == ['runs/a/lock']
    assert s3.content('runs/a/lock') == b'{"holder": "robber"}'


def test_a_machine_that_has_nothing_fetches_the_logs(config, s3, tmp_path, monkeypatch):
    with open_directory(config.run_dir, config.faults.lease_seconds, print) as directory:
        (directory.local / 'metrics.jsonl').write_text('{"step": 1}\n')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'another'))
    with open_directory(config.run_dir, config.faults.lease_seconds, print) as directory:
        assert directory.local.is_relative_to(tmp_path / 'another')
        assert (directory.local / 'metrics.jsonl').read_text() == '{"step": 1}\n'


def test_a_run_on_a_disk_needs_no_bucket(small, tmp_path):
    config = config_from_values(small)
    with open_directory(config.run_dir, config.faults.lease_seconds, print) as directory:
        assert (directory.local, directory.lease, directory.mirror) == (tmp_path / 'run', None, None)
        directory.check()
        directory.upload(5)
