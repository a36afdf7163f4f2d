"""A standby waits without output, receives its variables and streams, and ends with its launcher."""

import os
import signal
import subprocess
import sys

from pretrax.system.standby import Training, Trainings

PROGRAM = """
import os, sys
from pretrax.system.standby import tell_stepped, wait_until_needed
print('imports', flush=True)
wait_until_needed()
assert not os.isatty(1) and 'PRETRAX_STANDBY' not in os.environ and sys.stdin.read() == ''
print(os.getpid(), os.environ['PLACE'], os.environ['NUMBER'])
print('an error', file=sys.stderr, flush=True)
tell_stepped()
"""


def trainings():
    return Trainings([sys.executable, '-c', PROGRAM], lambda place: os.environ | {'PLACE': f'place {place}'})


def output(started, place, **variables):
    """Starts a training to its end: its process id, and what it wrote, without its own account of that id."""
    reading, writing = os.pipe()
    process = started.start(place, variables, writing, writing)
    os.close(writing)
    with open(reading) as text:
        said = text.read()
    assert process.wait() == 0
    assert process.has_stepped()
    process.end(0)
    return process.pid, said.replace(f'{process.pid} ', '')


def test_a_standby_trains_with_the_variables_and_streams_of_its_new_place():
    started = trainings()
    new, said = output(started, 3, NUMBER='1')
    assert said == 'imports\nplace 3 1\nan error\n'
    started.prepare([3, 4])
    started.prepare([3])  # it is there
    waiting, said = output(started, 3, NUMBER='2')
    assert waiting != new
    assert said == 'place 3 2\nan error\n', 'what it wrote before is discarded'
    started.close()
    assert output(started, 4, NUMBER='2')[1].startswith('imports\n')


def test_a_standby_that_cannot_begin_is_replaced():
    started = trainings()
    started.prepare([0])
    os.kill(started._waiting[0].pid, signal.SIGKILL)
    started._waiting[0].wait()
    assert output(started, 0, NUMBER='1')[1] == 'imports\nplace 0 1\nan error\n'


def test_a_standby_ends_with_its_launcher():
    launcher = """
import os, subprocess, sys, time
from pretrax.system.standby import Training
waiting = Training([sys.executable, '-c', sys.argv[1]], os.environ, waits=True)
os.kill(os.getpid(), 9)
"""
    program = (
        'from pretrax.system.standby import *; import signal; signal.signal(15, signal.SIG_IGN); wait_until_needed()'
    )
    reading, writing = os.pipe()
    with subprocess.Popen([sys.executable, '-c', launcher, program], stdout=writing):
        os.close(writing)
        assert os.read(reading, 1) == b'', 'both have closed it'
    os.close(reading)


def test_a_standby_that_uses_devices_ends():
    program = 'from pretrax.system.standby import *; wait_until_needed(uses_devices=True)'
    with Training([sys.executable, '-c', program], os.environ, waits=True) as standby:
        assert standby.wait() == 0
        standby.end(0)


def test_a_process_without_a_launcher_does_not_wait():
    plain = "from pretrax.system.standby import *; wait_until_needed(); tell_stepped(); print('trains')"
    done = subprocess.run([sys.executable, '-c', plain], capture_output=True, text=True, check=True)
    assert done.stdout == 'trains\n'
