"""Parts of the state in host memory between steps (`memory.offload`). A step copies them to the device and back.

In JAX the memory space is part of an array's type. Arrays must be on the device to be computed with: `on_device`.
"""

from collections.abc import Sequence
from typing import Any

import jax

from pretrax.errors import UserError

KIND = 'pinned_host'  # host memory that the device reads and writes directly


def on_device(tree: Any) -> Any:
    """Copies arrays in host memory to the device. Runs under `jit`."""

    def fetch(x: Any) -> Any:
        in_host = jax.typeof(x).memory_space == jax.memory.Space.Host
        return jax.device_put(x, jax.memory.Space.Device) if in_host else x

    return jax.tree.map(fetch, tree)


def to_host(state: Any, parts: Sequence[str]) -> Any:
    """A state with the arrays of some parts ('optimizer', 'weights') in host memory. Scalars stay on the device."""

    def move(x: jax.Array) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Host) if x.ndim else x

    return state._replace(**{part: jax.tree.map(move, getattr(state, part)) for part in parts})


def in_host(shardings: Any, like: Any, parts: Sequence[str]) -> Any:
    """The shardings of a state that `to_host` returns."""

    def move(sharding: jax.sharding.Sharding, x: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
        return sharding.with_memory_kind(KIND) if x.ndim else sharding

    return shardings._replace(
        **{part: jax.tree.map(move, getattr(shardings, part), getattr(like, part)) for part in parts}
    )


def has_host_memory(device: Any) -> bool:
    """Whether this device can fetch arrays from host memory; assumed for None, a device that is not in this machine."""
    return device is None or KIND in {memory.kind for memory in device.addressable_memories()}


def check_host_memory(device: Any, parts: Sequence[str]) -> None:
    """Raises UserError if parts of the state are offloaded to host memory that the device cannot reach."""
    if parts and not has_host_memory(device):
        kinds = ', '.join(memory.kind for memory in device.addressable_memories())
        raise UserError(
            f'memory.offload: {", ".join(parts)}: the {device.platform} backend has no {KIND} memory, only {kinds}\n'
            'leave out memory.offload'
        )
