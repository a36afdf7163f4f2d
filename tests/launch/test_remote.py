"""A group behind local programs that stand for `ssh` and `srun`: they end with the code of the other side."""

import signal
import sys
import time

import pytest

from pretrax.launch.remote import RemoteGroup, RemoteProcess, from_shell

OBEYS = """
import sys
print('process', sys.argv[1], flush=True)
for line in sys.stdin:
    print('got', line, end='', flush=True)
    if line == 'SIGTERM\\n':
        raise SystemExit(int(sys.argv[2]))
"""
HANGS = 'import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)'


def processes(*programs):
    return [RemoteProcess(f'box{n}', [sys.executable, '-c', *program]) for n, program in enumerate(programs, 1)]


def wait(done):
    until = time.monotonic() + 60
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_signals_reach_all_machines_and_their_codes_come_back(tmp_path, capfd):
    with RemoteGroup(processes((OBEYS, '0', '0'), (OBEYS, '1', '137')), tmp_path) as group:
        assert group.codes() == {}
        group.send(signal.SIGUSR1)
        group.send(signal.SIGTERM)
        wait(lambda: len(group.codes()) == 2)
        assert group.codes() == {0: 0, 1: -9}
    assert group.tail(1) == ['process 1', 'got SIGUSR1', 'got SIGTERM']
    assert group.tail(0) == ['process 0', 'got SIGUSR1', 'got SIGTERM']
    assert capfd.readouterr().out == 'process 0\ngot SIGUSR1\ngot SIGTERM\n', 'of process 0 alone'
    assert (group.host(1), group.processes()) == ('box2', ['box1', 'box2'])


def test_the_end_of_a_group_reaches_machines_that_listen_and_those_that_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr('pretrax.launch.remote._PATIENCE', 2.0)
    group = RemoteGroup(processes((OBEYS, '0', '0'), (HANGS,)), tmp_path)
    wait(lambda: group.tail(0))
    group.end()
    assert group.codes() == {0: 0, 1: -signal.SIGKILL}, 'the first by the end of its standard input'


def test_each_attempt_has_its_own_output(tmp_path):
    for word in ('first', 'second'):
        with RemoteGroup(processes((f'print({word!r})',)), tmp_path) as group:
            wait(lambda group=group: group.codes())
        assert group.tail(0) == [word]
    assert (tmp_path / 'output' / 'process-0.txt').read_text() == 'first\nsecond\n'


def test_a_program_that_cannot_be_started_ends_the_others(tmp_path):
    with pytest.raises(FileNotFoundError):
        RemoteGroup([*processes((OBEYS, '0', '0')), RemoteProcess('box2', ['no-such-program'])], tmp_path)


@pytest.mark.parametrize(('code', 'found'), [(0, 0), (75, 75), (128, 128), (137, -9), (143, -15), (255, 255)])
def test_codes_of_a_shell(code, found):
    assert from_shell(code) == found
