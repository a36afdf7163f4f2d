"""A lock keeps other processes out until its process ends. The users' messages are tested where the locks are taken."""

import subprocess
import sys
import threading

import pytest

from pretrax.system.locks import LockedError, holder_of, lock_directory

HOLD = (
    'import pathlib, sys; from pretrax.system.locks import lock_directory\n'
    'file = lock_directory(pathlib.Path(sys.argv[1]), print); print("locked", flush=True); sys.stdin.read()'
)


@pytest.fixture
def holder(tmp_path):
    """A process that has the lock of a directory."""
    command = [sys.executable, '-c', HOLD, str(tmp_path / 'it')]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == 'locked\n'
        yield process
        process.kill()


def test_the_second_process_is_refused_and_learns_who_has_the_lock(tmp_path, holder):
    with pytest.raises(LockedError) as refused:
        lock_directory(tmp_path / 'it', print)
    assert refused.value.holder.startswith(f'process {holder.pid} on ')
    assert holder_of(tmp_path / 'it') == refused.value.holder


def test_a_removed_lock_file_admits_no_second_holder(tmp_path, holder):
    (tmp_path / 'it' / 'lock').unlink()
    assert holder_of(tmp_path / 'it') == 'another process'
    for _ in range(2):  # the first attempt creates the file again
        with pytest.raises(LockedError, match='another process'):
            lock_directory(tmp_path / 'it', print)
    holder.kill()
    holder.wait()
    with lock_directory(tmp_path / 'it', print):
        pass


def test_a_killed_process_releases_its_lock(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert holder_of(tmp_path / 'it') is None
    with lock_directory(tmp_path / 'it', print):
        pass


def test_who_waits_gets_the_directory_again_although_the_holder_removed_it(tmp_path, holder):
    waits = threading.Event()
    locked = []
    wait = threading.Thread(target=lambda: locked.append(lock_directory(tmp_path / 'it', print, waits.set)))
    wait.start()
    assert waits.wait(60)
    (tmp_path / 'it' / 'lock').unlink()
    (tmp_path / 'it').rmdir()
    assert not locked
    holder.kill()
    wait.join(60)
    assert (tmp_path / 'it' / 'lock').read_text().startswith('process ')
    assert holder_of(tmp_path / 'it') is not None
    locked[0].close()
