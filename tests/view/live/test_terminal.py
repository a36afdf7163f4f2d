"""Runs watched in a terminal, and in a pipe."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rich.console

from live_server import WrittenRun
from pretrax.cli import main
from pretrax.view.live import terminal
from pretrax.view.live.run import WatchedRun
from pretrax.view.live.terminal import picture

PRETRAX = Path(sys.executable).with_name('pretrax')
CODES = re.compile(r'\x1b\[[0-9;?]*[A-Za-z]')


@pytest.fixture
def written(tmp_path):
    run = WrittenRun(tmp_path / 'runs' / 'tiny')
    run.train(10, loss=2.5, val_loss=2.75)
    return run


@pytest.mark.parametrize(('width', 'height'), [(80, 24), (60, 10)])
@pytest.mark.parametrize('count', [0, 1, 40])
def test_the_picture_fits_the_terminal(tmp_path, width, height, count):
    runs = []
    for number in range(count):
        run = WrittenRun(tmp_path / f'a-run-with-quite-a-long-name-{number}', steps=1_000_000)
        run.train(30, loss=float('nan'))
        runs.append(WatchedRun(run.directory, run.directory.name))
        runs[-1].poll()
    console = rich.console.Console(width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(picture(runs, 'runs', width, height))
    lines = CODES.sub('', captured.get()).rstrip('\n').split('\n')
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    assert not count or {'run', 'state', 'loss', 'tok/s'} <= set(lines[0].split())


def test_the_table_has_the_newest_values_and_names_cannot_control_the_terminal(written):
    run = WatchedRun(written.directory, 'ti\x1b[2Jny')
    run.poll()
    console = rich.console.Console(width=100, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(picture([run], 'runs', 100, 40))
    row = captured.get().splitlines()[1].split()
    assert '\x1b[2J' not in captured.get()
    assert row[1:] == ['lost', '10', '10.0', '-', '2.5000', '2.7500', '1k', '40.0', '0:00']


def test_in_a_pipe_there_are_plain_lines_until_the_run_ends(written):
    with subprocess.Popen(
        [PRETRAX, 'watch', '--terminal', written.directory], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            lines = [process.stdout.readline() for _ in range(3)]
            assert lines == [
                'tiny  lost\n',
                'tiny  step 10/100  val loss 2.7500\n',
                'tiny  step 10/100  10.0%  loss 2.5000  1k tok/s  mfu 40.0%\n',
            ]
            written.train(90, **{'loss': 2.25, 'seconds/kept': 9.0, 'seconds/lost': 1.0})
            written.end('finished')
            rest = process.stdout.read()
            assert 'step 100/100  100.0%  loss 2.2500' in rest
            assert 'tiny  finished' in rest
            assert 'tiny  time: steps kept 90.0%, steps lost 10.0%' in rest
            assert '\x1b' not in rest
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.slow
def test_in_a_pipe_a_directory_without_runs_says_so_and_ctrl_c_ends_with_code_0(tmp_path):
    with subprocess.Popen([PRETRAX, 'watch', '--terminal', tmp_path], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == f'No runs yet in {tmp_path}. They are shown when they appear.\n'
            WrittenRun(tmp_path / 'tiny').train(2)
            assert process.stdout.readline() == 'tiny  lost\n'
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


def seen(descriptor, wanted, seconds=60):
    """What a terminal received, until it has all of these words."""
    text, end = '', time.monotonic() + seconds
    while not all(word in text for word in wanted):
        assert time.monotonic() < end, text
        if select.select([descriptor], [], [], 1)[0]:
            text += CODES.sub('', os.read(descriptor, 100_000).decode(errors='replace'))
    return text


@pytest.mark.slow
def test_a_terminal_is_drawn_again_and_ctrl_c_leaves_the_last_picture_and_code_0(written):
    master, slave = pty.openpty()
    environment = {**os.environ, 'COLUMNS': '80', 'LINES': '24', 'TERM': 'xterm'}
    with subprocess.Popen(
        [PRETRAX, 'watch', '--terminal', written.directory.parent],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
    ) as process:
        try:
            os.close(slave)
            seen(master, ['tiny', '2.5000', 'training loss', 'step 10'])
            written.train(5, loss=1.2345)
            seen(master, ['1.2345', '15.0'])
            shutil.rmtree(written.directory)
            seen(master, ['removed'])
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(master)


def test_without_arguments_the_directory_runs_is_watched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'runs' / 'one').mkdir(parents=True)
    (tmp_path / 'runs' / 'one' / 'metrics.jsonl').write_text('{"step": 1, "loss": 2.0}\n')
    watched = []
    monkeypatch.setattr(terminal, 'watch_in_terminal', lambda places: watched.extend(places.look()[0]))
    with pytest.raises(SystemExit):
        main(['watch', '--terminal'])
    assert [str(run.path) for run in watched] == ['runs/one']
