"""`pretrax doctor` in one process and in several: it reports every injected fault, with the name of the node."""

import os
import re

import pytest

from doctored import doctored

QUICKSTART = 'quickstart'


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
