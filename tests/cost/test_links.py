"""Seconds of collectives, against the formulas of How
to Scale Your Model (jax-ml.github.io/scaling-book), parts 2, 3, 12.
"""

import dataclasses

import numpy as np
import pytest

from pretrax.cost.devices import Reach
from pretrax.cost.links import MeshNetwork, Network, link_of, places_of, rings_of, wire_bytes
from pretrax.cost.topology import parse_topology

GB = 10**9


def reaching(topology, slices=1, reach=None):
    """Hardware whose links reach other shares than those of the table."""
    return dataclasses.replace(parse_topology(topology, slices), reach=reach)


def seconds(topology, kind, group, n_bytes, rings=None, **given):
    return Network(parse_topology(topology, **given)).transfer(kind, group, n_bytes, rings)[0]


@pytest.mark.parametrize(
    ('topology', 'group', 'rate'),
    [
        ('v5e:16x16', range(16), 2 * 4.5e10),  # one row, a closed ring, in both directions
        ('v5e:16x16', range(0, 256, 16), 2 * 4.5e10),  # one column
        ('v5e:16x16', range(256), 4 * 4.5e10),  # both dimensions
        ('v5e:4x8', range(8), 4.5e10),  # a row of a small slice is open: its ends have one link
        ('v5e:8x16', range(16), 2 * 4.5e10),  # 16 is closed in a slice of 8 x 16 too
        ('v5e:16x16', range(4), 4.5e10),  # a quarter of a row is open
        ('v5e:16x16', range(0, 16, 4), 2 * 4.5e10 / 4),  # every fourth of a row: four groups use its links
        ('v5p:8x8x4', range(4), 2 * 9e10),
        ('v5p:8x8x4', range(256), 6 * 9e10),
        ('v5p:2x4x4', range(4), 9e10),  # no torus below 4 x 4 x 4
        ('tpu7x:4x4x4', range(128), 6 * 4.5e10),  # two devices share the links of a chip
    ],
)
def test_a_gather_takes_the_bytes_of_the_others_over_the_links_of_its_dimensions(topology, group, rate):
    n = len(group) if not topology.startswith('tpu7x') else 128
    assert seconds(topology, 'all-gather', group, GB) == pytest.approx(GB * (n - 1) / n / rate)


@pytest.mark.parametrize(
    ('detail', 'one_ways'),
    [
        ('"strategy":"StrategyND","debug":"\\nStrategyND{colors:3 phases:3', 6),
        ('"strategy":"UniDirectionNDRingStrategy","debug":"\\nUniDirectionNDRingStrategy{colors:6 phases:3', 6),
        ('"emitter":"1DAllGatherMajorDim"', 2),
        ('"async_collective_fusion_config":{"flag_start":"-1"', 2),
        ('"color_strategies":[{"phase_rings":[{}]},{"phase_rings":[{}]}]', 2),
    ],
)
def test_xla_writes_how_many_rings_a_collective_uses(detail, one_ways):
    expected = 2 * GB * 255 / 256 / (one_ways * 9e10)
    assert seconds('v5p:8x8x4', 'all-reduce', range(256), GB, rings_of(detail)) == pytest.approx(expected)


def test_gpus_of_several_nodes_share_the_network_cards_of_their_node():
    everyone, one_each, node = range(32), range(0, 32, 8), range(8)
    per_gpu = 3200e9 / 8 / 8
    assert seconds('dgx-h100 x4', 'all-gather', node, GB) == pytest.approx(GB * 7 / 8 / 450e9)
    assert seconds('dgx-h100 x4', 'all-gather', everyone, GB) == pytest.approx(GB * 31 / 32 / (8 * per_gpu))
    assert seconds('dgx-h100 x4', 'all-reduce', one_each, GB) == pytest.approx(2 * GB * 3 / 4 / per_gpu)
    assert seconds('dgx-h100 x4', 'all-to-all', everyone, GB) == pytest.approx(GB * 3 / 4 / per_gpu)
    assert seconds('a3-high x4', 'all-reduce', one_each, GB) == pytest.approx(2 * GB * 3 / 4 / (800e9 / 8 / 8))
    assert link_of(parse_topology('h100x8')) == link_of(parse_topology('dgx-h100'))


def test_slices_are_connected_through_their_hosts():
    assert seconds('v5e:4x4', 'all-reduce', [0, 16], GB, slices=2) == pytest.approx(2 * GB / 2 / 3.125e9)


