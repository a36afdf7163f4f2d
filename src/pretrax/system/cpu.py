"""Measures the peak of this machine's CPU, which its vendor does not publish, and caches it.

The peak is the speed of the fastest matrix product, in f32 and in bf16. Measuring takes about a second. The result is
kept in `~/.cache/pretrax/cpu.json` (or below `XDG_CACHE_HOME`), with one entry per CPU, number of cores and JAX
version. A peak that was measured while other programs ran is measured again when they do not, and the larger value is
kept.
"""

import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from pretrax.cost.devices import Device
from pretrax.system.cache import cache_directory, read_entries, write_entries
from pretrax.system.cores import cpu_name, total_memory, usable_cores

SIZES = (512, 1024, 2048)  # square products; the largest are skipped if they would take too long
SECONDS = 0.2  # per dtype, without compilation
_DTYPES = ('bf16', 'f32')


def measured_cpu(devices: Sequence[Any], cache_dir: pathlib.Path | None = None) -> Device:
    """Peak per CPU device while all of them work; measured, or from the cache.

    Args:
        devices: the JAX CPU devices of this process. Simulated devices share the cores and the peak.
        cache_dir: directory of `cpu.json`; None: the user's cache directory.
    """
    path, key = _place(cache_dir), _key()
    entries = {key: entry for key, entry in read_entries(path).items() if _sound(entry)}
    entry, load = entries.get(key), _load()
    source = f'measured earlier, kept in {path}'
    if entry is None or (entry['load'] > _BUSY >= load):
        best = entry or dict.fromkeys(_DTYPES, 0.0)
        entry = {dtype: max(best[dtype], measure(devices[0], dtype)) for dtype in _DTYPES} | {'load': load}
        source = f'measured now, {write_entries(path, entries | {key: entry})}'
    if entry['load'] > _BUSY:
        source = f'{source}, while the machine was busy: it may be too low'
    each = {dtype: entry[dtype] / len(devices) for dtype in _DTYPES}
    memory = total_memory() // len(devices)
    return Device(f'{cpu_name()}, {usable_cores()} cores', each['bf16'], each['f32'], memory, None, None, source)


def forget_peak(cache_dir: pathlib.Path | None = None) -> None:
    """Removes the peak of this machine from the cache, so that it is measured again."""
    path = _place(cache_dir)
    write_entries(path, {key: entry for key, entry in read_entries(path).items() if key != _key()})


def _place(cache_dir: pathlib.Path | None) -> pathlib.Path:
    return (cache_dir or cache_directory()) / 'cpu.json'


def _key() -> str:
    import jax

    return f'{cpu_name()} | {usable_cores()} cores | jax {jax.__version__}'


_BUSY = 0.5  # processes that run or wait, per core of the machine


def _load() -> float:
    """Processes that ran or waited for a core in the last minute, per core; 0 if the system does not say."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 0.0


def measure(device: Any, dtype: str) -> float:
    """FLOP/s of square matrix products on all cores, which each device uses: the best of several sizes and tries."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    # f32 accumulation, as in the model
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    best, spent = 0.0, 0.0
    for size, budget in zip(SIZES, np.linspace(0, SECONDS, len(SIZES) + 1)[1:], strict=True):
        values = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
        x = jax.device_put(jnp.asarray(values, {'bf16': jnp.bfloat16, 'f32': jnp.float32}[dtype]), device)
        product(x).block_until_ready()
        seconds = 0.0
        for _ in range(10):
            start = time.perf_counter()
            product(x).block_until_ready()
            seconds = time.perf_counter() - start
            best = max(best, 2 * size**3 / seconds)
            spent += seconds
            if spent > budget:
                break
        if spent + 16 * seconds > SECONDS:  # the next size takes eight times as long and runs at least twice
            break
    return best


def _sound(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(name), float) and 0 <= entry[name] < float('inf') for name in (*_DTYPES, 'load'))
        and all(entry[dtype] > 0 for dtype in _DTYPES)
    )
