"""The launcher over small programs in the place of `pretrax train`: starts, ends, signals, and what is not retried."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrax import config_from_values
from pretrax.cli import main
from pretrax.errors import UserError
from pretrax.launch import elastic, supervisor
from pretrax.launch.elastic import Slots
from pretrax.launch.local import LocalGroup, devices_of, local_launch
from pretrax.launch.restarts import RestartOptions
from pretrax.launch.supervisor import Supervisor
from pretrax.observe.attempts import read_attempts
from pretrax.storage import locate
from pretrax.storage.locate import working_directory
from pretrax.system.standby import Trainings

HEAD = """
import os, pathlib, signal, sys, time
run, me, slot = pathlib.Path(sys.argv[1]), int(os.environ['JAX_PROCESS_ID']), os.environ['JAX_LOCAL_DEVICE_IDS']
attempt = said = 0
while not attempt or attempt != said:  # the launcher notes what it has started a moment later
    events = (run / 'attempts.jsonl').read_text() if (run / 'attempts.jsonl').exists() else ''
    attempt, said = events.count('ended') + 1, events.count('started')
def checkpoint(step):
    (run / 'checkpoints' / str(step)).mkdir(parents=True, exist_ok=True)
def reached(name, count=int(os.environ['JAX_NUM_PROCESSES'])):
    '''Waits until `count` processes of this attempt have called it with this name.'''
    (run / f'{name}-{attempt}-{me}').write_text('')
    while len(list(run.glob(f'{name}-{attempt}-*'))) < count:
        time.sleep(0.01)
def wait():
    time.sleep(1000)
"""

# Notes which processes wait, as `waits-<pid>`.
STANDBY = (
    """
import os, pathlib, sys
from pretrax.system.standby import tell_stepped, wait_until_needed
if os.environ['PRETRAX_STANDBY'] == 'waits':
    (pathlib.Path(sys.argv[1]) / f'waits-{os.getpid()}').write_text('')
wait_until_needed()
"""
    + HEAD
    + """
def standbys(count):
    while len(found := [int(path.name[6:]) for path in run.glob('waits-*')]) < count:
        time.sleep(0.01)
    return sorted(found)
"""
)

# The launcher itself runs without JAX; these tests fork in a process that has it.


class Local:
    """Runs a program as each of the processes; `me` is its number, `slot` its devices, `attempt` counts from 1."""

    def __init__(self, values):
        values |= {'mesh': {}, 'batch': {'tokens': 192, 'sequence_length': 16}}
        self.config = config_from_values(values)
        self.directory = Path(values['run_dir'])
        self.said = []

    def __call__(self, program, processes=2, retries=0, elastic=False, head=HEAD):
        launch = local_launch(
            self.config, [sys.executable, '-c', head + program, str(self.directory)],
            RestartOptions(retries=retries, elastic=elastic), processes=processes, devices=1, say=self.said.append,
        )  # fmt: skip
        return launch.run()

    def events(self, name):
        return [event for event in read_attempts(self.directory) if event['event'] == name]


@pytest.fixture
def local(values, monkeypatch):
    monkeypatch.setattr(supervisor, '_AFTER_END', 60.0)  # a busy machine may start one process long after another
    return Local(values)


def test_a_finished_run_is_not_started_again(local):
    assert local('') == 0
    assert [event['why'] for event in local.events('ended')] == ['done']
    assert local.said == []


@pytest.mark.parametrize('code', [2, 78])
def test_a_mistake_is_reported_once_and_not_retried(local, code):
    program = f'print("what to mend", flush=True); sys.exit({code}) if me == 1 else wait()'
    assert local(program, retries=9) == 2
    assert len(local.events('started')) == 1
    assert local.said == ['process 1 | what to mend']


def test_after_the_last_retry_the_output_of_the_failed_process_is_shown(local):
    program = 'print("attempt", attempt, flush=True); sys.exit(3) if me == 1 else wait()'
    assert local(program, retries=1) == 3
    assert len(local.events('started')) == 2
    shown = [line for line in local.said if line.startswith('process 1 | ')]
    assert shown == ['process 1 | attempt 1', 'process 1 | attempt 2'], 'each time of that attempt alone'
    assert local.said[-1].endswith(
        'process 1 failed with exit code 3; 2 attempts in a row without a new checkpoint: giving up'
    )
    assert (local.directory / 'output' / 'process-1.txt').read_text() == 'attempt 1\nattempt 2\n'


def test_attempts_continue_while_checkpoints_advance(local):
    program = """
