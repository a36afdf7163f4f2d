"""One replica reads each array of a checkpoint, and its devices send it to those of the others.

If each of `r` replicas read the whole state, storage would serve `r` times its bytes and requests. Here the arrays are
divided among the replicas that are in different processes, by their sizes.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pretrax.checkpoint.chunks import Index, bounds


class Reader(NamedTuple):
    """The replica that reads an array, of those along mesh axes that connect processes. No axes: all replicas read."""

    like: Any  # shape, dtype and sharding of the array
    axes: tuple[str, ...]
    number: int

    def parts(self) -> set[Index]:
        """The parts of the array that this process reads."""
        parts = parts_of(self.like)
        if self.axes:
            numbers = _numbers(self.like.sharding.mesh, self.axes)
            parts = {device: part for device, part in parts.items() if numbers[device] == self.number}
        return set(parts.values())

    def send(self, array: jax.Array) -> jax.Array:
        """The array in all replicas, of which only the reader had its values. Bits are copied. `array` is deleted."""
        if not self.axes:
            return array
        sent = _sender(self.like.sharding, self.axes)(array, np.int32(self.number))
        return sent.block_until_ready()  # a device has at most one array twice


def parts_of(like: Any) -> dict[jax.Device, Index]:
    """The part of an array that each device of this process holds."""
    indices = like.sharding.addressable_devices_indices_map(like.shape)
    return {device: bounds(index, like.shape) for device, index in indices.items()}


def readers(leaves: Sequence[Any], are_shared: bool = True) -> list[Reader]:
    """Chooses who reads each array. The choice is the same in all processes.

    Args:
        leaves: arrays, or their shapes, dtypes and shardings.
        are_shared: whether one replica reads for the others.
    """
    chosen, loads = [], dict[tuple[str, ...], np.ndarray]()
    for leaf in leaves:
        axes = _replicated(leaf.sharding) if are_shared else ()
        if axes not in loads:
            loads[axes] = np.zeros([leaf.sharding.mesh.shape[axis] for axis in axes], int).reshape(-1)
        number = int(loads[axes].argmin())
        loads[axes][number] += math.prod(leaf.shape) * leaf.dtype.itemsize
        chosen.append(Reader(leaf, axes, number))
    return chosen


def _replicated(sharding: Any) -> tuple[str, ...]:
    """The mesh axes that connect processes, and along which all devices have the same part of an array."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return ()
    if sharding.memory_kind not in (None, jax.local_devices()[0].default_memory().kind):
        return ()  # programs run on arrays in the memory of the devices
    used = {axis for entry in sharding.spec for axis in (entry if isinstance(entry, tuple) else (entry,))}
    return tuple(axis for axis in _between_processes(sharding.mesh) if axis not in used)


@functools.cache
def _between_processes(mesh: Mesh) -> tuple[str, ...]:
    if jax.process_count() == 1:
        return ()
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    crossed = [(processes != processes.take([0], i)).any() for i in range(processes.ndim)]
    return tuple(axis for axis, is_crossed in zip(mesh.axis_names, crossed, strict=True) if is_crossed)


@functools.cache
def _numbers(mesh: Mesh, axes: tuple[str, ...]) -> dict[Any, int]:
    """The number of the replica that each device of this process belongs to, as `jax.lax.axis_index` counts them."""
    dims = [mesh.axis_names.index(axis) for axis in axes]
    sizes = [mesh.devices.shape[dim] for dim in dims]
    return {
        device: int(np.ravel_multi_index([at[dim] for dim in dims], sizes))
        for at, device in np.ndenumerate(mesh.devices)
        if device.process_index == jax.process_index()
    }


@functools.cache
def _sender(sharding: NamedSharding, axes: tuple[str, ...]) -> Any:
    """Sums what the replicas have, as integers, of which all but the reader's are 0."""

    def send(x: jax.Array, number: jax.Array) -> jax.Array:
        bits = x.view(f'uint{8 * x.dtype.itemsize}')
        bits = jax.lax.psum(jnp.where(jax.lax.axis_index(axes) == number, bits, 0), axes)
        return bits.view(x.dtype)

    one = jax.sharding.PartitionSpec()
    spec = sharding.spec
    send = jax.shard_map(send, mesh=sharding.mesh, in_specs=(spec, one), out_specs=spec, check_vma=False)
    return jax.jit(send, donate_argnums=0)
