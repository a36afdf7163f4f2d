"""A group behind local programs that stand for `ssh` and `srun`: they end with the code of the other side."""

import json
import os
import signal
import sys
import time

import pytest

from pretrax.launch.node import request
from pretrax.launch.remote import Agents, RemoteGroup, RemoteProcess, from_shell

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
    with RemoteGroup(processes((OBEYS, '0', '0'), (OBEYS, '1', '137')), Agents(tmp_path)) as group:
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
    group = RemoteGroup(processes((OBEYS, '0', '0'), (HANGS,)), Agents(tmp_path))
    wait(lambda: group.tail(0))
    group.end()
    assert group.codes() == {0: 0, 1: -signal.SIGKILL}, 'the first by the end of its standard input'


def test_each_attempt_has_its_own_output(tmp_path):
    for word in ('first', 'second'):
        with RemoteGroup(processes((f'print({word!r})',)), Agents(tmp_path)) as group:
            wait(lambda group=group: group.codes())
        assert group.tail(0) == [word]
    assert (tmp_path / 'output' / 'process-0.txt').read_text() == 'first\nsecond\n'


def test_a_program_that_cannot_be_started_ends_the_others(tmp_path):
    with pytest.raises(FileNotFoundError):
        RemoteGroup([*processes((OBEYS, '0', '0')), RemoteProcess('box2', ['no-such-program'])], Agents(tmp_path))


# A lasting node over the program in argv[2].
AGENT = """
import json, sys
from pretrax import config_from_values
from pretrax.launch.node import Node
node = Node(config_from_values(json.loads(sys.argv[1])), attempt='', controlled=False, lasting=True)
sys.exit(node.run([sys.executable, '-c', sys.argv[2]]))
"""
# Trains as CODES says for its attempt: a signal that kills it, an exit code, or without an end.
TRAINS = """
import os, pathlib, signal, sys, time
from pretrax.system.standby import tell_stepped, wait_until_needed
if os.environ['PRETRAX_STANDBY'] == 'waits':
    pathlib.Path(f'waits-{os.getpid()}').touch()
wait_until_needed()
print(f'process {os.environ["JAX_PROCESS_ID"]} is {os.getpid()} of {os.getppid()} .', flush=True)
tell_stepped()
while len(list(pathlib.Path().glob('waits-*'))) < int(os.environ['STANDBYS']):
    time.sleep(0.01)
if os.environ['END'] == 'killed':
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1000 if os.environ['END'] == 'never' else 0)
"""


@pytest.fixture
def attempt(values, tmp_path, monkeypatch):
    """Starts an attempt in agents: the end of the training on each host, in the order of the numbers."""
    monkeypatch.chdir(tmp_path)
    agents = Agents(tmp_path)
    command = [sys.executable, '-c', AGENT, json.dumps(values), TRAINS]

    def start(standbys, **ends):
        identities = [
            {'JAX_PROCESS_ID': str(number), 'STANDBYS': str(standbys), 'END': end}
            for number, end in enumerate(ends.values())
        ]
        asked = [
            RemoteProcess(host, command, request=request('label', own))
            for host, own in zip(ends, identities, strict=True)
        ]
        return RemoteGroup(asked, agents)

    start.agents, start.command = agents, command
    yield start
    agents.close()


def said(group, number):
    """The ids of the training and of its agent."""
    wait(lambda: group.tail(number)[-1:] and group.tail(number)[-1].endswith('.'))
    [words] = [line.split() for line in group.tail(number)]
    assert words[:3] == ['process', str(number), 'is']
    return int(words[3]), int(words[5])


def waiting(directory):
    return {int(path.name[6:]) for path in directory.glob('waits-*')}


def test_agents_outlive_attempts_and_their_standbys_take_over(attempt, tmp_path):
    with attempt(2, one='never', two='killed') as group:
        (_, one), (_, two) = said(group, 0), said(group, 1)
        wait(group.codes)
        assert group.codes() == {1: -signal.SIGKILL}
    assert group.codes() == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    assert group.is_there(0)
    assert group.is_there(1)
    with attempt(4, two='done', one='done') as group:
        (first, agent), (second, other) = said(group, 0), said(group, 1)
        assert (agent, other) == (two, one), 'with other numbers'
        assert {first, second} <= waiting(tmp_path)
        wait(lambda: group.codes() == {0: 0, 1: 0})
    attempt.agents.close()
    for pid in (one, two, *waiting(tmp_path)):
        assert not os.path.exists(f'/proc/{pid}')


def test_an_agent_that_is_lost_is_started_again(attempt):
    with attempt(0, one='never', two='never') as group:
        (_, one), (_, two) = said(group, 0), said(group, 1)
        os.kill(two, signal.SIGKILL)
        wait(group.codes)
        assert group.codes() == {1: -signal.SIGKILL}
    assert group.is_there(0)
    assert not group.is_there(1)
    with attempt(0, one='done', two='done') as group:
        assert said(group, 0)[1] == one
        assert said(group, 1)[1] != two


def test_an_agent_without_a_training_keeps_a_standby(attempt, tmp_path):
    attempt.agents.prepare(RemoteProcess('spare', attempt.command, request=b''))
    wait(lambda: waiting(tmp_path))
    attempt.agents.prepare(RemoteProcess('spare', attempt.command, request=b''))  # it is there
    with attempt(1, spare='done') as group:
        assert said(group, 0)[0] in waiting(tmp_path)
        wait(lambda: group.codes() == {0: 0})


def test_zeros_in_the_output_are_no_mark(tmp_path):
    program = "import os; [os.write(1, piece) for piece in (b'a\\0end', b'\\0ended 7', b'x\\0\\n')]"
    with RemoteGroup(processes((program,)), Agents(tmp_path)) as group:
        wait(group.codes)
    assert (tmp_path / 'output' / 'process-0.txt').read_bytes() == b'a\0end\0ended 7x\0\n'


def test_a_mark_may_come_in_pieces(tmp_path):
    program = "import sys, time; input(); print('a\\0end', end='', flush=True); time.sleep(0.3); print('ed 7', flush=True); sys.stdin.read()"
    command = [sys.executable, '-c', program]
    agents = Agents(tmp_path)
    with RemoteGroup([RemoteProcess('box', command, request=b'{}')], agents) as group:
        wait(lambda: group.codes() == {0: 7})
        assert group.is_there(0)
    agents.close()
    assert (tmp_path / 'output' / 'process-0.txt').read_bytes() == b'a'


@pytest.mark.parametrize(('code', 'found'), [(0, 0), (75, 75), (128, 128), (137, -9), (143, -15), (255, 255)])
def test_codes_of_a_shell(code, found):
    assert from_shell(code) == found
