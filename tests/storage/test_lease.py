"""One process at a time has a lease in a bucket, on real servers."""

import json
import subprocess
import sys
import threading
import time

import pytest

from pretrax.storage import BucketPath
from pretrax.storage import lease as lease_module
from pretrax.storage.lease import HeldError, Lease, LostError, holder_of

HOLD = (
    'import sys; from pretrax.storage import BucketPath; from pretrax.storage.lease import Lease\n'
    'with Lease(BucketPath(sys.argv[1]), float(sys.argv[2])).held() as lease:\n'
    '    print("held", flush=True); sys.stdin.read()'
)


@pytest.fixture
def path(bucket):
    return BucketPath(f'{bucket.url}/runs/a/lock')


@pytest.fixture
def holder(path):
    """A process that has the lease for two seconds at a time."""
    command = [sys.executable, '-c', HOLD, str(path), '2']
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == 'held\n'
        yield process
        process.kill()


def elsewhere(monkeypatch):
    """As on another machine, which sees no processes of this one."""
    monkeypatch.setattr(lease_module, 'has_ended', lambda process: False)


def test_the_second_process_is_refused_and_learns_who_has_the_lease(path, holder):
    said = []
    refusal = pytest.raises(
        HeldError, match=f'runs/a is held by process {holder.pid} on .* since .* UTC, and still renews'
    )
    with refusal, Lease(path, 60, said.append).held():
        pytest.fail('it was taken')
    assert 'waiting up to 2 s to see whether it still runs' in said[0]
    assert f'process {holder.pid} on' in holder_of(path)


def test_the_lease_of_a_process_of_this_machine_that_was_killed_is_free_at_once(path, holder):
    holder.kill()
    holder.wait()
    assert holder_of(path) == ''
    with Lease(path, 2, pytest.fail).held() as lease:
        assert lease.previous


def test_a_lease_that_was_released_is_free_at_once(path, holder, monkeypatch):
    elsewhere(monkeypatch)
    holder.communicate('')
    with Lease(path, 60, pytest.fail).held() as lease:
        assert lease.previous


def test_the_lease_of_a_machine_that_is_gone_expires(path, holder, monkeypatch):
    """By the clock of the process that waits; the clock of the holder was a year ahead."""
    elsewhere(monkeypatch)
    holder.kill()
    holder.wait()
    said = []
    began = time.monotonic()
    with Lease(path, 60, said.append).held() as lease:
        assert lease.previous
    assert time.monotonic() - began >= 2
    assert len(said) == 1


@pytest.mark.parametrize('confirms', [False, True])
def test_a_holder_that_was_stopped_too_long_has_lost_the_lease(path, confirms, monkeypatch):
    elsewhere(monkeypatch)
    now = [0.0]
    stopped = Lease(path, 1, print, clock=lambda: now[0])
    stopped._take()
    with Lease(path, 60, print).held() as second:
        stopped.check()  # it does not know: its clock may have stood still
        second.confirm()
        now[0] = 0.5
        if confirms:
            with pytest.raises(LostError, match='is held by process'):
                stopped.confirm()
        now[0] = 1.0
        with pytest.raises(LostError, match='is held by process'):
            stopped.check()
        with pytest.raises(LostError):
            stopped.check_not_lost()
        stopped._release()
        second._renew()
        second.check()


def test_of_two_that_race_for_a_free_lease_one_gets_it(path):
    won, refused = [], []

    def race():
        try:
            with Lease(path, 1, lambda text: None).held() as lease:
                won.append(lease.previous)
                until.wait(60)
        except HeldError as error:
            refused.append(error)
            if len(refused) == 3:
                until.set()

    until = threading.Event()
    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (won, len(refused)) == ([''], 3)


def test_a_lost_answer_does_not_lose_the_lease(bucket, path):
    with Lease(path, 60, pytest.fail).held() as lease:
        bucket.fault(method='PUT' if bucket.scheme == 's3' else 'POST', match='lock', lose_answer=True)
        lease._renew()
        lease._renew()
        lease.check()
    assert json.loads(bucket.content('runs/a/lock'))['released'] is True


def test_an_unreachable_bucket_does_not_lose_the_lease(bucket, path, monkeypatch):
    monkeypatch.setenv('PRETRAX_STORAGE_RETRY_SECONDS', '0')
    said = []
    with Lease(path, 0.8, said.append).held() as lease:
        with bucket.down():
            time.sleep(1.2)
            with pytest.raises(OSError, match='does not answer'):
                lease.check()
        lease.check()
    assert [line for line in said if 'cannot be renewed' in line]


@pytest.mark.parametrize('content', [b'x', b'\xff', b'[]', b'{"seconds": "x", "process": 1}', b'[' * 9999])
def test_a_foreign_object_is_watched_like_a_lease(bucket, path, content):
    bucket.put('runs/a/lock', content)
    began = time.monotonic()
    with Lease(path, 1, lambda text: None).held() as lease:
        assert lease.previous == ''
    assert time.monotonic() - began >= 1


def test_a_removed_lease_is_written_again(bucket, path):
    with Lease(path, 60, pytest.fail).held() as lease:
        bucket.delete('runs/a/lock')
        lease._renew()
        lease.check()
        assert json.loads(bucket.content('runs/a/lock'))['released'] is False