if attempt == 4:
    sys.exit(0)
checkpoint(10 * attempt)
os.kill(os.getpid(), signal.SIGKILL) if me == 0 else wait()
"""
    assert local(program, retries=0) == 0
    assert [(event['code'], event['step']) for event in local.events('ended')] == [
        (-9, 10),
        (-9, 20),
        (-9, 30),
        (0, 30),
    ]
    report, restart, *_ = local.said
    assert report.startswith(f'launch: crash report in {local.directory}/crashes/')
    assert 'killed: process 0 (SIGKILL)' in restart
    assert 'checkpoint 10 is complete; starting again: attempt 2, 2 processes' in restart


def test_a_hanging_process_is_killed_with_its_children(local, monkeypatch):
    """The others have noticed and left with 75."""
    program = """
reached('start')
if attempt == 2:
    sys.exit(0)
checkpoint(5)
if me == 1:
    import subprocess
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])
    (run / 'child').write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGSTOP)
while not (run / 'child').exists():
    time.sleep(0.01)
sys.exit(75)
"""
    monkeypatch.setattr(supervisor, '_AFTER_END', 2.0)
    assert local(program, processes=3) == 0
    assert 'no sign of life: process 1' in local.said[1]
    child = Path('/proc') / (local.directory / 'child').read_text() / 'stat'
    assert not child.exists() or child.read_text().split()[2] == 'Z', 'ended with its parent'


@pytest.mark.slow
def test_an_elastic_launch_drops_a_process_that_is_lost_twice(local):
    """12 sequences: 4 processes, without the third 3; when another is lost as well 2, of which each is a divisor."""
    program = """
(run / f'slots-{attempt}-{me}').write_text(f'{slot} of {os.environ["JAX_NUM_PROCESSES"]}')
if slot == '2' or (slot == '0' and attempt > 2):
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(0) if attempt == 5 else wait()
"""
    assert local(program, processes=4, retries=9, elastic=True) == 0
    seen = {n: sorted(path.read_text() for path in local.directory.glob(f'slots-{n}-*')) for n in (3, 5)}
    assert set(seen[3]) <= {'0 of 3', '1 of 3', '3 of 3'}
    assert seen[5] == ['1 of 2', '3 of 2']
    assert [len(event['processes']) for event in local.events('started')] == [4, 4, 3, 3, 2]


def test_an_elastic_launch_tries_a_lost_process_again_after_a_checkpoint(local, monkeypatch):
    """The third of four is lost, also at the first trial:
    its end, without a checkpoint, does not wait for a second one.
    """
    program = """
if slot == '2' and attempt < 6:
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 6:
    sys.exit(0)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
reached('handler')
if os.environ['JAX_NUM_PROCESSES'] == '3' and me == 0:
    checkpoint(attempt)
wait()
"""
    monkeypatch.setattr(elastic, 'FIRST_PAUSE', 0.5)
    assert local(program, processes=4, retries=9, elastic=True) == 0
    assert [len(event['processes']) for event in local.events('started')] == [4, 4, 3, 4, 3, 4]
    assert [said for said in local.said if 'trying all processes again' in said and '4 processes' in said]


QUARANTINE = """
import json
if attempt > 1:
    sys.exit(0)
