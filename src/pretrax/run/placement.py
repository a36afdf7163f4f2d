"""The order of the devices in the mesh: the axes that communicate most connect neighbors.

From the outermost axis to the innermost: `r` (gradients, once per step), `p` (one activation per micro-batch), `d`
(every weight, once or twice per pass), `e` and `c` (activations in every layer), `t` (activations, several times in
every layer). The network between TPU slices and between hosts is the slowest, so `r` crosses them. Inside a slice,
JAX's `mesh_utils` knows the torus.
"""

import logging
from typing import Any

import numpy as np

from pretrax.jax_compat import MESH_LOGGER
from pretrax.model.axes import AXES, OUTSIDE_IN


def n_slices(devices: list[Any]) -> int:
    """The number of TPU slices that contain these devices; 1 for other devices."""
    return len({getattr(device, 'slice_index', 0) for device in devices})


def place(devices: list[Any], sizes: dict[str, int]) -> tuple[np.ndarray, str]:
    """The devices as an array with one dimension per mesh axis, in the order of AXES, and a description."""
    shape = [sizes[axis] for axis in OUTSIDE_IN]
    slices = n_slices(devices)
    if devices[0].platform == 'tpu' and sizes['r'] % slices == 0:
        outside_in = _on_torus(devices, shape, slices)
    else:
        near = sorted(devices, key=lambda d: (getattr(d, 'slice_index', 0), d.process_index, d.id))
        outside_in = np.array(near, dtype=object).reshape(shape)
    placed = outside_in.transpose([OUTSIDE_IN.index(axis) for axis in AXES])
    return placed, describe(placed)


def _on_torus(devices: list[Any], shape: list[int], slices: int) -> np.ndarray:
    from jax.experimental import mesh_utils

    inside = [shape[0] // slices, *shape[1:]]
    logging.getLogger(MESH_LOGGER).setLevel(logging.ERROR)  # it warns about tori that it has no rule for
    try:
        if slices == 1:
            return mesh_utils.create_device_mesh(inside, devices, allow_split_physical_axes=True)
        across = [slices] + [1] * (len(shape) - 1)
        return mesh_utils.create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)
    except NotImplementedError:  # the axes of the torus do not make up this shape: devices in the order of their ids
        near = sorted(devices, key=lambda d: (getattr(d, 'slice_index', 0), d.id))
        return np.array(near, dtype=object).reshape(shape)


def describe(placed: np.ndarray) -> str:
    """The axes that cross slices, cross hosts, and the rest: 'r across 2 slices; d across hosts; t inside a host'."""
    by_reach: dict[str, list[str]] = {}
    for dimension, axis in enumerate(AXES):
        if placed.shape[dimension] > 1:
            lines = np.moveaxis(placed, dimension, -1).reshape(-1, placed.shape[dimension])
            by_reach.setdefault(_reach(lines, placed), []).append(axis)
    parts = [f'{" ".join(axes)} {reach}' for reach, axes in by_reach.items()]
    slow = [axis for reach, axes in by_reach.items() if 'slices' in reach for axis in axes if axis not in 'rp']
    if slow:
        count = n_slices(list(placed.flat))
        parts.append(f'SLOW: {" ".join(slow)} across slices; make mesh.r a multiple of {count}')
    return '; '.join(parts) or 'one device'


def _reach(lines: np.ndarray, placed: np.ndarray) -> str:
    def most(key: Any) -> int:
        return max(len({key(device) for device in line}) for line in lines)

    slices, hosts = most(lambda d: getattr(d, 'slice_index', 0)), most(lambda d: d.process_index)
    if slices > 1:
        return f'across {slices} slices'
    if hosts > 1:
        return f'across {hosts} hosts'
    return 'inside a host' if len({d.process_index for d in placed.flat}) > 1 else 'on one host'
