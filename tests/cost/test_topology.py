import itertools
import types

import pytest

from pretrax.cost.topology import parse_topology, topology_of
from pretrax.errors import UserError

# cloud.google.com/tpu/docs and MaxText's table of the same: name, shape of the slice in chips
SLICES = {
    'v4-8': '2x2x1', 'v4-64': '2x4x4', 'v4-1536': '8x8x12', 'v4-4096': '8x16x16',
    'v5e-16': '4x4', 'v5e-32': '4x8', 'v5litepod-128': '8x16', 'v5e-256': '16x16', 'v6e-256': '16x16',
    'v5p-128': '4x4x4', 'v5p-640': '4x4x20', 'v5p-1152': '4x12x12', 'v5p-3072': '8x12x16', 'v5p-5760': '12x12x20',
    'v5p-12288': '16x16x24', 'v5p-17920': '16x20x28', 'tpu7x-64': '2x4x4',
}  # fmt: skip


@pytest.mark.parametrize('name', SLICES)
def test_a_slice_has_its_documented_shape(name):
    assert 'x'.join(map(str, parse_topology(name).shape)) == SLICES[name]


@pytest.mark.parametrize(
    ('name', 'slices', 'devices', 'device'),
    [
        ('v5e-256', 2, 512, 'TPU v5e'),
        ('v5p-128', 1, 64, 'TPU v5p'),  # names count cores, a chip is one device
        ('tpu7x-64', 1, 64, 'TPU v7 (half a chip)'),  # a chip is two devices
        ('v5p:8x8x8', 1, 512, 'TPU v5p'),
        ('h200', 1, 1, 'H200 SXM'),
        ('h100x8', 4, 32, 'H100 SXM'),
        ('a3-high', 1, 8, 'H100 SXM'),
        ('a3-high x4', 1, 32, 'H100 SXM'),  # of machines, xN is their number
        ('a3-ultrax2', 2, 16, 'H200 SXM'),
        ('dgx-b200', 3, 24, 'B200'),
    ],
)
def test_devices_of_a_topology(name, slices, devices, device):
    topology = parse_topology(name, slices)
    assert (topology.n_devices, topology.device.name) == (devices, device)


@pytest.mark.parametrize(
    ('name', 'said'),
    [
        ('v5x-256', 'did you mean v5e-256'),
        ('v5e-100', 'near: v5e-16, v5e-32, v5e-64, v5e-128'),
        ('v5p-7', '7 cores, two per chip'),
        ('v5e:4x4x4', '2 dimensions'),
        ('h300', 'did you mean h200'),
        ('h100x3', '1, 2, 4 or 8'),
        ('a3-hihg', 'did you mean a3-high'),
        ('a3-foo', 'did you mean a3-high'),
        ('dgx-x200', 'did you mean dgx-h200'),
        ('a3-high x0', 'x0: expected 1 machine or more'),
        ('', 'no such hardware'),
    ],
)
def test_unknown_names_are_refused_with_the_nearest_ones(name, said):
    with pytest.raises(UserError, match=said) as refused:
        parse_topology(name)
    lines = str(refused.value).splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ('name', 'hosts'), [('h100x8', 1), ('a100x2', 1), ('gb200x72', 18), ('gb300x64', 16), ('gb200x2', 1)]
)
def test_a_node_of_gpus_is_one_machine_and_a_rack_has_four_gpus_per_machine(name, hosts):
    # NVIDIA's GB200 NVL72 has 18 compute trays with 4 GPUs each.
    assert parse_topology(name).hosts == hosts


def test_two_numbers_of_machines_that_differ_are_refused():
    with pytest.raises(UserError, match=r'--topology a3-high x4 with --slices 2: x4 is the number of machines'):
        parse_topology('a3-high x4', 2)
    assert str(parse_topology('a3-high x4', 4)) == str(parse_topology('a3-high', 4)) == '4 x a3-high'


def devices(kind, shape, slices=1, per_chip=1):
    """Devices as JAX describes those of a TPU: three coordinates, also on hardware of two dimensions."""
    places = itertools.product(range(slices), itertools.product(*map(range, shape)), range(per_chip))
    return [types.SimpleNamespace(device_kind=kind, slice_index=i, coords=(*at, 0)[:3]) for i, at, _ in places]


@pytest.mark.parametrize(
    ('kind', 'name', 'slices', 'per_chip'),
    [
        ('TPU v5 lite', 'v5e:4x8', 1, 1),
        ('TPU v5', 'v5p:2x2x4', 2, 1),
        ('TPU7x', 'tpu7x:2x2x2', 1, 2),
        ('NVIDIA H100 80GB HBM3', 'h100x8', 4, 1),
    ],
)
def test_devices_have_the_topology_that_they_fill(kind, name, slices, per_chip):
    topology = parse_topology(name, slices)
    found = topology_of(devices(kind, topology.shape, slices, per_chip))
    assert (found.version, found.shape, found.slices) == (topology.version, topology.shape, slices)


def test_devices_without_a_shape_have_no_topology():
    assert topology_of(devices('TPU v5 lite', (4, 4))[:-1]) is None  # a chip is missing
    assert topology_of(devices('cpu', (8,))) is None
    assert topology_of(devices('NVIDIA GH200 480GB', (8,))) is None
