"""Measures the peak of this machine's CPU, which its vendor does not publish, and caches it.

The peak is the speed of the fastest matrix product on all given devices at the same time, in f32 and in bf16. Measuring takes
about a second. The result is kept in `~/.cache/pretrax/cpu.json` (or below `XDG_CACHE_HOME`), with one entry per CPU, number
of cores, number of simulated devices and JAX version. Delete the file to measure again, for instance if the machine was
busy.
"""

import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from pretrax.machine.cache import cache_directory, read_entries, write_entries
from pretrax.machine.cores import cpu_name, total_memory, usable_cores
from pretrax.scale.devices import Device

SIZES = (512, 1024, 2048)  # square products; the largest are skipped if they would take too long
SECONDS = 0.2  # per dtype, without compilation


def measured_cpu(devices: Sequence[Any], cache_dir: pathlib.Path | None = None) -> Device:
    """Peak per CPU device while all of them work; measured, or from the cache.

    Args:
        devices: the JAX CPU devices of this process. Simulated devices share the cores and the peak.
        cache_dir: directory of `cpu.json`; None: the user's cache directory.
    """
    import jax

    name, cores = cpu_name(), usable_cores()
    path = (cache_dir or cache_directory()) / 'cpu.json'
    key = f'{name} | {cores} cores | {len(devices)} devices | jax {jax.__version__}'
    entries = {key: peaks for key, peaks in read_entries(path).items() if _sound(peaks)}
    peaks = entries.get(key)
    if peaks is not None:
        source = f'measured earlier, kept in {path}'
    else:
        peaks = {dtype: measure(devices, dtype) / len(devices) for dtype in ('bf16', 'f32')}
        source = f'measured now, {write_entries(path, entries | {key: peaks})}'
    memory = total_memory() // len(devices)
    return Device(f'{name}, {cores} cores', peaks['bf16'], peaks['f32'], memory, None, source)


def measure(devices: Sequence[Any], dtype: str) -> float:
    """FLOP/s of all devices together, each with its own square matrices: the best of several sizes and tries."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    mesh = jax.sharding.Mesh(np.array(devices), ('device',))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('device'))
    best, spent = 0.0, 0.0
    for size, budget in zip(SIZES, np.linspace(0, SECONDS, len(SIZES) + 1)[1:], strict=True):
        values = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
        stacked = np.broadcast_to(values, (len(devices), size, size))
        x = jax.device_put(jnp.asarray(stacked, {'bf16': jnp.bfloat16, 'f32': jnp.float32}[dtype]), sharding)
        # f32 accumulation, as in the model. The batch is sharded, so nothing is communicated.
        product: Callable[[Any], Any] = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
        product(x).block_until_ready()
        seconds = 0.0
        for _ in range(10):
            start = time.perf_counter()
            product(x).block_until_ready()
            seconds = time.perf_counter() - start
            best = max(best, 2 * size**3 * len(devices) / seconds)
            spent += seconds
            if spent > budget:
                break
        if spent + 16 * seconds > SECONDS:  # the next size takes eight times as long and runs at least twice
            break
    return best


def _sound(peaks: Any) -> bool:
    return isinstance(peaks, dict) and all(
        isinstance(peaks.get(dtype), float) and 0 < peaks[dtype] < float('inf') for dtype in ('bf16', 'f32')
    )
