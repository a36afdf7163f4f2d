"""Devices of this process: eight simulated ones."""

import jax.numpy as jnp

from pretrax import config_from_values
from pretrax.doctor import devices
from pretrax.doctor.comparison import compare_nodes
from pretrax.doctor.findings import Context
from runs import BIGRAM

VALUES = {
    'name': 'a', 'model': BIGRAM, 'data': {'name': 'synthetic', 'vocab_size': 96}, 'steps': 4,
    'batch': {'tokens': 128, 'sequence_length': 16}, 'optimizer': {'learning_rate': 1e-2},
}  # fmt: skip


def test_a_device_that_multiplies_wrongly(monkeypatch):
    assert [finding.status for finding in devices.products(Context(None))] == ['ok']
    product = jnp.matmul
    monkeypatch.setattr(jnp, 'matmul', lambda *a, **b: product(*a, **b).at[3, 5].add(1))
    [found] = devices.products(Context(None))
    assert found.status == 'failure'
    assert found.result.startswith('wrong: device 0 in float32')


def test_a_node_with_fewer_devices():
    here = list(devices.present(Context(None)))
    assert here[0].result == '8 x CPU device'
    there = [type(here[0])('devices', '7 x CPU device', same='7 x CPU device', fix='look')]
    assert [(row.status, row.nodes) for row in compare_nodes({0: here, 1: here, 2: there})] == [('failure', (2,))]


def test_a_mesh_that_does_not_fit():
    [good] = devices.mesh(Context(config_from_values(VALUES | {'mesh': {'d': 4, 't': 2, 'r': 1}})))
    assert (good.status, good.result) == ('ok', 'r=1, d=4, t=2 of 8 devices')
    [bad] = devices.mesh(Context(config_from_values(VALUES | {'mesh': {'d': 3, 't': 1, 'r': 1}})))
    assert bad.status == 'failure'
    assert '8' in bad.result


class Busy:
    """A device on which another program has memory."""

    platform, id, device_kind = 'gpu', 0, 'NVIDIA H100 80GB HBM3'

    def memory_stats(self):
        return {'bytes_limit': 80e9, 'bytes_in_use': 30e9}


def test_memory_in_use(monkeypatch):
    assert list(devices.memory_in_use(Context(None))) == []
    monkeypatch.setattr(devices.jax, 'local_devices', lambda: [Busy()])
    [found] = devices.memory_in_use(Context(None))
    assert (found.status, found.result) == ('warning', '30 GB of 80 GB on device 0 are in use')


def test_the_rate_of_products(monkeypatch):
    monkeypatch.setattr(devices, '_SECONDS', 0.2)
    [found] = devices.rates(Context(None))
    assert found.compare
    assert found.amount is not None
    assert 1e8 < found.amount < 1e14


def test_results_that_change_are_a_failure(monkeypatch):
    monkeypatch.setattr(devices, '_SECONDS', 0.1)
    monkeypatch.setattr(devices.jnp, 'array_equal', lambda a, b: False)
    assert 'failure' in [finding.status for finding in devices.rates(Context(None))]
