"""`launch.json`, and the verbs that read it: status, logs, stop."""

import os
import signal
import subprocess
import sys

import pytest

from pretrax.cli import main
from pretrax.errors import UserError
from pretrax.launch.foreground import record_launcher
from pretrax.launch.record import LaunchRecord, read_record, write_record
from pretrax.launch.registry import engine_of, refuse_if_running
from pretrax.storage import locate_run
from pretrax.system.launchers import identity

LAUNCHER = """
import sys, time, pathlib
from pretrax.launch.foreground import record_launcher
record_launcher(pathlib.Path(sys.argv[1]), 'ssh', 2, print)
print('ready', flush=True)
time.sleep(1000)
"""


def call(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = LaunchRecord(engine='slurm', job='4711', nodes=4, facts={'log': '/shared/slurm.txt'})
    write_record(tmp_path / 'run', record)
    assert read_record(tmp_path / 'run') == record


def test_a_record_in_a_bucket(s3):
    from pretrax.storage import locate

    record = LaunchRecord(engine='kubernetes', job='base', nodes=4)
    run = locate(f'{s3.url}/runs/base')
    write_record(run, record)
    assert read_record(run) == record


def test_a_run_is_named_by_its_directory_or_below_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'runs' / 'base').mkdir(parents=True)
    assert locate_run('base') == locate_run('runs/base')
    assert str(locate_run('other')) == 'other'
    (tmp_path / 'base').mkdir()
    assert str(locate_run('base')) == 'base'
    assert str(locate_run('gs://bucket/base')) == 'gs://bucket/base'


@pytest.mark.parametrize(
    ('content', 'words'),
    [(None, 'has not started this run'), ('{"engine": "slurm"}', 'not a record'), ('{', 'not a record')],
)
def test_a_run_without_a_good_record_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / 'launch.json').write_text(content)
    with pytest.raises(UserError, match=words):
        read_record(tmp_path)


def test_a_launcher_that_runs_is_shown_and_stopped(tmp_path, capsys):
    with subprocess.Popen(
        [sys.executable, '-c', LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == 'ready\n'
        try:
            (tmp_path / 'output').mkdir()
            (tmp_path / 'output' / 'process-1.txt').write_text(''.join(f'line {n}\n' for n in range(9)))
            for attempt in ('base-9', 'base-10'):
                (tmp_path / 'crashes' / attempt).mkdir(parents=True)
                (tmp_path / 'crashes' / attempt / 'process-1.txt').write_text('')
            assert call('launch', 'status', str(tmp_path)) == 0
            said = capsys.readouterr().out
            assert f'ssh launcher {process.pid} on ' in said
            assert 'running, 2 processes' in said
            assert f'crash report: {tmp_path}/crashes/base-10/process-1.txt' in said
            assert 'base-9' not in said, 'the newest attempt alone'
            assert call('launch', 'stop', str(tmp_path)) == 0
            assert process.wait(60) == -signal.SIGTERM
        finally:
            process.kill()
    assert call('launch', 'stop', str(tmp_path)) == 0
    assert 'has ended already' in capsys.readouterr().out


def test_logs_are_the_last_lines_of_a_process(tmp_path, capfd):
    record_launcher(tmp_path, 'ssh', 2, print)
    (tmp_path / 'output').mkdir()
    (tmp_path / 'output' / 'process-1.txt').write_text(''.join(f'line {n}\n' for n in range(9)))
    assert call('launch', 'logs', str(tmp_path), '--process', '1', '-n', '2') == 0
    assert capfd.readouterr().out == 'line 7\nline 8\n'
    assert call('launch', 'logs', str(tmp_path)) == 2
    assert 'no output of process 0 is kept' in capfd.readouterr().err


def test_a_launcher_of_another_machine_is_not_killed(tmp_path):
    elsewhere = identity() | {'host': 'box7', 'boot': 'another'}
    record = LaunchRecord(engine='ssh', job=str(os.getpid()), nodes=2, host='box7', facts={'launcher': elsewhere})
    with pytest.raises(UserError, match='runs on box7'):
        engine_of(record).stop(record)
    assert 'only seen from there' in engine_of(record).status(record)


def test_a_launcher_from_before_a_restart_of_the_machine_has_ended():
    """Its process id may belong to another process now."""
    before = identity() | {'boot': 'another'}
    record = LaunchRecord(engine='ssh', job=str(os.getpid()), nodes=2, facts={'launcher': before})
    assert 'has ended already' in engine_of(record).stop(record)
    assert engine_of(record).status(record).endswith(': ended')


def test_a_launcher_in_another_container_of_this_machine_is_not_killed():
    elsewhere = identity() | {'container': 'pid:[1]'}
    record = LaunchRecord(engine='ssh', job=str(os.getpid()), nodes=2, facts={'launcher': elsewhere})
    with pytest.raises(UserError, match='in a container'):
        engine_of(record).stop(record)


def test_a_run_is_not_launched_twice(tmp_path):
    run = tmp_path / 'run'
    refuse_if_running(run)
    record_launcher(run, 'ssh', 2, print)
    with pytest.raises(UserError, match=r'(?s)runs already: ssh launcher .* running.*pretrax launch stop'):
        refuse_if_running(run)
    write_record(run, LaunchRecord(engine='ssh', job='1', nodes=2, facts={'launcher': identity() | {'started': '1'}}))
    refuse_if_running(run)
