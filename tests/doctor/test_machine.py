"""The machine: its name, clock of its cores, and time since boot."""

import socket

import pytest

from pretrax.doctor import machine
from pretrax.doctor.comparison import compare_nodes
from pretrax.doctor.findings import Context


def test_a_name_that_cannot_be_resolved(monkeypatch):
    assert [finding.status for finding in machine.own_name(Context(None, 0, 2))] == ['ok']
    monkeypatch.setattr(socket, 'gethostname', lambda: 'no-such-host.invalid')
    found = list(machine.own_name(Context(None, 0, 2)))
    assert [finding.status for finding in found] == ['failure']
    assert 'no-such-host.invalid cannot be resolved' in found[0].result


@pytest.mark.parametrize(
    ('governor', 'driver', 'expected'),
    [('powersave', 'acpi-cpufreq', ['warning']), ('powersave', 'intel_pstate', ['ok']), ('performance', 'acpi-cpufreq',
    ['ok']),
     ('', '', [])],
)  # fmt: skip
def test_the_governor_of_the_cores(tmp_path, governor, driver, expected):
    directory = tmp_path / 'sys/devices/system/cpu/cpu0/cpufreq'
    directory.mkdir(parents=True)
    (directory / 'scaling_governor').write_text(f'{governor}\n')
    (directory / 'scaling_driver').write_text(f'{driver}\n')
    assert [finding.status for finding in machine.governor(Context(None, root=tmp_path))] == expected


def test_a_machine_that_has_just_started_is_well(tmp_path):
    """Autoscalers and queues for TPUs give new machines."""
    (tmp_path / 'proc').mkdir()
    for seconds, expected in ('120.5 100.0', '2 min'), ('36000.0 1.0', '10 h'), ('360000.0 100.0', '4 days'):
        (tmp_path / 'proc/uptime').write_text(seconds)
        [found] = machine.uptime(Context(None, root=tmp_path))
        assert (found.status, found.result) == ('ok', expected)


def test_a_node_with_fewer_cores_is_named(monkeypatch):
    here = list(machine.cores(Context(None)))
    monkeypatch.setattr(machine, 'usable_cores', lambda: 1000)
    there = list(machine.cores(Context(None)))
    rows = compare_nodes({0: here, 1: here, 2: there})
    assert [(row.status, row.nodes) for row in rows] == [('warning', (2,))]
    assert '1000 x' in rows[0].result
