"""A process of several that is killed, started by nobody in particular: the others say so, leave stacks and code 75."""

import os
import signal
import subprocess

import pytest

from launched import PATIENCE, environment, write_run
from preloaded import programs
from pretrax import config_from_values, pretrain
from pretrax.errors import UserError
from pretrax.observe.attempts import read_attempts
from runs import BIGRAM, Quiet
from side_by_side import coordinator_address


@pytest.mark.slow
@pytest.mark.parametrize('victim', [0, 1])
def test_the_survivor_notices_and_leaves_with_75(tmp_path, victim):
    """Who is who is told by the configuration here; the launcher's tests tell it by the environment."""
    config = write_run(tmp_path, steps=10000, run_dir=str(tmp_path / 'run'))
    address = coordinator_address()
    both = [
        subprocess.Popen(
            [programs() / 'pretrax', 'train', str(config), 'processes.count=2',
             f'processes.index={index}', f'processes.coordinator={address}'],
            env=environment(JAX_PROCESS_ID=str(index)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        for line in both[0].stdout:
            if line.startswith('step 5/'):
                break
        both[victim].send_signal(signal.SIGKILL)
        said = both[1 - victim].communicate(timeout=PATIENCE)[1]
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert both[1 - victim].returncode == 75, said
    assert f'process {1 - victim}: another process of this run is lost (no heartbeat for 3 s' in said
    stacks = (tmp_path / 'run' / 'stacks' / f'process-{1 - victim}.txt').read_text()
    assert 'Fatal Python error: Aborted' in stacks
    assert 'in train' in stacks
    assert [event['event'] for event in read_attempts(tmp_path / 'run')] == ['began', 'stepped']


@pytest.mark.parametrize(
    ('variables', 'section', 'message'),
    [
        ({'JAX_NUM_PROCESSES': '4'}, {}, 'its number is not set'),
        ({'JAX_PROCESS_ID': '0'}, {}, 'the number of processes is not set'),
        (
            {'JAX_NUM_PROCESSES': '4', 'JAX_PROCESS_ID': '1'},
            {},
            '(?s)the address of the first process is not set.*JAX_COORDINATOR_ADDRESS',
        ),
        ({'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': '2', 'JAX_COORDINATOR_ADDRESS': 'a:1'}, {}, 'number 2 of 2'),
        ({'JAX_NUM_PROCESSES': 'two'}, {}, "JAX_NUM_PROCESSES='two': expected a positive number of processes"),
        ({'JAX_NUM_PROCESSES': '0'}, {}, "JAX_NUM_PROCESSES='0': expected a positive number of processes"),
        ({'JAX_NUM_PROCESSES': '2'}, {'count': 4}, 'processes.count is 4, but JAX_NUM_PROCESSES=2'),
        ({'JAX_NUM_PROCESSES': '1'}, {'count': 4}, 'processes.count is 4, but JAX_NUM_PROCESSES=1'),
        ({}, {'count': 4}, '(?s)processes.count is 4, but this process is alone.*launch local'),
        ({}, {'count': 2, 'index': 1}, 'the address of the first process is not set'),
    ],
)
def test_who_is_who_is_whole_or_refused(values, monkeypatch, variables, section, message):
    for name in ('JAX_NUM_PROCESSES', 'JAX_PROCESS_ID', 'JAX_COORDINATOR_ADDRESS'):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        pretrain(config_from_values(values | {'model': BIGRAM, 'processes': section}), progress=Quiet())
    assert not os.path.exists(values['run_dir']), 'nothing has begun'
