"""What Slurm's commands print, as its manual pages and clusters show it."""

import contextlib

import pytest

from pretrax.errors import UnavailableError, UserError
from pretrax.launch import slurm_client
from pretrax.launch.options import Resources
from pretrax.launch.record import LaunchRecord, write_record
from pretrax.launch.registry import refuse_if_running
from pretrax.launch.slurm import ENGINE, check_cluster, submit
from pretrax.launch.slurm_client import ask, nodes_down, partitions

SINFO = """\
gpu*|up|2-00:00:00|1-infinite|12|64|gpu:a100:8(S:0-1)
gpu*|up|2-00:00:00|1-infinite|4|128+|gpu:h100:4,gpu:l4:1
cpu|up|infinite|1-8|100|48|(null)
old|drain|30:00|1|2|16|(null)
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Makes a program in the place of one of Slurm's that prints a text."""

    def program(name, text, code=0):
        (tmp_path / 'text').write_text(text)
        (tmp_path / name).write_text(f'#!/bin/sh\n/bin/cat {tmp_path}/text >&{2 if code else 1}\nexit {code}\n')
        (tmp_path / name).chmod(0o755)

    monkeypatch.setenv('PATH', str(tmp_path))
    return program


def test_partitions(slurm):
    slurm('sinfo', SINFO)
    found = [(one.name, one.is_default, one.is_up, one.most_minutes, one.most_nodes, one.gpus) for one in partitions()]
    assert found == [
        ('gpu', True, True, 2880, None, 8), ('gpu', True, True, 2880, None, 5), ('cpu', False, True, None, 8, 0),
        ('old', False, False, 30, 1, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ('resources', 'said'),
    [
        (Resources(nodes=17), '--nodes 17: a job in partition gpu can have 16'),
        (Resources(nodes=9, partition='cpu'), '--nodes 9: a job in partition cpu can have 8'),
        (Resources(gpus_per_node=9), '--gpus-per-node 9: the nodes of partition gpu have 8'),
        (Resources(cpus_per_node=129), '--cpus-per-node 129: the nodes of partition gpu have 128'),
        (Resources(time='2881m'), 'the limit of partition gpu is 2-00:00:00'),
        (Resources(partition='old'), 'partition old takes no jobs now'),
        (Resources(partition='gpus'), "there is no partition 'gpus' in this Slurm\n  did you mean: --partition gpu\n"),
    ],
)
def test_what_a_partition_cannot_give_is_refused(slurm, resources, said):
    slurm('sinfo', SINFO)
    with pytest.raises(UserError) as refused:
        check_cluster(resources)
    assert said in str(refused.value)


def test_what_a_partition_can_give_is_accepted(slurm):
    slurm('sinfo', SINFO)
    check_cluster(Resources(16, 8, 128, '2880m'))
    check_cluster(Resources(8, time='100000m', partition='cpu'))


def test_numbers_of_nodes_are_not_abbreviated(tmp_path, slurm):
    slurm('sinfo', '')
    (tmp_path / 'sinfo').write_text(
        '#!/bin/sh\ncase " $* " in *" --noconvert "*) n=2048;; *) n=2K;; esac\n'
        'echo "cpu*|up|infinite|1-8|$n|48|(null)"\n'
    )
    assert [one.nodes for one in partitions()] == [2048]


SCRIPTS = {
    # Of a job that Slurm knows, and of one that it does not know.
    True: ('echo "JobId=7 JobState=$STATE Reason=Resources"', 'echo "$STATE"'),
    False: ('echo slurm_load_jobs error: Invalid job id specified >&2; exit 1',) * 2,
}


@pytest.fixture
def job(tmp_path, slurm, monkeypatch):
    """Makes Slurm know a job in this state; None: it does not know it."""

    def known(state):
        monkeypatch.setenv('STATE', state or '')
        for name, text in zip(('scontrol', 'squeue'), SCRIPTS[state is not None], strict=True):
            slurm(name, '')
            (tmp_path / name).write_text(f'#!/bin/sh\n{text}\n')

    return known


@pytest.mark.parametrize(
    ('state', 'runs'),
    [
        ('PENDING', True), ('RUNNING', True), ('SUSPENDED', True), ('COMPLETING', True), ('REQUEUED', True),
        ('COMPLETED', False), ('CANCELLED', False), ('TIMEOUT', False), (None, False),
        ('COMPLETED\nPENDING', True), ('COMPLETED\nFAILED', False),
    ],
)  # fmt: skip
def test_a_run_whose_job_is_not_over_is_not_submitted_again(tmp_path, job, state, runs):
    job(state)
    write_record(tmp_path, LaunchRecord(engine='slurm', job='7', nodes=2))
    with pytest.raises(UserError, match='runs already: Slurm job 7: ') if runs else contextlib.nullcontext():
        refuse_if_running(tmp_path)


def test_logs_that_are_not_there_yet(tmp_path, job):
    job('PENDING')
    record = LaunchRecord(engine='slurm', job='7', nodes=2, facts={'log': f'{tmp_path}/slurm-7.txt'})
    with pytest.raises(UserError, match=r'slurm-7.txt\nSlurm job 7: PENDING \(Resources\)'):
        ENGINE.log_command(record, tmp_path, None, 10, False)
    rows = record.model_copy(update={'facts': {'log': f'{tmp_path}/slurm-7-%a.txt', 'rows': 3}})
    with pytest.raises(UserError, match='--process ROW, from 1 to 3'):
        ENGINE.log_command(rows, tmp_path, None, 10, False)
    (tmp_path / 'slurm-7-2.txt').touch()
    assert ENGINE.log_command(rows, tmp_path, 2, 10, False)[-1] == f'{tmp_path}/slurm-7-2.txt'


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('sbatch: error: Invalid qos', '^Slurm refuses the job:\nInvalid qos$'),
        ('sbatch: error: Unable to contact slurm controller', 'sbatch: Slurm does not answer'),
    ],
)
def test_a_script_that_is_not_accepted(slurm, text, said):
    slurm('sbatch', text, 1)
    with pytest.raises(UserError, match=said):
        submit('#!/bin/bash')


