"""Files and directories appear whole or not at all, whatever interrupts the process that writes them."""

import signal
import subprocess
import sys

import pytest

from pretrax.system.atomic import new_directory, new_file, partial_path, write_file

WRITE = """
import pathlib, sys
from pretrax.system.atomic import new_directory, new_file
how = {'file': new_file, 'directory': new_directory}[sys.argv[2]]
with how(pathlib.Path(sys.argv[1])) as written:
    if sys.argv[2] == 'directory':
        (written / 'part').write_text('half')
    else:
        written.write(b'half')
        written.flush()
    print('written', flush=True)
    sys.stdin.read()
"""


def contents(directory):
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob('*') if path.is_file()}


@pytest.mark.parametrize('sync', [False, True])
def test_a_file_is_replaced_when_the_block_ends(tmp_path, sync):
    path = tmp_path / 'it'
    path.write_text('old')
    with new_file(path, sync) as file:
        file.write(b'new')
        file.flush()
        assert path.read_text() == 'old'
    assert contents(tmp_path) == {'it': 'new'}


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    write_file(tmp_path / 'it', b'old')
    with pytest.raises(ZeroDivisionError), new_file(tmp_path / 'it') as file:
        file.write(b'new')
        raise ZeroDivisionError
    assert contents(tmp_path) == {'it': 'old'}


@pytest.mark.parametrize('sync', [False, True])
def test_a_directory_appears_when_the_block_ends(tmp_path, sync):
    with new_directory(tmp_path / 'it', sync) as partial:
        (partial / 'below').mkdir()
        (partial / 'below' / 'part').write_text('all')
        assert not (tmp_path / 'it').exists()
    assert contents(tmp_path) == {'it/below/part': 'all'}


def test_of_two_writers_of_a_directory_the_first_one_wins(tmp_path):
    with new_directory(tmp_path / 'it', keep_existing=True) as partial:
        (partial / 'second').write_text('')
        (tmp_path / 'it').mkdir()
        (tmp_path / 'it' / 'first').write_text('')
    assert contents(tmp_path) == {'it/first': ''}
    with pytest.raises(OSError, match='not empty'), new_directory(tmp_path / 'it'):
        pass


@pytest.mark.parametrize('kind', ['file', 'directory'])
def test_a_killed_writer_changes_nothing_and_the_next_one_removes_its_litter(tmp_path, kind):
    path = tmp_path / 'it'
    command = [sys.executable, '-c', WRITE, str(path), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == 'written\n'
        write_file(tmp_path / 'other', b'')
        process.send_signal(signal.SIGKILL)
    assert not path.exists()
    assert 'half' in contents(tmp_path).values()
    with new_directory(path) if kind == 'directory' else new_file(path):
        assert partial_path(path).exists()
    assert 'half' not in contents(tmp_path).values()