reached('start')
if me == 0:
    event = {'time': time.time(), 'event': 'quarantined', 'device': 'device 1 of process 1 on node7', 'process': 1}
    with (run / 'attempts.jsonl').open('a') as attempts:
        print(json.dumps(event), file=attempts)
sys.exit(75)
"""


def test_an_elastic_launch_goes_on_without_a_quarantined_process(local):
    assert local(QUARANTINE, processes=3, elastic=True) == 0
    assert [len(event['processes']) for event in local.events('started')] == [3, 2]
    assert 'quarantined: device 1 of process 1 on node7' in local.events('ended')[0]['why']


def test_a_launch_that_is_not_elastic_ends_without_a_quarantined_process(local):
    assert local(QUARANTINE, processes=3, retries=9) == 75
    assert len(local.events('started')) == 1
    assert local.said[-1].endswith('this run needs its host, and is not elastic: giving up')


def test_an_elastic_launch_keeps_processes_that_fail_by_themselves(local):
    assert local('sys.exit(1) if me == 1 else wait()', retries=1, elastic=True) == 1
    assert [len(event['processes']) for event in local.events('started')] == [2, 2]


STOPPABLE = """
def stop(number, frame):
    (run / f'got-{number}-{me}').write_text('')
    sys.exit(CODE)
signal.signal(signal.SIGTERM, stop)
reached('handler')
if me == 0:
    os.kill(os.getppid(), signal.SIGTERM)
wait()
"""


def test_processes_that_do_not_save_in_time_are_killed_and_the_run_is_to_be_continued(local):
    """Inside a Slurm job, which ends at its time limit whether they have saved or not."""
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
checkpoint(3)
reached('handler')
if me == 0:
    os.kill(os.getppid(), signal.SIGTERM)
wait()
"""
    directory = local.directory
    command = [sys.executable, '-c', HEAD + program, str(directory)]
    trainings = Trainings(command, lambda slot: os.environ | devices_of(slot, 1))
    launch = Supervisor(
        local.config, lambda slots, _: LocalGroup(trainings, slots, directory), Slots(2, lambda count: True),
        RestartOptions(retries=0, requeued=True, stop_within=0.5), say=local.said.append,
    )  # fmt: skip
    assert launch.run() == 75
    assert 'not all processes have ended within' in local.said[0]
    assert not (directory / 'crashes').exists()


@pytest.mark.parametrize(('code', 'request_to_stop'), [(0, 'SIGTERM'), (75, 'SIGTERM'), (0, 'SIGHUP')])
def test_a_request_to_stop_reaches_all_processes_and_their_exit_code_is_returned(local, code, request_to_stop):
    program = STOPPABLE.replace('CODE', str(code)).replace(
        'getppid(), signal.SIGTERM', f'getppid(), signal.{request_to_stop}'
    )
    assert local(program, retries=9) == code
    assert sorted(path.name for path in local.directory.glob('got-*')) == ['got-15-0', 'got-15-1']
    assert len(local.events('started')) == 1


def test_a_second_request_to_stop_kills_all_processes(local, monkeypatch):
    program = """
signal.signal(signal.SIGINT, lambda *_: (run / 'asked').write_text(''))
reached('handler')
if me == 0:
    os.kill(os.getppid(), signal.SIGINT)
    while not (run / 'asked').exists():
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGINT)  # the same one, passed on by `uv run`
    time.sleep(1.5)
    (run / 'still-there').write_text('')
    while True:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.1)
wait()
"""
    monkeypatch.setattr(supervisor, '_SAME_REQUEST', 2.0)
    assert local(program) == 128 + signal.SIGINT
    assert 'second request to stop' in local.said[0]
    assert (local.directory / 'still-there').exists()


