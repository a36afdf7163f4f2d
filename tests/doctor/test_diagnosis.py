"""`pretrax doctor` in one process and in several: it reports every injected fault, with the name of the node."""

import os
import re
import time

import pytest

from doctored import doctored
from preloaded import run
from pretrax.doctor import diagnosis
from pretrax.doctor.findings import Context, Finding

QUICKSTART = 'quickstart'


def test_a_check_that_hangs_is_a_failure_and_the_others_run(monkeypatch):
    def run_directory(context):
        time.sleep(100)
        yield Finding('never', '')

    def cores(context):
        yield Finding('cores', '2')

    monkeypatch.setattr(diagnosis, 'MACHINE', (run_directory, cores))
    found = diagnosis.check_machine(Context(None, seconds=4.0))
    assert [(one.check, one.status) for one in found] == [('run directory', 'failure'), ('cores', 'ok')]


def test_one_machine_without_a_configuration():
    found = run(['pretrax', 'doctor'], env=dict(os.environ) | {'XLA_FLAGS': ''})
    assert found.returncode == 0, found.stdout + found.stderr
    lines = found.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert {'open', 'devices', 'known', 'products', 'versions'} <= {
        line.split()[1] for line in lines if line[:2] == 'ok'
    }


@pytest.mark.slow
def test_too_few_open_files_end_with_1(tmp_path):
    found = doctored(tmp_path, before={0: ('prlimit', '--nofile=64:256')})
    assert found.codes == [1]
    [row] = found.bad('open files')
    assert row['status'] == 'failure'
    assert row['fix'].startswith('LimitNOFILE=')


@pytest.mark.nightly
def test_two_nodes_that_are_well(tmp_path):
    """Nothing is left behind in the run directory."""
    found = doctored(tmp_path, QUICKSTART, f'run_dir={tmp_path}/runs/a', processes=2)
    assert found.codes == [0, 0], found.outputs
    good = found.good()
    assert good['all-reduce'].endswith('no figure for this hardware')
    assert good['devices'] == '1 x CPU device'
    assert good['mesh'].endswith('of 2 devices')
    assert 'digest' in good['configuration']
    assert 'is the same on all nodes' in good['shared directory']
    assert not (tmp_path / 'runs').exists()
    assert sorted(os.listdir(tmp_path)) == ['sitecustomize.py']


@pytest.mark.nightly
def test_four_nodes_of_which_three_are_hurt(tmp_path):
    hurt = {1: {'HURT': 'version'}, 2: {'HURT': 'clock:-30', 'NCCL_ALGO': 'Ring'}, 3: {'HURT': 'product'}}
    found = doctored(tmp_path, processes=4, hurt=hurt)
    assert set(found.codes) == {1}
    names = {
        check: [row['nodes'] for row in found.bad(check)] for check in ('jax', 'clock', 'NCCL_ALGO', 'known product')
    }
    host = os.uname().nodename
    assert names == {
        'jax': [[f'{host}/1']], 'clock': [[f'{host}/2']], 'NCCL_ALGO': [[f'{host}/2']],
        'known product': [[f'{host}/3']],
    }  # fmt: skip
    assert re.match(r'(29\.\d+|30|30\.\d+) s behind the first node', found.bad('clock')[0]['result'])


@pytest.mark.nightly
def test_the_slow_node_is_named(tmp_path):
    """The third of three nodes shares its core with a program that never rests, and that the system prefers."""
    found = doctored(tmp_path, processes=3, limit=240, hurt={2: {'HURT': 'slow'}})
    assert [f'{os.uname().nodename}/2'] in [row['nodes'] for row in found.bad('products')]
    assert {row['status'] for row in found.bad('products')} == {'warning'}, 'it is slow, but would train'


@pytest.mark.nightly
def test_a_process_that_never_joins(tmp_path):
    found = doctored(tmp_path, processes=3, limit=15, absent=(1,))
    assert found.codes == [1, 1]
    [row] = found.bad('nodes')
    assert (row['nodes'], row['result']) == (['process 1'], 'did not connect within 15 s')
    assert found.bad('devices')[0]['result'].startswith('not checked')


@pytest.mark.nightly
def test_without_the_first_node_the_others_say_why(tmp_path):
    found = doctored(tmp_path, processes=2, limit=3, absent=(0,))
    assert found.codes == [1]
    [row] = found.bad('first node')
    assert 'does not answer within 3 s: Connection refused' in row['result']


@pytest.mark.nightly
@pytest.mark.parametrize(
    ('hurt', 'check', 'result', 'node'),
    [
        ('crash', 'devices', 'ended by SIGSEGV', 1),
        ('end', 'nodes', 'has ended', 1),
        ('hang', 'all-reduce', 'no result within 25 s', 1),  # gloo itself gives up after 30 s
    ],
)
def test_a_node_that_fails_in_another_way(tmp_path, hurt, check, result, node):
    found = doctored(tmp_path, processes=2, limit=25 if hurt == 'hang' else 40, hurt={1: {'HURT': hurt}})
    assert 1 in found.codes
    rows = [row for row in found.bad(check) if row['result'] == result]
    assert len(rows) == 1, found.checks
    assert f'{os.uname().nodename}/{node}' in rows[0]['nodes']


@pytest.mark.nightly
def test_a_node_behind_a_firewall_whose_name_cannot_be_resolved(tmp_path):
    found = doctored(tmp_path, processes=2, hurt={1: {'HURT': 'door,host'}})
    assert found.codes == [1, 1]
    [row] = found.bad('connections')
    assert row['nodes'] == [os.uname().nodename]
    assert row['result'] == 'cannot connect to no-such-host.invalid port 9: Connection refused'
    named = {(row['status'], tuple(row['nodes'])) for row in found.bad('host name')}
    assert ('failure', ('no-such-host.invalid',)) in named


@pytest.mark.nightly
def test_directories_that_are_not_shared_and_configurations_that_differ(tmp_path):
    """A relative run directory is another one in another directory, as on machines without a shared disk."""
    for name in 'ab':
        (tmp_path / name).mkdir()
    found = doctored(tmp_path, QUICKSTART, processes=2, cwd={0: tmp_path / 'a', 1: tmp_path / 'b'}, limit=60)
    assert found.codes == [1, 1]
    assert [row['status'] for row in found.bad('shared directory')] == ['failure']
    assert os.listdir(tmp_path / 'a') == os.listdir(tmp_path / 'b') == []


def test_a_word_that_is_no_configuration(tmp_path):
    found = run(['pretrax', 'doctor', 'steps=3'], cwd=tmp_path)
    assert found.returncode == 2
    assert 'pretrax doctor CONFIG steps=3' in found.stderr
