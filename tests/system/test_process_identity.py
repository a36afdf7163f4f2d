"""A process of this machine that has ended is recognised, others are not declared dead."""

import json
import os
import signal
import subprocess
import sys

import pytest

from pretrax.system import launchers
from pretrax.system.launchers import has_ended, identity

pytestmark = pytest.mark.skipif(sys.platform != 'linux', reason='/proc')


@pytest.fixture
def process():
    program = 'import json, sys; from pretrax.system.launchers import identity\n'
    program += 'print(json.dumps(identity()), flush=True); sys.stdin.read()'
    with subprocess.Popen([sys.executable, '-c', program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        started.identity = json.loads(started.stdout.readline())
        yield started
        started.kill()


def test_a_process_that_runs_has_not_ended(process):
    assert not has_ended(process.identity)
    assert not has_ended(identity())
    os.kill(process.pid, signal.SIGSTOP)
    assert not has_ended(process.identity)


def test_a_killed_process_has_ended_even_before_its_parent_knows(process):
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(process.identity)
    process.wait()
    assert has_ended(process.identity)


def test_another_process_with_the_same_number_is_not_it(process):
    assert has_ended(process.identity | {'started': '1'})


@pytest.mark.parametrize('key', ['boot', 'container'])
def test_a_process_that_cannot_be_seen_from_here_may_run(process, key):
    process.kill()
    process.wait()
    assert not has_ended(process.identity | {key: 'another'})


def test_without_proc_nothing_is_known(process, monkeypatch):
    process.kill()
    process.wait()
    monkeypatch.setattr(launchers, '_place', lambda: {'boot': '', 'container': ''})
    assert not has_ended(process.identity | {'boot': '', 'container': ''})
