"""What decides inside a Slurm job, without one; tests/launch/test_slurm.py has real ones."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from pretrax import config_from_values
from pretrax.errors import UserError
from pretrax.launch import slurm_job
from pretrax.launch.remote import Agents
from pretrax.launch.restarts import RestartOptions
from pretrax.launch.slurm_job import SlurmJob, fruitless, supervise
from pretrax.observe.attempts import read_attempts
from pretrax.storage import locate


def events(*allocations):
    """Events of a job: (step, None: its node was lost; else whether it was preempted)."""
    for step, preempted in allocations:
        yield {'event': 'allocated', 'job': '7', 'step': step}
        yield {'event': 'started', 'attempt': 1}
        if preempted is not None:
            yield {'event': 'released', 'job': '7', 'preempted': preempted}


@pytest.mark.parametrize(
    ('allocations', 'step', 'count'),
    [
        ([], 0, 0),
        ([(0, False)], 0, 1),
        ([(0, None), (0, None)], 0, 2),
        ([(0, False), (0, False), (5, False)], 5, 1),  # which saved nothing after step 5
        ([(0, False), (0, False)], 5, 0),  # the last one saved step 5
        ([(5, True), (5, True), (5, False), (5, True)], 5, 1),  # preempted ones do not count
    ],
)
def test_allocations_without_a_new_checkpoint_are_counted(allocations, step, count):
    assert fruitless([*events(*allocations)], '7', step) == count
    assert fruitless([*events(*allocations)], '8', step) == 0, 'a job of its own'


def test_it_runs_inside_a_job():
    with pytest.raises(UserError, match='this is not inside a Slurm job'):
        SlurmJob({'SLURM_JOB_ID': '7'})


SLURM = {
    'srun': 'for word; do case $word in --nodelist=*) node=${word#--nodelist=};; esac; done; . $0.$node',
    'scontrol': """case "$*" in
        *hostnames*) printf '%s\\n' n1 n2 n3;;
        *node*) . $0.nodes;;
        *job*) . $0.job;;
    esac""",
}
UNABLE = 'echo "Unable to contact slurm controller (connect failure)" >&2; exit 1'
UP = ''.join(f'echo NodeName=n{number} State=ALLOCATED\n' for number in (1, 2, 3))


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Writes what scontrol and srun do: of the nodes n1 to n3, and of the job."""

    def write(nodes=UP, job='echo JobState=RUNNING PreemptTime=None', **steps):
        for name, text in {'scontrol.nodes': nodes, 'scontrol.job': job}.items():
            (tmp_path / name).write_text(text)
        for node in ('n1', 'n2', 'n3'):
            (tmp_path / f'srun.{node}').write_text(steps.get(node, 'exit 0'))
        return SlurmJob({'SLURM_JOB_ID': '7', 'SLURM_JOB_NODELIST': 'n[1-3]'})

    for name, text in SLURM.items():
        (tmp_path / name).write_text(f'#!/bin/sh\n{text}\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    monkeypatch.setattr(slurm_job, '_PROBE', 2.0)
    monkeypatch.setattr(slurm_job, '_LOOK', 0.05)
    return write


SILENT, FAILS = 'exec sleep 60', 'exit 1'


@pytest.mark.parametrize(
    ('facts', 'gone'),
    [
        ({}, set()),
        ({'n2': SILENT}, {'n2'}),
        ({'n2': FAILS}, {'n2'}),
        ({'n2': SILENT, 'nodes': UNABLE, 'job': UNABLE}, {'n2'}),
        ({'nodes': UNABLE, 'job': UNABLE}, set()),
        ({'nodes': UP.replace('n3 State=ALLOCATED', 'n3 State=DOWN*')}, {'n3'}),
        # If no node answers, the cause is elsewhere: a busy controller, a prolog, a disk that hangs.
        (dict.fromkeys(('n1', 'n2', 'n3'), SILENT), set()),
        (dict.fromkeys(('n1', 'n2', 'n3'), FAILS) | {'nodes': UNABLE, 'job': UNABLE}, set()),
        (
            dict.fromkeys(('n1', 'n2', 'n3'), SILENT) | {'nodes': UP.replace('n3 State=ALLOCATED', 'n3 State=DOWN*')},
            {'n3'},
        ),
        ({'job': 'echo JobState=RUNNING PreemptTime=2030-01-01T00:00:00'}, {'n1', 'n2', 'n3'}),
    ],
)
def test_nodes_that_are_gone(cluster, facts, gone):
    assert cluster(**facts).gone(['n1', 'n2', 'n3']) == gone


def test_a_step_gets_the_identity_and_the_container_the_run_directory(cluster, tmp_path, monkeypatch):
    cluster()
    monkeypatch.chdir(tmp_path)
    environment = {'SLURM_JOB_ID': '7', 'SLURM_JOB_NODELIST': 'n[1-3]'}
    job = SlurmJob(environment, 'image', mounts=[Path('/scratch/run'), tmp_path / 'runs' / 'a'])
    # srun(1): with SLURM_EXPORT_ENV=NONE, steps get no variables unless --export says otherwise.
    (tmp_path / 'srun').write_text('#!/bin/sh\nread asked; echo "$asked $@"\n')
    with job.start(Agents(tmp_path), [0, 2], ['train'], 'first') as group:
        while len(group.codes()) < 2:
            time.sleep(0.05)
        (said,) = group.tail(1)
    asked, end = json.JSONDecoder().raw_decode(said)
    assert asked['attempt'] == 'first'
    assert asked['environment']['JAX_PROCESS_ID'] == '1'
    assert asked['environment']['JAX_NUM_PROCESSES'] == '2'
    assert '--export=ALL' in said[end:].split()
    assert f'--container-mounts={tmp_path}:{tmp_path},/scratch/run:/scratch/run' in said.split()


def test_the_next_allocation_of_a_run_in_a_bucket_sees_that_it_was_preempted(
    cluster, s3, values, tmp_path, monkeypatch
):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    s3.put('run/checkpoints/5/manifest.json', b'')
    config = config_from_values(values | {'mesh': {}, 'run_dir': f'{s3.url}/run'})
    preempted = 'echo JobState=RUNNING PreemptTime=2030-01-01T00:00:00'
    job = cluster(job=preempted, n1='exit 75', n2='exit 75', n3='exit 75')
    options = RestartOptions(retries=0)
    assert supervise(config, job, ['train'], options, devices_per_node=1, say=print) == 75
    events = read_attempts(locate(f'{s3.url}/run'))
    assert events[-1]['event'] == 'released'
    assert fruitless(events, '7', 5) == 0


@pytest.mark.parametrize(
    ('listing', 'requeues'),
    [('echo n2', True), ('echo n1; echo n2', False), ('exit 1', False), ('exit 0', False)],
)
def test_a_job_without_its_first_node_is_requeued_from_another_one(tmp_path, listing, requeues):
    scripts = {
        'squeue': 'echo n[1-2]',
        'scontrol': f'case $1 in requeue) echo $2 > {tmp_path}/requeued;; *) {listing};; esac',
        'sleep': f'[ ! -e {tmp_path}/slept ] && touch {tmp_path}/slept',  # it looks once
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f'#!/bin/sh\n{text}\n')
        (tmp_path / name).chmod(0o755)
    subprocess.run(
        ['bash', '-c', slurm_job._REQUEUE_WITHOUT, 'watch', 'n1'], timeout=30,
        env={'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'SLURM_JOB_ID': '7'},
    )  # fmt: skip
    assert (tmp_path / 'requeued').exists() is requeues