def test_an_exchange_on_a_ring_takes_a_quarter_of_the_gather_of_all():
    n = 16
    gather = seconds('v5e:16x16', 'all-gather', range(n), n * GB) * n / (n - 1)
    assert seconds('v5e:16x16', 'all-to-all', range(n), GB) == pytest.approx(gather / 4)


def shift(n, by=1):
    return [device for source in range(n) for device in (source, (source + by) % n)]


def test_a_permute_uses_the_links_of_one_direction():
    network = Network(parse_topology('v5e:16x16'))
    assert network.transfer('collective-permute', shift(16), GB) == (GB / 4.5e10, {'y+'})
    assert network.transfer('collective-permute', shift(16, -1), GB) == (GB / 4.5e10, {'y-'})
    assert network.transfer('collective-permute', shift(256, 16), GB) == (GB / 4.5e10, {'x+'})
    # Partners in halves of a ring: the link between the halves carries all of a half.
    for distance in (1, 2, 4, 8):
        partners = [device for source in range(16) for device in (source, source ^ distance)]
        assert network.transfer('collective-permute', partners, GB) == (distance * GB / 4.5e10, {'y+', 'y-'})
    # A quarter of the ring on: each link carries four of them.
    assert network.transfer('collective-permute', shift(16, 4), GB) == (4 * GB / 4.5e10, {'y+'})


def test_a_permute_between_nodes_uses_the_network():
    assert seconds('a3-mega x2', 'collective-permute', [0, 8, 8, 0], GB) == pytest.approx(GB / 25e9)
    assert seconds('a3-mega x2', 'collective-permute', [0, 1, 1, 0], GB) == pytest.approx(GB / 450e9)


def test_places_of_devices_decide_which_links_a_group_uses():
    """The first 16 devices of a mesh may be a 4 x 4 square of the slice."""
    square = [(0, x, y) for x in range(4) for y in range(4)]
    rest = [(0, x, y) for x in range(16) for y in range(16) if x >= 4 or y >= 4]
    network = Network(parse_topology('v5e:16x16'), [*square, *rest])
    taken, links = network.transfer('all-gather', range(16), GB)
    assert links == {'x+', 'x-', 'y+', 'y-'}
    assert taken == pytest.approx(GB * 15 / 16 / (2 * 4.5e10))