@pytest.mark.parametrize('has_such_nodes', [True, False])
def test_a_job_may_wait_for_nodes_that_are_down(tmp_path, slurm, has_such_nodes):
    """Slurm 22.05: a test of the script fails both while a node is down and when no node is large enough."""
    refusal = 'echo {}Requested node configuration is not available >&2; exit 1'
    test, submission = (
        refusal.format('allocation failure: '),
        refusal.format('sbatch: error: Batch job submission failed: '),
    )
    slurm('sbatch', '')
    (tmp_path / 'sbatch').write_text(
        f'#!/bin/sh\n[ $1 = --parsable ] || {{ {test}; }}\n{"echo 22" if has_such_nodes else submission}\n'
    )
    if has_such_nodes:
        assert submit('#!/bin/bash') == ('22', 'it may wait: Slurm cannot start it with the nodes that are up now')
    else:
        with pytest.raises(
            UserError, match=r'^Slurm refuses the job:\nBatch job submission failed: Requested node conf'
        ):
            submit('#!/bin/bash')


def test_nodes_that_are_lost(slurm):
    states = ['ALLOCATED', 'DOWN', 'MIXED+DRAIN', 'ALLOCATED*', 'IDLE+NOT_RESPONDING', 'DOWN*+DRAIN']
    slurm('scontrol', ''.join(f'NodeName=n{i} Arch=x86_64 State={s} Owner=N/A\n' for i, s in enumerate(states)))
    assert nodes_down([f'n{i}' for i in range(6)]) == {'n1', 'n3', 'n4', 'n5'}


def test_a_controller_that_does_not_answer_is_no_mistake_of_the_user(slurm, monkeypatch):
    slurm('sinfo', 'sinfo: error: Unable to contact slurm controller (connect failure)', 1)
    with pytest.raises(UnavailableError, match='Slurm does not answer'):
        ask('sinfo')
    slurm('sinfo', 'sinfo: error: Invalid user id', 1)
    with pytest.raises(UserError, match='sinfo refuses:\nsinfo: error: Invalid user id') as refused:
        ask('sinfo')
    assert not isinstance(refused.value, UnavailableError)
    monkeypatch.setattr(slurm_client, '_PATIENCE', 0.2)
    monkeypatch.setenv('PATH', '/usr/bin:/bin')
    with pytest.raises(UnavailableError, match='sleep does not answer'):
        ask('sleep', '10')
