"""Bandwidth between devices: all-reduce over all of them, and between pairs of nodes.

Bus bandwidth is that of nccl-tests: bytes per device / seconds * 2 (n - 1) / n, which is the speed of the slowest link
whatever n is (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
"""

import statistics
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pretrax.amounts import size
from pretrax.cost.links import Network, places_of, wire_bytes
from pretrax.cost.topology import topology_of
from pretrax.doctor.barrier import wait_for_all
from pretrax.doctor.comparison import NETWORK_FIX, rounds, share_of
from pretrax.doctor.findings import Context, Finding, failure, warning

_SIZES = {'cpu': (100_000, 1_000_000, 10_000_000)}  # bytes per device
_LARGE_SIZES = (1_000_000, 16_000_000, 256_000_000)
_TIMES = 5
_LOW = 0.5  # of the table: NCCL and XLA reach 0.75 to 0.95 of it for large arrays
_FIX = {
    'gpu': 'NCCL_DEBUG=INFO: does it use NVLink (nvidia-smi topo -m) and the network cards (NCCL_IB_HCA, ibstat)?',
    'tpu': 'is the slice healthy (gcloud compute tpus tpu-vm describe)? else delete and create it',
}


def all_reduce(context: Context) -> Iterator[Finding]:
    """Sums arrays of a few sizes over all devices, and compares with the table of links."""
    devices = jax.devices()
    n, platform = len(devices), devices[0].platform
    if n == 1:
        return
    measured: dict[int, float] = {}
    for n_bytes in _SIZES.get(platform, _LARGE_SIZES):
        seconds, is_right = _reduce(devices, n_bytes)
        measured[n_bytes] = wire_bytes('all-reduce', n_bytes, n) / seconds
        if not is_right:
            yield failure(
                'all-reduce', f'wrong sums of {size(n_bytes)}', 'take out one node after the other to find it'
            )
            return
    if context.index:
        return
    text = ', '.join(f'{rate / 1e9:.3g} GB/s of {size(n_bytes)}' for n_bytes, rate in measured.items())
    largest = max(measured)
    expected = _expected(devices, largest)
    if expected is None:
        yield Finding('all-reduce', f'{text}; no figure for this hardware', amount=measured[largest])
        return
    result = f'{text}; {share_of(measured[largest], expected, f"{expected / 1e9:.3g} GB/s")}'
    if measured[largest] < _LOW * expected:
        yield warning('all-reduce', result, _FIX.get(platform, NETWORK_FIX))
    else:
        yield Finding('all-reduce', result, amount=measured[largest])


def pairs(context: Context) -> Iterator[Finding]:
    """All-reduce between pairs of nodes, several at a time: a pair that is far below the others has a slow link.

    Not on TPUs, whose links belong to the slice: there, the all-reduce over all devices shows a slow one.
    """
    devices = jax.devices()
    if context.processes < 3 or devices[0].platform == 'tpu':
        return
    first = {device.process_index: device for device in reversed(devices)}
    n_bytes = _SIZES.get(devices[0].platform, _LARGE_SIZES)[-1]
    for number, matches in enumerate(rounds(context.processes)):
        for pair in matches:
            if context.index in pair:
                seconds, _ = _reduce([first[i] for i in sorted(pair)], n_bytes)
                if context.index == min(pair):
                    rate = wire_bytes('all-reduce', n_bytes, 2) / seconds
                    yield Finding('pair', f'{min(pair)} {max(pair)}', amount=rate)
        wait_for_all(f'round {number}', context)


def _expected(devices: Sequence[jax.Device], n_bytes: int) -> float | None:
    """Bus bandwidth of all devices according to the table; None: it does not have this hardware."""
    topology = topology_of(devices)
    if topology is None:
        return None
    group = range(len(devices))
    seconds, _ = Network(topology, places_of(devices)).transfer('all-reduce', group, n_bytes)
    return wire_bytes('all-reduce', n_bytes, len(group)) / seconds


def _reduce(devices: Sequence[jax.Device], n_bytes: int) -> tuple[float, bool]:
    """Seconds of an all-reduce of an f32 array of that size on each device, and whether its sum is right."""
    n = len(devices)
    mesh = Mesh(np.array(devices), ('all',))
    sharding = NamedSharding(mesh, PartitionSpec('all'))
    mine = [device for device in devices if device.process_index == jax.process_index()]
    of = {device: place for place, device in enumerate(devices)}
    shards = [jax.device_put(np.full((1, n_bytes // 4), 1 + of[device], np.float32), device) for device in mine]
    x = jax.make_array_from_single_device_arrays((n, n_bytes // 4), sharding, shards)
    total = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, 'all'), mesh=mesh, in_specs=sharding.spec, out_specs=PartitionSpec())
    )
    result = total(x).block_until_ready()  # compiled, and connected
    times = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        result = total(x).block_until_ready()
        times.append(time.perf_counter() - began)
    is_right = bool(jnp.all(result.addressable_data(0) == n * (n + 1) / 2))
    return statistics.median(times), is_right
