"""Connections between nodes, their clocks, and the directory that they share."""

import os
import socket
import threading

import pytest

from pretrax import config_from_values
from pretrax.doctor import network
from pretrax.doctor.findings import Context
from runs import BIGRAM
from side_by_side import free_port

VALUES = {
    'name': 'a', 'model': BIGRAM, 'data': {'name': 'synthetic', 'vocab_size': 96}, 'steps': 4,
    'batch': {'tokens': 64, 'sequence_length': 16}, 'optimizer': {'learning_rate': 1e-2},
}  # fmt: skip
HERE = socket.gethostname()


@pytest.fixture
def listener():
    opened = network.listen()
    yield opened
    opened.close()


def others(listener, **changes):
    this = {'host': HERE, 'port': listener.getsockname()[1], 'address': '127.0.0.1'}
    return {0: this, 1: this | changes, 2: this}


def bad(found):
    return [(finding.check, finding.status) for finding in found if finding.status != 'ok']


def test_nodes_that_reach_each_other(listener):
    found = list(network.connections(Context(None, 0, 3), others(listener)))
    assert [(finding.check, finding.result) for finding in found] == [('connections', 'each node reaches 2 others')]


def test_a_port_that_is_closed(listener):
    found = list(network.connections(Context(None, 0, 3), others(listener, port=free_port())))
    assert bad(found) == [('connections', 'failure')]
    assert 'Connection refused' in found[0].result


def test_names_that_mislead(listener, monkeypatch):
    """Another node cannot be resolved, and the own name is an address that only this machine has."""
    monkeypatch.setattr(socket, 'gethostname', lambda: 'localhost')
    found = list(network.connections(Context(None, 0, 3), others(listener, host='no-such-host.invalid')))
    assert bad(found) == [('host name', 'warning')] * 2
    texts = sorted(finding.result for finding in found if finding.status != 'ok')
    assert texts[0] == 'cannot resolve no-such-host.invalid'
    assert 'which other nodes cannot reach' in texts[1]


@pytest.mark.parametrize(('ahead', 'expected'), [(0.2, 'ok'), (-30.0, 'warning'), (1000.0, 'failure')])
def test_clocks(ahead, expected):
    found = network.clock_findings({4: (ahead, 0.001)})[4]
    assert found.status == expected
    assert network.clock_findings({4: (3.0, 2.5)})[4].status == 'ok', 'it may be right'


def test_a_directory_that_is_shared_and_one_that_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(network, '_SEEN', 0.3)
    here, there = (Context(config_from_values(VALUES | {'run_dir': str(tmp_path / name / 'runs' / 'a')}), i, 2)
                   for i, name in enumerate(('one', 'two')))  # fmt: skip
    for name in ('one', 'two'):
        (tmp_path / name).mkdir()
    with network.token(here) as path:
        assert [finding.status for finding in network.shared_directory(here, path)] == ['ok']
        found = list(network.shared_directory(there, path))
    assert bad(found) == [('shared directory', 'failure')]
    assert os.listdir(tmp_path / 'one') == []


def test_a_file_that_other_nodes_see_late(tmp_path):
    """As on NFS, whose clients remember for some seconds that a file was not there."""
    context = Context(config_from_values(VALUES | {'run_dir': str(tmp_path)}), 1, 2)
    late = threading.Timer(0.5, (tmp_path / 'token').touch)
    late.start()
    assert [finding.status for finding in network.shared_directory(context, '/elsewhere/token')] == ['ok']
    late.join()