def test_a_request_to_save_reaches_all_processes_and_ends_none(local):
    program = """
if me == 0:  # asks for a save that process 1 is not ready for
    signal.signal(signal.SIGUSR1, lambda *_: (run / 'asked').write_text(''))
    os.kill(os.getppid(), signal.SIGUSR1)
while not (run / 'asked').exists():
    time.sleep(0.01)
def save(number, frame):
    (run / f'save-{me}').write_text('')
    sys.exit(0)
time.sleep(0.1)
signal.signal(signal.SIGUSR1, save)
reached('handler')
if me == 0:
    os.kill(os.getppid(), signal.SIGUSR1)
wait()
"""
    assert local(program) == 0
    assert len(list(local.directory.glob('save-*'))) == 2


def test_under_nohup_a_closed_terminal_ends_nothing(local):
    program = """
if me == 0:
    os.kill(os.getppid(), signal.SIGHUP)
    time.sleep(0.2)
"""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert local(program) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [event['why'] for event in local.events('ended')] == ['done']


def test_a_standby_takes_the_place_of_each_process_after_a_loss(local, capfd):
    program = """
print('attempt', attempt, flush=True)
checkpoint(attempt)
tell_stepped()
standbys(2 * attempt)
if attempt == 3:
    sys.exit(0)
reached('standbys')
os.kill(os.getpid(), signal.SIGKILL) if me == 1 else wait()
"""
    assert local(program, head=STANDBY) == 0
    waited = {int(path.name[6:]) for path in local.directory.glob('waits-*')}
    first, *others = (event['processes'] for event in local.events('started'))
    assert not waited & set(first)
    assert len({*others[0], *others[1]}) == 4
    assert {*others[0], *others[1]} < waited
    assert all(map(has_ended, waited)), 'those of the last attempt end with the launcher'
    assert capfd.readouterr().out == 'attempt 1\nattempt 2\nattempt 3\n'
    assert (local.directory / 'output' / 'process-1.txt').read_text() == 'attempt 1\nattempt 2\nattempt 3\n'


def test_a_standby_that_has_died_is_replaced_by_a_new_process(local):
    program = """
if attempt == 2:
    sys.exit(0)
checkpoint(1)
tell_stepped()
if me == 1:
    os.kill(standbys(2)[0], signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
wait()
"""
    assert local(program, head=STANDBY) == 0
    waited = {int(path.name[6:]) for path in local.directory.glob('waits-*')}
    assert len(waited & set(local.events('started')[1]['processes'])) == 1


def test_standbys_can_be_switched_off(values, tmp_path, capsys):
    (config := tmp_path / 'run.yaml').write_text(json.dumps(values | {'mesh': {'d': 2}}))
    with pytest.raises(SystemExit) as ended:
        main(['launch', 'local', str(config), '-n', '2', '--no-standbys', '--unchecked', '--dry-run'])
    assert ended.value.code in (None, 0), capsys.readouterr().err


@pytest.mark.parametrize('end', [signal.SIGKILL, signal.SIGINT])
def test_no_standby_outlives_its_launcher(local, values, end):
    program = """
reached('start')
checkpoint(1)
tell_stepped()
standbys(2)
(run / 'ready').write_text('')
wait()
"""
    command = [sys.executable, '-c', LAUNCHER, json.dumps(values), STANDBY + program, str(local.directory)]
    with subprocess.Popen(command) as launcher:
        try:
            wait_until((local.directory / 'ready').exists)
        finally:
            launcher.send_signal(end)
    for path in local.directory.glob('waits-*'):
        wait_until(lambda path=path: has_ended(int(path.name[6:])))


def wait_until(done):
    until = time.monotonic() + 300
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)


LAUNCHER = (
    'import json, sys; from pretrax import config_from_values; from pretrax.launch.local import local_launch\n'
    'from pretrax.launch.restarts import RestartOptions\n'
    'local_launch(config_from_values(json.loads(sys.argv[1])), [sys.executable, "-c", *sys.argv[2:]], '
    'RestartOptions(retries=0), processes=2, devices=1, say=print).run()'
)


