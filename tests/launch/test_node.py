"""The process of one machine, as `srun`, ssh and a pod start it,
over small programs in the place of `pretrax train`.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from preloaded import programs
from pretrax import config_from_values
from pretrax.launch.node import process_number
from pretrax.system.launchers import has_ended, identity

PATIENCE = 300  # seconds
# Runs a Node over the program in argv[3]; argv[4], if any, is the check before it.
NODE = """
import sys
from pretrax import config_from_values
from pretrax.launch.node import Node
import json
config = config_from_values(json.loads(sys.argv[1]))
node = Node(config, attempt='first', controlled=sys.argv[2] == 'controlled', until_done=sys.argv[2] == 'until done')
python = [sys.executable, '-c']
sys.exit(node.run([*python, sys.argv[3]], [*python, sys.argv[4]] if sys.argv[4:] else None))
"""
WAIT = 'import time; print("ready"); time.sleep(1000)'
STOPS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(CODE))
print('ready')
time.sleep(1000)
"""


@pytest.fixture
def node(values):
    """Starts a node and waits for the word 'ready'."""
    started = []

    def start(program, *check, how='', ready=True, forked=True, **environment):
        process = subprocess.Popen(
            [programs() / 'python' if forked else sys.executable, '-c', NODE, json.dumps(values), how, program, *check],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environment,
        )  # fmt: skip
        started.append(process)
        if ready:
            assert process.stdout.readline() == 'ready\n'
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def run_dir(values):
    return config_from_values(values).run_dir


@pytest.mark.parametrize(
    ('program', 'code'), [('pass', 0), ('raise SystemExit(75)', 75), ('raise SystemExit(2)', 2),
    ('import os; os.kill(os.getpid(), 9)', 137)]
)  # fmt: skip
def test_it_exits_with_the_code_of_the_training(node, program, code):
    assert node(program, ready=False).wait(PATIENCE) == code


def test_a_failure_leaves_a_crash_report(node, run_dir):
    program = (
        'import pathlib, sys\n'
        f'stacks = pathlib.Path({str(run_dir)!r}) / "stacks" / "process-3.txt"\n'
        'stacks.parent.mkdir(parents=True, exist_ok=True)\n'
        'stacks.write_text("earlier" + "Thread 0x1: in matmul")\n'
        'print("step 7"); print("the last words"); sys.exit(1)'
    )
    (run_dir / 'stacks').mkdir(parents=True)
    (run_dir / 'stacks' / 'process-3.txt').write_text('earlier')
    (run_dir / 'checkpoints' / '5').mkdir(parents=True)
    process = node(program, ready=False, JAX_PROCESS_ID='3')
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    path = run_dir / 'crashes' / 'first' / 'process-3.txt'
    assert f'process 3: crash report in {path}' in said
    text = path.read_text()
    assert text.startswith('process 3 on ')
    assert 'exit code 1: an error, see its output, after ' in text
    assert 'step 5 is the newest checkpoint' in text
    assert '== last lines of its output\nstep 7\nthe last words\n' in text
    assert '== stacks of its threads\nThread 0x1: in matmul' in text
    assert 'earlier' not in text


def test_a_good_end_leaves_no_crash_report(node, run_dir):
    assert node('pass', ready=False).wait(PATIENCE) == 0
    assert node('raise SystemExit(75)', ready=False).wait(PATIENCE) == 75
    assert not (run_dir / 'crashes').exists()


@pytest.mark.parametrize(('step', 'code'), [(4, 75), (6, 0)])
def test_a_run_that_the_engine_stops_is_to_be_continued_unless_it_is_finished(node, run_dir, values, step, code):
    """Engines send SIGTERM before the time limit and when they preempt; a training that saved exits with 0."""
    (run_dir / 'checkpoints' / str(step)).mkdir(parents=True)
    assert config_from_values(values).steps == 6
    process = node(STOPS.replace('CODE', '0'))
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == code


def test_a_run_that_another_process_has_stopped_is_to_be_continued_if_the_engine_says_so(node, run_dir):
    assert node('pass', how='until done', ready=False).wait(PATIENCE) == 143
    (run_dir / 'checkpoints' / '6').mkdir(parents=True)
    assert node('pass', how='until done', ready=False).wait(PATIENCE) == 0


def test_it_takes_signals_from_standard_input(node):
    """They are the launcher's: a training that stops on its request has stopped for good."""
    process = node(STOPS.replace('CODE', '0'), how='controlled')
    process.stdin.write('SIGNONSENSE\nSIGTERM\n')
    process.stdin.flush()
    assert process.wait(PATIENCE) == 0


def test_the_training_ends_with_standard_input(node, run_dir):
    """It is that of the connection to the launcher; the training may be stopped, and ignores signals."""
    program = 'import os, signal; print("ready"); print(os.getpid()); os.kill(os.getpid(), signal.SIGSTOP)'
    process = node(program, how='controlled')
    training = int(process.stdout.readline())
    process.stdin.close()
    assert process.wait(PATIENCE) == 128 + signal.SIGKILL
    assert not os.path.exists(f'/proc/{training}')
    assert not (run_dir / 'crashes').exists(), 'it did not fail'


def test_what_the_training_has_started_ends_with_it(node):
    program = (
        'import subprocess, sys; from pretrax.system.launchers import _started\n'
        'child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], stdout=subprocess.DEVNULL)\n'
        'print(child.pid, _started(child.pid), flush=True)'
    )
    process = node(program, ready=False, forked=False)  # what is forked has another parent
    child, started = process.stdout.readline().split()
    assert process.wait(PATIENCE) == 0
    until = time.monotonic() + PATIENCE
    while not has_ended(identity() | {'pid': str(child), 'started': started}):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    ('end', 'code'), [('exit(1)', 1), ('exit(2)', 2), ('exit(75)', 75), ('os.kill(os.getpid(), 15)', 75)]
)
def test_nothing_is_trained_if_the_check_fails(node, end, code):
    """One that was ended from outside is to be done again."""
    process = node('print("trained")', f'import os\nprint("the disk is full")\n{end}', ready=False)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert said == 'the disk is full\n'


def test_the_training_follows_a_check_that_succeeds(node):
    process = node('print("trained")', 'print("all is well")', ready=False)
    assert process.communicate(timeout=PATIENCE)[0] == 'all is well\ntrained\n'


@pytest.mark.parametrize(
    ('environment', 'number'),
    [({}, 0), ({'SLURM_PROCID': '2'}, 2), ({'OMPI_COMM_WORLD_RANK': '1'}, 1), ({'JAX_PROCESS_ID': '3',
    'SLURM_PROCID': '0'}, 3)],
)  # fmt: skip
def test_engines_number_the_processes(environment, number):
    assert process_number(environment) == number


def test_the_training_may_open_as_many_files_as_the_system_allows(node):
    program = 'import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE)); print("end")'
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
    try:
        out, _ = node(program, ready=False).communicate(timeout=PATIENCE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert out.splitlines()[0] == f'{before[1]} {before[1]}'
