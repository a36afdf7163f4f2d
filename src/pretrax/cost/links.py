"""Links between devices: their bandwidth by hardware, and how long a collective needs on them.

TPUs: a slice is a torus of two or three dimensions with a link to each neighbor. A collective over one dimension uses
the links of that dimension, in both directions if the dimension is a closed ring. One over several dimensions uses as
many rings at once as XLA writes into the program; if it writes nothing, the links of all of them. A small slice is a
grid without closed rings. Slices are connected through their hosts.

GPUs: NVLink inside a node; between nodes the network cards of the group's members in one node, so a group that has all
GPUs of each node uses all cards.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pretrax.cost.devices import GIGA, Link, Reach, machines
from pretrax.cost.topology import Topology
from pretrax.model.axes import OUTSIDE_IN


def link_of(topology: Topology) -> Link:
    """The links of hardware, with the network cards of the machine if it was named."""
    link = topology.target.link
    if not topology.machine:
        return link
    gigabits = machines()[topology.machine]['gigabits']
    return dataclasses.replace(link, between=gigabits / 8 * GIGA / math.prod(topology.shape))


def closed_rings(topology: Topology) -> list[bool]:
    """Whether each dimension of a TPU slice is a closed ring. Sources: the link's, docs.cloud.google.com/tpu/docs."""
    sides, multiple = topology.shape, 16 if len(topology.shape) == 2 else 4
    return [side % multiple == 0 and (len(sides) == 2 or all(s % 4 == 0 for s in sides)) for side in sides]


def wire_bytes(kind: str, n_bytes: float, n: int) -> float:
    """Bytes that a device sends in a ring of n, of a collective whose whole array has `n_bytes`
    (`Collective.bytes`).
    """
    if kind == 'collective-permute':
        return n_bytes
    return n_bytes * (n - 1) / n * (2 if kind == 'all-reduce' else 1)


def places_of(devices: Iterable[Any]) -> list[tuple[int, ...]]:
    """The places of the devices of a mesh, as JAX describes them: see `Network`."""
    return [
        (getattr(device, 'slice_index', 0) or 0, *device.coords)
        if device.platform == 'tpu'
        else (device.process_index, device.id)
        for device in devices
    ]


