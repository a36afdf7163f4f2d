"""The directory for states in memory is there while its launcher is, and no longer."""

import os
import signal
import subprocess
import sys

import pytest

from pretrax.launch.host_memory import HostMemory

HOLDS = (
    'import sys, pathlib; from pretrax.launch.host_memory import HostMemory\n'
    'with HostMemory(pathlib.Path(sys.argv[1])) as memory: print(memory.environment["PRETRAX_MEMORY"], flush=True); sys.stdin.read()'
)


@pytest.fixture
def other(tmp_path):
    """Another launcher, and its directory."""
    with subprocess.Popen(
        [sys.executable, '-c', HOLDS, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process, tmp_path / process.stdout.readline().strip()
        process.kill()


def test_it_is_removed_at_the_end_also_after_an_error(tmp_path):
    with pytest.raises(KeyError), HostMemory(tmp_path) as memory:
        place = memory.environment['PRETRAX_MEMORY']
        assert os.stat(place).st_mode & 0o777 == 0o700
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_launcher_leaves_is_removed_by_the_next_and_nothing_else(other, tmp_path):
    process, place = other
    (tmp_path / 'of-others').mkdir()
    with HostMemory(tmp_path):
        assert place.is_dir()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert place.is_dir()
    with HostMemory(tmp_path) as memory:
        assert {path.name for path in tmp_path.iterdir()} == {
            'of-others',
            memory.environment['PRETRAX_MEMORY'].rpartition('/')[2],
        }


def test_without_a_file_system_in_memory_there_is_none(tmp_path):
    with HostMemory(tmp_path / 'none') as memory:
        assert memory.environment == {}
        assert memory.newest() == 0