@pytest.mark.parametrize('n', [2, 3, 8])
def test_bytes_of_a_ring_are_those_that_a_simulated_ring_sends(n):
    """Each device sends to its neighbor the part that this one lacks, until nobody lacks any."""
    has, sent = np.eye(n, dtype=bool), 0
    part = 12 * 8
    while not has.all():
        newest = [(device - sent // part) % n for device in range(n)]
        for device in range(n):
            has[(device + 1) % n, newest[device]] = True
        sent += part
    assert wire_bytes('all-gather', part * n, n) == wire_bytes('reduce-scatter', part * n, n) == sent
    assert wire_bytes('all-reduce', part * n, n) == 2 * sent  # a scatter, then a gather


class TpuOfOneSlice:
    """What JAX 0.12 says of a TPU whose topology has one slice: the attribute does not exist."""

    platform, coords, id = 'tpu', [3, 1, 0], 7


def test_places_are_those_that_jax_describes():
    class OfSeveral(TpuOfOneSlice):
        slice_index = 2

    class Gpu:
        platform, process_index, id = 'gpu', 1, 9

    assert places_of([TpuOfOneSlice(), OfSeveral(), Gpu()]) == [(0, 3, 1, 0), (2, 3, 1, 0), (1, 9)]


@pytest.mark.parametrize(
    ('topology', 'mesh', 'rates'),
    [
        ('v5p:8x8x4', {'d': 256}, {'d': 6 * 90}),
        ('v5p:4x4x4', {'d': 16, 't': 4}, {'d': 4 * 90, 't': 2 * 90}),
        ('v5p:8x8x8', {'d': 64, 't': 8}, {'d': 4 * 90, 't': 2 * 90}),
        ('v5p:4x8x8', {'d': 32, 't': 8}, {'d': 4 * 90, 't': 2 * 90}),  # t gets the second dimension, not the last
        ('v5e:16x16', {'d': 16, 't': 16}, {'d': 2 * 45, 't': 2 * 45}),
        ('v6e:8x8', {'d': 16, 't': 4}, {'t': 90, 'd': 90 + 90 / 4}),  # half a row; d a column and every fourth of a row
        ('tpu7x:4x4x4', {'d': 128}, {'d': 6 * 45}),
        ('h100x8', {'d': 8}, {'d': 450}),
    ],
)
def test_an_axis_uses_the_dimensions_of_the_torus_that_multiply_to_its_size(topology, mesh, rates):
    network = MeshNetwork(reaching(topology, reach=Reach(1, 1, 1)), mesh)
    found = {axis: (n := mesh[axis]) and (n - 1) / n / network.seconds('all-gather', axis, 1) for axis in rates}
    assert found == pytest.approx({axis: GB * rate for axis, rate in rates.items()})


@pytest.mark.parametrize(
    ('topology', 'slices', 'mesh', 'kind', 'axis', 'seconds'),
    [
        ('v5p:4x4x4', 2, {'r': 2, 'd': 64}, 'all-reduce', 'r', 1 / 6.25),
        ('v5p:4x4x4', 1, {'r': 4, 'd': 16}, 'all-gather', 'r', 3 / 4 / 180),
        # d crosses the slices: every chip gets one part from its peer, and the others from its slice
        ('v5e:16x16', 2, {'d': 512}, 'all-gather', 'd', 1 / 512 / 3.125 + 255 / 256 / 180),
        # two members in each slice, half a side apart, and each exchanges its half with the other slice
        ('v5e:16x16', 2, {'r': 4, 'd': 128}, 'all-reduce', 'r', 2 * (1 / 2 / 2 / 3.125 + 1 / 2 / (2 * 45 / 8))),
        # a byte goes around a quarter of the ring
        ('v5e:16x16', 1, {'e': 16, 'd': 16}, 'all-to-all', 'e', 16 / 4 / 90),
        ('v5p:4x4x4', 1, {'p': 4, 'd': 16}, 'collective-permute', 'p', 1 / 90),  # one direction of a link
        ('tpu7x:4x4x4', 1, {'p': 4, 'd': 32}, 'collective-permute', 'p', 1 / 45),  # two devices share it
        ('h100x8', 2, {'p': 2, 'd': 8}, 'collective-permute', 'p', 1 / 50),  # p crosses the nodes
        ('h100x8', 2, {'d': 16}, 'all-gather', 'd', 15 / 16 / 400),  # the cards of all eight
        ('h100x8', 2, {'r': 16}, 'all-gather', 'r', 15 / 16 / 400),
        ('h100x8', 2, {'r': 2, 'd': 8}, 'all-gather', 'r', 1 / 2 / 50),
    ],
)
def test_an_axis_uses_the_links_that_it_crosses(topology, slices, mesh, kind, axis, seconds):
    """Seconds per GB."""
    network = MeshNetwork(reaching(topology, slices, Reach(1, 1, 1)), mesh)
    assert network.seconds(kind, axis, GB) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ('topology', 'slices', 'mesh', 'kind', 'axis', 'hops', 'far_hops'),
    [
        ('h100x8', 1, {'d': 8}, 'all-gather', 'd', 7, 0),
        ('a100x4', 64, {'d': 256}, 'all-gather', 'd', 256 - 64, 63),  # a ring through all GPUs
        ('a100x4', 64, {'r': 64, 'd': 4}, 'all-reduce', 'r', 0, 2 * 6),  # up and down a tree of 64 nodes
        ('v5e:16x16', 1, {'d': 256}, 'all-gather', 'd', 15 + 15, 0),  # a torus
        ('v5e:16x16', 4, {'r': 4, 'd': 256}, 'all-reduce', 'r', 0, 2 * 3),
        ('h100x8', 1, {'e': 8}, 'all-to-all', 'e', 1, 0),
        ('h100x8', 2, {'p': 2, 'd': 8}, 'collective-permute', 'p', 0, 1),
    ],
)
def test_every_device_that_data_passes_takes_time(topology, slices, mesh, kind, axis, hops, far_hops):
    reach = Reach(1, 1, 1, hop=1e-6, far_hop=1e-4)
    network = MeshNetwork(reaching(topology, slices, reach), mesh)
    assert network.seconds(kind, axis, 0, runs=3) == pytest.approx(3 * (hops * 1e-6 + far_hops * 1e-4))


def test_collectives_reach_a_share_of_the_bandwidth():
    network = MeshNetwork(reaching('h100x8', 2, Reach(1, 1, 1, links=0.8, network=0.5)), {'r': 2, 'd': 8})
    assert network.seconds('all-gather', 'd', GB) == pytest.approx(7 / 8 / (0.8 * 450))
    assert network.seconds('all-gather', 'r', GB) == pytest.approx(1 / 2 / (0.5 * 50))
