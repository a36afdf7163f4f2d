"""Bandwidth over eight simulated devices, and what the table of links says of real ones."""

import jax
import pytest

from pretrax.doctor import interconnect
from pretrax.doctor.findings import Context


def test_all_reduce_of_a_few_sizes_in_one_process():
    [found] = interconnect.all_reduce(Context(None))
    assert found.status == 'ok'
    assert found.result.count('GB/s of') == 3
    assert found.result.endswith('; no figure for this hardware')
    assert found.amount is not None
    assert found.amount > 0


def test_wrong_sums_are_a_failure(monkeypatch):
    sums = jax.lax.psum
    monkeypatch.setattr(jax.lax, 'psum', lambda x, axis: sums(x, axis) + 1)
    assert [finding.status for finding in interconnect.all_reduce(Context(None))] == ['failure']


class Card:
    platform, device_kind, slice_index = 'gpu', 'NVIDIA H100 80GB HBM3', 0

    def __init__(self, number):
        self.id, self.process_index = number, number // 8
        self.slice_index = number // 8


@pytest.mark.parametrize(('cards', 'gigabytes'), [(8, 450), (16, 400)])
def test_the_figure_of_the_table_is_the_speed_of_the_slowest_link(cards, gigabytes):
    """Inside a node NVLink, 450 GB/s in one direction; between nodes the eight 400 Gb/s cards of each."""
    found = interconnect._expected([Card(number) for number in range(cards)], 256_000_000)
    assert found == pytest.approx(gigabytes * 1e9, rel=1e-6)


def test_a_rate_far_below_the_table_is_a_warning(monkeypatch):
    monkeypatch.setattr(interconnect, '_expected', lambda devices, n_bytes: 4e15)
    [found] = interconnect.all_reduce(Context(None))
    assert found.status == 'warning'
    assert 'of 4e+06 GB/s' in found.result
