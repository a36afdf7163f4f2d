"""Conditional writes in a directory that several machines share."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pretrax.storage import shared_path as module
from pretrax.storage.lease import HeldError, Lease
from pretrax.storage.shared_path import SharedPath, locate_shared

ADD = (
    'import sys; from pretrax.storage.shared_path import SharedPath\n'
    'path = SharedPath(sys.argv[1])\n'
    'print("begun", flush=True)\n'
    'while True:\n'
    '    content, version = path.read_version()\n'
    '    if path.write_version(str(int(content) + 1).encode(), version): print("added", flush=True)'
)


@pytest.fixture
def path(tmp_path):
    return locate_shared(str(tmp_path / 'new' / 'file'))


def test_a_file_is_created_once(path):
    assert path.create(b'a')
    assert path.create(b'a')  # as a request whose answer was lost
    assert not path.create(b'b')
    assert path.read_bytes() == b'a'
    assert os.listdir(path.parent) == ['file']


def test_of_many_threads_that_create_a_file_one_wins(path):
    barrier, won = threading.Barrier(8), []

    def create(i):
        barrier.wait()
        if path.create(b'%d' % i):
            won.append(i)

    threads = [threading.Thread(target=create, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() == b'%d' % won[0]
    assert len(won) == 1


def test_a_write_needs_the_version_that_was_read(path):
    missing = path.read_version()
    assert missing.content is None
    first = path.write_version(b'a', missing.version)
    assert path.read_version() == (b'a', first)
    assert path.write_version(b'b', missing.version) is None
    assert path.write_version(b'b', first)
    assert path.write_version(None, first) is None
    assert path.write_version(None, path.read_version().version) == missing.version
    assert not path.exists()


def test_processes_that_are_killed_while_they_write_lose_no_other_write(path):
    path.create(b'0')
    added = 0
    for _ in range(5):
        command = [sys.executable, '-c', ADD, str(path)]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for process in processes:
            assert process.stdout.readline() == 'begun\n'
            process.stdout.readline()
        for process in processes:
            process.send_signal(signal.SIGKILL)
        added += sum(1 + process.communicate()[0].count('added') for process in processes)
    assert added <= int(path.read_bytes()) <= added + 10  # a kill may hide the line of a write


def test_a_process_that_is_stopped_under_the_lock_is_an_error_and_no_end(path, monkeypatch):
    monkeypatch.setattr(module, '_LONGEST_WAIT', 0.1)
    path.create(b'a')
    with path._locked(), pytest.raises(OSError, match='another process has its lock'):
        path.write_version(b'b', path.read_version().version)


def test_a_lease_in_a_shared_directory(path, monkeypatch):
    monkeypatch.setattr('pretrax.storage.lease.has_ended', lambda process: False)
    with Lease(path, 0.4, lambda text: None).held() as first:
        with pytest.raises(HeldError, match='still renews'), Lease(path, 0.4, lambda text: None).held():
            pass
        first.confirm()
    began = time.monotonic()
    with Lease(path, 60, pytest.fail).held() as second:
        assert second.previous == first.token
    assert time.monotonic() - began < 30
    assert isinstance(path / 'x', SharedPath)
