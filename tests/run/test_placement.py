"""Where devices stand in the mesh: r across slices and hosts, t among neighbors."""

import dataclasses

import numpy as np
import pytest

from pretrax.model.axes import AXES
from pretrax.run.placement import n_slices, place


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    slice_index: int = 0
    platform: str = 'gpu'


def gpus(hosts, each=4):
    """In an order that says nothing."""
    devices = [Device(i, i // each) for i in range(hosts * each)]
    return [devices[i] for i in np.random.default_rng(0).permutation(len(devices))]


def sizes(**axes):
    return dict.fromkeys(AXES, 1) | axes


@pytest.mark.parametrize(
    ('hosts', 'axes', 'said'),
    [
        (1, {'d': 4}, 'd on one host'),
        (1, {'d': 2, 't': 2}, 'd t on one host'),
        (4, {'r': 4, 'd': 4}, 'r across 4 hosts; d inside a host'),
        (4, {'r': 2, 'd': 2, 't': 4}, 'r d across 2 hosts; t inside a host'),
        (4, {'p': 4, 'c': 2, 't': 2}, 'c t inside a host; p across 4 hosts'),
        (2, {'t': 8}, 't across 2 hosts'),
    ],
)
def test_hosts_are_joined_by_the_axes_that_talk_least(hosts, axes, said):
    placed, told = place(gpus(hosts), sizes(**axes))
    assert told == said
    assert placed.shape == tuple(sizes(**axes)[axis] for axis in AXES)
    assert len({d.id for d in placed.flat}) == placed.size


def test_an_axis_across_slices_that_talks_much_is_told_as_slow():
    devices = [Device(i, i // 4, slice_index=i // 8, platform='gpu') for i in range(16)]
    assert n_slices(devices) == 2
    _, told = place(devices, sizes(d=16))
    assert 'SLOW: d across slices; make mesh.r a multiple of 2' in told
    _, told = place(devices, sizes(r=2, d=8))
    assert told == 'r across 2 slices; d across 2 hosts'
