"""Where processes should be: from variables as each engine sets them."""

import socket

import pytest

from pretrax.system.process_hosts import described, expected_hosts


@pytest.mark.parametrize(
    ('variables', 'hosts'),
    [
        ({'PRETRAX_HOSTS': 'box1,box2,box3'}, ['box1', 'box2', 'box3']),
        ({'PRETRAX_HOSTS': 'box1,box2'}, []),  # of another run
        # As Slurm 22.05 sets them: scontrol show hostnames prints the same names.
        ({'SLURM_STEP_NODELIST': 'node[08-10]', 'SLURM_STEP_TASKS_PER_NODE': '1(x3)'}, ['node08', 'node09', 'node10']),
        ({'SLURM_STEP_NODELIST': 'a[1,7],login', 'SLURM_STEP_TASKS_PER_NODE': '1(x3)'}, ['a1', 'a7', 'login']),
        ({'SLURM_STEP_NODELIST': 'r[1-2]-ib', 'SLURM_STEP_TASKS_PER_NODE': '2,1'}, ['r1-ib', 'r1-ib', 'r2-ib']),
        ({'SLURM_STEP_NODELIST': 'r[1-2]', 'SLURM_STEP_TASKS_PER_NODE': '2,1', 'SLURM_DISTRIBUTION': 'cyclic'}, []),
        ({'TPU_WORKER_HOSTNAMES': 't0,t1,t2'}, ['t0', 't1', 't2']),
        ({}, []),
    ],
)
def test_each_engine_says_where_processes_are(variables, hosts):
    assert expected_hosts(3, 1, 'anywhere:1', variables) == hosts


def test_pods_of_a_job_are_numbered(monkeypatch):
    monkeypatch.setattr(socket, 'gethostname', lambda: 'base-1')
    assert expected_hosts(3, 1, 'base-0.base.default:8476', {}) == ['base-0', 'base-1', 'base-2']
    assert expected_hosts(3, 2, 'base-0.base.default:8476', {}) == [], 'pods are numbered in another way'


def test_a_few_processes_are_named():
    assert described([2], {2: 'node7'}) == 'process 2 (node7)'
    assert described([5, 2], {2: 'node7'}) == 'processes 2 (node7) and 5'
    assert described(range(1, 100), {}) == 'processes 1, 2, 3, 4, 5, 6, 7, 8 and 91 more'
