"""A process that this one starts is ended with all that it has started, and a wait for it has a limit."""

import signal
import subprocess
import sys
import time

import pytest

from pretrax.system.children import Child, handling

# Starts a process of its own, prints its id, and stops itself.
FAMILY = """
import os, signal, subprocess, sys
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_stopped_process_is_killed_with_what_it_has_started():
    with Child([sys.executable, '-c', FAMILY], stdout=subprocess.PIPE) as child:
        assert int(child.stdout.readline()) == child.pid
        began = time.monotonic()
        child.wait_up_to(0.2)
        assert child.poll() is None
        assert time.monotonic() - began < 60
        child.kill_all()
        assert child.wait() == -signal.SIGKILL
        assert child.stdout.read() == b''  # the other one has closed it
    child.kill_all()  # nothing is left, and that is no error


def test_names_of_signals_reach_the_standard_input_until_it_is_closed():
    echo = 'import sys; print(sys.stdin.read().split())'
    with Child([sys.executable, '-c', echo], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.tell(signal.SIGUSR1)
        child.tell(signal.SIGTERM)
        child.close_input()
        assert child.stdout.read() == b"['SIGUSR1', 'SIGTERM']\n"
        assert child.wait() == 0
        child.tell(signal.SIGINT)  # it has ended
        child.close_input()


def test_handlers_are_those_from_before_after_an_error():
    before, received = signal.getsignal(signal.SIGUSR2), []
    with pytest.raises(KeyError), handling([signal.SIGUSR2], received.append):
        signal.raise_signal(signal.SIGUSR2)
        raise KeyError
    assert received == [signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR2) is before


def test_no_user_is_warned_of_deadlocks_when_a_process_with_jax_starts_another_one():
    code = (
        'import jax; from pretrax.system.children import Child, end_with_parent; jax.devices(); '
        "Child(['true'], prepare=end_with_parent).wait()"
    )
    process = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert process.stderr == ''
