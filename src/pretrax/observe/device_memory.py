"""Memory of the devices of this process: in use, at most so far, and by owner."""

import math
from typing import Any

import jax


def bytes_per_device(array: Any) -> int:
    """Bytes of an array, or of its shape, on each device that has a part of it."""
    shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize


def memory_in_use() -> dict[str, int]:
    """`memory_bytes` and `memory_peak_bytes` of the fullest device here, as the runtime counts them; {} on CPUs."""
    stats = [one for device in jax.local_devices() if (one := device.memory_stats())]
    in_use = [one['bytes_in_use'] for one in stats if 'bytes_in_use' in one]
    peaks = [one['peak_bytes_in_use'] for one in stats if 'peak_bytes_in_use' in one]
    found = {'memory_bytes': max(in_use, default=0), 'memory_peak_bytes': max(peaks, default=0)}
    return {key: n for key, n in found.items() if n}


def memory_by_owner(state: Any) -> dict[str, int]:
    """Bytes on one device of each field of a state, largest first; arrays in host memory do not count.

    Args:
        state: a tuple or dataclass of arrays, or of their shapes and shardings, such as a `TrainState`.
    """
    owners: dict[str, int] = {}
    kinds = (None, 'device', jax.local_devices()[0].default_memory().kind)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        sharding = getattr(leaf, 'sharding', None)
        if path and sharding is not None and sharding.memory_kind in kinds:
            owner = str(getattr(path[0], 'name', path[0]))
            owners[owner] = owners.get(owner, 0) + bytes_per_device(leaf)
    return dict(sorted(owners.items(), key=lambda item: -item[1]))
