"""Software that differs between nodes."""

import pytest

from pretrax import config_from_values
from pretrax.doctor import software
from pretrax.doctor.comparison import compare_nodes
from pretrax.doctor.findings import Context
from runs import BIGRAM

VALUES = {
    'name': 'a', 'model': BIGRAM, 'data': {'name': 'synthetic', 'vocab_size': 96}, 'steps': 4,
    'batch': {'tokens': 64, 'sequence_length': 16}, 'optimizer': {'learning_rate': 1e-2},
}  # fmt: skip


def rows(check, *contexts):
    return compare_nodes({index: list(check(context)) for index, context in enumerate(contexts)})


def bad(found):
    return [(row.check, row.status, row.nodes) for row in found if row.status != 'ok']


@pytest.mark.parametrize('other', [{'jax': '0.0.1'}, {'libtpu': '0.1'}])
def test_another_version_or_package_on_one_node(monkeypatch, other):
    here = list(software.software(Context(None)))
    assert {finding.check for finding in here} >= {'Python', 'pretrax', 'jax', 'jaxlib'}
    versions = software.versions()
    monkeypatch.setattr(software, 'versions', lambda: versions | other)
    there = list(software.software(Context(None)))
    assert bad(compare_nodes({0: here, 1: there, 2: here})) == [(next(iter(other)), 'failure', (1,))]


def test_good_versions_are_one_line():
    found = rows(software.software, Context(None), Context(None))
    assert [row.check for row in found] == ['versions']
    assert 'jaxlib ' in found[0].result


def test_another_configuration_on_one_node():
    one = Context(config_from_values(VALUES))
    other = Context(config_from_values(VALUES | {'seed': 3}))
    assert bad(rows(software.configuration, one, other, other)) == [('configuration', 'failure', (0,))]
    numbered = Context(config_from_values(VALUES | {'processes': {'index': 1}}))
    assert bad(rows(software.configuration, one, numbered)) == []


def test_another_commit_on_one_node(monkeypatch):
    here = list(software.checkout(Context(None)))
    monkeypatch.setattr(software, 'git_state', lambda _: {'commit': 'f' * 40, 'changed': True})
    there = list(software.checkout(Context(None)))
    if not here:
        pytest.skip('this is no checkout')
    assert bad(compare_nodes({0: here, 1: here, 2: there})) == [('git commit', 'failure', (2,))]


@pytest.mark.parametrize(
    ('name', 'value', 'expected'),
    [
        ('NCCL_ALGO', 'Ring', 'failure'),
        ('XLA_FLAGS', '--xla_gpu_autotune_level=0', 'failure'),
        ('NCCL_SOCKET_IFNAME', 'eth1', 'warning'),
        ('JAX_PROCESS_ID', '7', None),
        ('XLA_FLAGS', '--xla_dump_to=/tmp/node7', None),
    ],
)
def test_a_variable_that_one_node_has(monkeypatch, name, value, expected):
    monkeypatch.setenv('XLA_FLAGS', '')
    here = list(software.variables(Context(None)))
    monkeypatch.setenv(name, value)
    there = list(software.variables(Context(None)))
    found = bad(compare_nodes({0: here, 1: here, 2: there}))
    assert found == ([(name, expected, (2,))] if expected else [])