def has_ended(pid):
    return not Path(f'/proc/{pid}').exists() or Path(f'/proc/{pid}/stat').read_text().split()[2] == 'Z'


@pytest.mark.skipif(sys.platform != 'linux', reason='PR_SET_PDEATHSIG')
def test_processes_do_not_outlive_their_launcher_and_save_before_they_end(local, values):
    """One of the two is stopped."""
    program = (
        HEAD
        + """
def save(number, frame):
    (run / f'saved-{me}').write_text('')
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
reached('handler')
(run / 'ready').write_text('')
wait()
"""
    )
    command = [sys.executable, '-c', LAUNCHER, json.dumps(values), program, str(local.directory)]
    with subprocess.Popen(command) as launcher:
        try:
            until = time.monotonic() + 60
            while not (local.directory / 'ready').exists():
                assert time.monotonic() < until
                time.sleep(0.02)
            pids = local.events('started')[0]['processes']
            os.kill(pids[1], signal.SIGSTOP)
        finally:
            launcher.kill()
    until = time.monotonic() + 60
    while not all(map(has_ended, pids)):
        assert time.monotonic() < until, 'a process outlives its launcher'
        time.sleep(0.02)
    assert sorted(path.name for path in local.directory.glob('saved-*')) == ['saved-0', 'saved-1']


def test_the_history_of_a_run_in_a_bucket_is_uploaded(s3, values, tmp_path, monkeypatch):
    """And the restarts follow the checkpoints there. The processes of this test write no file."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    local = Local(values | {'run_dir': f'{s3.url}/run'})
    local.directory = working_directory(local.config.run_dir)
    program = """
print('said', attempt, flush=True)
sys.exit(attempt == 1) if me == 1 else wait()
"""
    s3.put('run/checkpoints/5/manifest.json', b'')
    s3.put('run/checkpoints/7/state/0', b'')
    assert local(program.replace('wait()', 'sys.exit(0)'), retries=1) == 0
    events = read_attempts(locate(f'{s3.url}/run'))
    assert [(event['event'], event.get('step')) for event in events] == [
        ('started', None), ('ended', 5), ('started', None), ('ended', 5),
    ]  # fmt: skip
    [output] = s3.keys('run/output/process-1.txt/')
    assert s3.content(output) == b'said 1\nsaid 2\n'


def test_an_unwritable_directory_is_a_user_error(local):
    local.directory.mkdir()
    (local.directory / 'output').write_text('')
    with pytest.raises(UserError, match='cannot be written'):
        local('')


def test_the_launcher_sets_the_number_of_simulated_devices(monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', '--xla_force_host_platform_device_count=8 --other=1')
    assert devices_of(3, 2) == {'JAX_NUM_CPU_DEVICES': '2', 'JAX_LOCAL_DEVICE_IDS': '6,7', 'XLA_FLAGS': '--other=1'}


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--processes', '0'], 'greater than or equal to 1'),
        ([], "Missing option '--processes'"),
        (['-n', '3'], 'cannot be divided among 3 processes'),
        (['-n', '2', '--devices-per-process', '3'], 'there are 6 devices'),
        (['-n', '2', 'steps=many'], 'steps'),
        (['-n', '2', 'processes.count=4'], 'processes.count is 4, but --processes is 2'),
        (['-n', '2', 'processes.index=0'], 'the launcher sets processes.index'),
    ],
)
def test_a_mistake_is_reported_before_any_process_starts(values, tmp_path, capfd, arguments, message):
    config = tmp_path / 'run.yaml'
    config.write_text(json.dumps(values))
    with pytest.raises(SystemExit) as stopped:
        main(['launch', 'local', str(config), *arguments])
    assert stopped.value.code == 2
    out, err = capfd.readouterr()
    assert message in err
    assert out == ''
    assert not os.path.exists(values['run_dir'])