class Network:
    """The devices of a mesh and the links between them.

    Args:
        topology: the hardware.
        places: of each device in the order of the mesh, its slice or node and its coordinates there; None: in the order
            of the mesh the devices fill the slices one after the other, each with the last dimension first.
        reach: what collectives reach; None: all of the bandwidth, without latency.
    """

    def __init__(
        self, topology: Topology, places: Sequence[Sequence[int]] | None = None, reach: Reach | None = None
    ) -> None:
        self.reach, link = reach or Reach(1.0, 1.0, 1.0), link_of(topology)
        self.link = Link(self.reach.links * link.inside, self.reach.network * link.between, link.source)
        self.is_tpu, self.shape = topology.platform == 'tpu', topology.shape
        sizes = (topology.slices, *topology.shape)
        self.per_chip = topology.n_devices // math.prod(sizes)  # 2 of tpu7x, at one place
        if places is None:
            places = np.stack(np.unravel_index(np.arange(topology.n_devices) // self.per_chip, sizes), axis=1).tolist()
        self.places = np.array(places)[:, : 1 + len(self.shape)]
        self.closed = closed_rings(topology)

    def transfer(
        self, kind: str, group: Sequence[int], n_bytes: float, rings: int | None = None, runs: float = 1
    ) -> tuple[float, frozenset[str]]:
        """Seconds of a collective, and the names of the links that it uses, such as 'x+' for one direction of a
        dimension.

        Args:
            kind: one of `hlo.KINDS`.
            group: the devices of one of its groups, by their place in the mesh; of a permute, sources and targets in
                turn.
            n_bytes: `Collective.bytes`.
            rings: that a TPU uses at once, each in one direction; None: as many as it can.
            runs: collectives that send these bytes together.
        """
        seconds, links = self._transfer(kind, group, n_bytes, rings)
        return seconds + runs * self._latency(kind, group), links

    def _latency(self, kind: str, group: Sequence[int]) -> float:
        """Seconds that a collective takes without bytes. In a ring, data passes all other devices; in a torus, those
        along each dimension. NCCL sums between nodes along a tree.
        """
        places = self.places[np.array(group) % len(self.places)]
        nodes = len(np.unique(places[:, 0]))
        far = math.ceil(math.log2(nodes)) if kind == 'all-reduce' and not self.is_tpu else nodes - 1
        if kind not in ('all-gather', 'reduce-scatter', 'all-reduce'):
            return self.reach.far_hop if far else self.reach.hop
        inside = places[places[:, 0] == places[0, 0], 1:]
        near = sum(len(np.unique(along)) - 1 for along in inside.T) if self.is_tpu else len(group) - nodes
        return (2 if kind == 'all-reduce' else 1) * (near * self.reach.hop + far * self.reach.far_hop)

    def _transfer(
        self, kind: str, group: Sequence[int], n_bytes: float, rings: int | None
    ) -> tuple[float, frozenset[str]]:
        """`transfer` without latency."""
        places = self.places[np.array(group) % len(self.places)]
        if kind == 'collective-permute':
            return self._permute(places.reshape(-1, 2, places.shape[1]), n_bytes)
        nodes = len(np.unique(places[:, 0]))
        exchange = kind in ('all-to-all', 'ragged-all-to-all')
        if nodes > 1 and exchange:
            return n_bytes * (nodes - 1) / nodes / self.link.between, frozenset({'network'})
        if nodes > 1 and self.is_tpu:
            return self._slice_exchange(kind, group, n_bytes, nodes)
        sent = wire_bytes(kind, n_bytes, len(group))
        if nodes > 1:
            cards = len(group) // nodes  # of the members in one node
            return sent / min(self.link.inside, cards * self.link.between), frozenset({'network', 'NVLink'})
        if not self.is_tpu:
            return sent / self.link.inside, frozenset({'NVLink'})
        one_way = self.link.inside / 2
        rates, counts = self._rates(places[:, 1:], one_way)
        if not rates:  # two devices of one chip
            return sent / self.link.inside, frozenset({'chip'})
        links = frozenset('xyz'[k] + sign for k in rates for sign in '+-')
        if exchange:  # a byte takes a quarter of the ring on average: as `Tpu.link`
            return max(n_bytes * counts[k] / 4 / rates[k] for k in rates), links
        rate = sum(rates.values()) if rings is None else min(rings * one_way, sum(rates.values()))
        return sent / rate, links

    def one_per_slice(self) -> tuple[int, ...]:
        """The first device of each slice or node."""
        return tuple(np.unique(self.places[:, 0], return_index=True)[1].tolist())

    def _slice_exchange(
        self, kind: str, group: Sequence[int], n_bytes: float, slices: int
    ) -> tuple[float, frozenset[str]]:
        """XLA sums or gathers inside each slice, and every member exchanges its part with its peers in other slices."""
        members = len(group) // slices
        seconds, links = wire_bytes(kind, n_bytes / members, slices) / self.link.between, frozenset({'network'})
        if members > 1:
            of = self.places[np.array(group) % len(self.places), 0]
            inside, more = self._transfer(kind, [group[int(k)] for k in np.flatnonzero(of == of[0])], n_bytes, None)
            seconds, links = seconds + inside, links | more
        return seconds, links

    def _permute(self, pairs: np.ndarray, n_bytes: float) -> tuple[float, frozenset[str]]:
        """Each source sends to its target on the shortest way; links carry what goes through them."""
        moved = pairs[:, 1] - pairs[:, 0]
        if np.any(moved[:, 0]):
            return n_bytes / self.link.between, frozenset({'network'})
        if not self.is_tpu:
            return n_bytes / self.link.inside, frozenset({'NVLink'})
        load = self._load(pairs[:, :, 1:])
        most = max(load.values())
        links = frozenset(link for link, n in load.items() if n and n >= most / 2) or frozenset({'chip'})
        return n_bytes * max(1, most) / self.per_chip / (self.link.inside / 2), links

    def _load(self, pairs: np.ndarray) -> dict[str, int]:
        """The load of the busiest link, per direction and dimension: the number of transfers through it.

        They go along the first dimension first, and the shorter way around a closed ring.
        """
        load = {}
        at = pairs[:, 0].copy()
        for k, size in enumerate(self.shape):
            steps = pairs[:, 1, k] - at[:, k]
            if self.closed[k]:
                steps = np.where(np.abs(steps) * 2 > size, steps - np.sign(steps) * size, steps)
            for sign, direction in (('+', 1), ('-', -1)):
                through = np.zeros(self.shape, int)
                for hop in range(int(np.max(direction * steps, initial=0))):
                    moving = at[direction * steps > hop].copy()
                    moving[:, k] = (moving[:, k] + direction * hop) % size
                    np.add.at(through, tuple(moving.T), 1)
                load['xyz'[k] + sign] = int(through.max())
            at[:, k] = pairs[:, 1, k]
        return load

    def _rates(self, places: np.ndarray, one_way: float) -> tuple[dict[int, float], dict[int, int]]:
        """For each dimension that a group spans: bytes/s into a member, and the number of members along it."""
        rates, counts = {}, {}
        for k in range(places.shape[1]):
            along = np.unique(places[:, k])
            if len(along) > 1:
                stride = int(np.min(np.diff(along)))  # other groups use the same links
                closed = self.closed[k] and len(along) * stride == self.shape[k]
                rates[k], counts[k] = one_way * (2 if closed else 1) / stride, len(along)
        return rates, counts


class MeshNetwork:
    """The links between the devices of a mesh, in the order in which `run/placement.py` places them.

    On TPUs the innermost axis gets the dimensions of the torus whose sizes multiply to its own, several if possible,
    then the next axis, as JAX does; axes that no dimensions fit share the others.

    Args:
        topology: the hardware, which the mesh fills.
        mesh: {axis: size}.
    """

    def __init__(self, topology: Topology, mesh: Mapping[str, int]) -> None:
        self.sizes = {axis: mesh.get(axis, 1) for axis in OUTSIDE_IN}
        self.network = _mesh_network(topology, tuple(self.sizes.values()))

    def seconds(
        self, kind: str, axes: Sequence[str], n_bytes: float, rings: int | None = None, runs: float = 1
    ) -> float:
        """Seconds of a collective over some axes.

        Args:
            kind: one of `hlo.KINDS`. A 'collective-permute' sends to the next device along the axes.
            axes: of the mesh, such as 'd' or 'dt'.
            n_bytes: as in `Network.transfer`.
            rings, runs: as in `Network.transfer`.
        """
        n = math.prod(self.sizes[axis] for axis in axes)
        if n == 1:
            return 0.0
        devices = np.arange(math.prod(self.sizes.values())).reshape(*self.sizes.values())
        places = [OUTSIDE_IN.index(axis) for axis in axes]
        lines = np.moveaxis(devices, places, range(-len(places), 0)).reshape(-1, n)
        if kind == 'collective-permute':
            group = np.stack([lines, np.roll(lines, -1, axis=1)], axis=-1).reshape(-1)
        else:
            group = lines[0]
        return self.network.transfer(kind, group.tolist(), n_bytes, rings, runs)[0]


@functools.lru_cache(maxsize=1024)
def _mesh_network(topology: Topology, sizes: tuple[int, ...]) -> Network:
    """The network with the devices in the order of a mesh whose axes have these sizes, the outermost first."""
    r, slices, reach = sizes[0], topology.slices, topology.device.reach
    if topology.platform != 'tpu' or r % slices:  # run/placement.py: then in the order of slices and hosts
        return Network(topology, reach=reach)
    per_chip = topology.n_devices // slices // math.prod(topology.shape)  # 2 of tpu7x
    order = _dimensions_inside_out(topology.shape, [*sizes[:0:-1], r // slices])[::-1]
    sides = [topology.shape[k] for k in order]
    at = np.stack(np.unravel_index(np.arange(math.prod(sides) * per_chip) // per_chip, sides), axis=1)
    inside = at[:, np.argsort(order)]
    places = np.concatenate([np.insert(inside, 0, k, axis=1) for k in range(slices)]).tolist()
    return Network(topology, places, reach)


def _dimensions_inside_out(shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The dimensions of a torus in the order in which axes of some sizes, the innermost first, fill them."""
    order: list[int] = []
    for size in sizes:
        left = [k for k in range(len(shape)) if k not in order]
        fits = (
            dimensions
            for n in range(len(left), 0, -1)
            for dimensions in itertools.combinations(left, n)
            if math.prod(shape[k] for k in dimensions) == size > 1
        )
        order += next(fits, ())
    return order + [k for k in reversed(range(len(shape))) if k not in order]


def rings_of(detail: str) -> int | None:
    """Rings in one direction that a TPU uses at once for a collective, from its instruction; None: not written."""
    if '"color_strategies"' in detail:  # SparseCore: each color is a path in one direction
        return detail.count('"phase_rings"')
    if found := re.search(r'(UniDirection)?\w*Strategy\w*\{colors:(\d+)', detail):  # others go both ways
        return int(found[2]) * (1 if found[1] else 2)
    if '"emitter":"1D' in detail or '"async_collective_fusion_config"' in detail:  # one ring through all devices
        return 2
    return None
