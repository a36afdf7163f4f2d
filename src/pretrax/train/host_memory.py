"""What of a state lies in the host's memory between steps (`memory.offload`). A step fetches it and brings it back.

JAX has the memory space in an array's type, so what is computed with has only to be on the device: `on_device`.
"""

from collections.abc import Sequence
from typing import Any

import jax

from pretrax.errors import UserError

KIND = 'pinned_host'  # host memory that the device can read and write by itself


def on_device(tree: Any) -> Any:
    """The same arrays, those in host memory fetched. Under `jit`."""

    def fetch(x: Any) -> Any:
        in_host = jax.typeof(x).memory_space == jax.memory.Space.Host
        return jax.device_put(x, jax.memory.Space.Device) if in_host else x

    return jax.tree.map(fetch, tree)


def to_host(state: Any, parts: Sequence[str]) -> Any:
    """A state with the arrays of some parts ('optimizer', 'weights') brought to host memory; not its counts."""
    move = lambda x: jax.device_put(x, jax.memory.Space.Host) if x.ndim else x  # noqa: E731
    return state._replace(**{part: jax.tree.map(move, getattr(state, part)) for part in parts})


def in_host(shardings: Any, like: Any, parts: Sequence[str]) -> Any:
    """The shardings of a state such as `to_host` gives."""
    move = lambda sharding, x: sharding.with_memory_kind(KIND) if x.ndim else sharding  # noqa: E731
    return shardings._replace(
        **{part: jax.tree.map(move, getattr(shardings, part), getattr(like, part)) for part in parts}
    )


def has_host_memory(device: Any) -> bool:
    """Whether arrays can lie in host memory, for this device to fetch. None: one that is not here, taken to have it."""
    return device is None or KIND in {memory.kind for memory in device.addressable_memories()}


def check_host_memory(device: Any, parts: Sequence[str]) -> None:
    """Raises UserError if parts of the state are to lie in host memory that the device cannot reach."""
    if parts and not has_host_memory(device):
        kinds = ', '.join(memory.kind for memory in device.addressable_memories())
        raise UserError(
            f'memory.offload: {", ".join(parts)}: the {device.platform} backend knows no {KIND} memory (it has {kinds})\n'
            'leave it out'
        )
