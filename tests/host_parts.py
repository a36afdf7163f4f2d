"""Weights of every rank on meshes of eight devices, held by one process or by several simulated ones."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pretrax.checkpoint.chunks import within
from pretrax.federation.host_weights import to_host

SHAPES = {
    'embed': (16, 8),
    'layers.experts': (6, 4, 8, 12),
    'layers.norm': (6, 8),
    'norm': (8,),
    'scale': (),
    'none': (0, 8),
}
LAYERS = {'layers.experts': range(6), 'layers.norm': range(6)}
SPECS = {
    'embed': PartitionSpec('t', 'd'),
    'layers.experts': PartitionSpec('p', 'e', 'd', 't'),
    'layers.norm': PartitionSpec('p'),
}
MESHES = ({'d': 8}, {'p': 2, 't': 4}, {'e': 4, 'p': 2}, {'r': 2, 'd': 2, 'e': 2}, {'r': 8})


def random_weights(seed):
    random = np.random.default_rng(seed)
    return {name: random.normal(0, 1e-2, shape).astype(np.float32) for name, shape in SHAPES.items()}


def on_mesh(weights, sizes):
    """The weights as arrays on eight devices, under nested names as a model has them."""
    axes = ('r', 'p', 'd', 'e', 't')
    mesh = Mesh(np.array(jax.devices()).reshape([sizes.get(axis, 1) for axis in axes]), axes)
    specs = {name: NamedSharding(mesh, SPECS.get(name, PartitionSpec())) for name in weights}
    return {name: jax.device_put(values, specs[name]) for name, values in weights.items()}


def held(weights, sizes, processes=1):
    """What each of some processes would hold of the weights, in the order of the devices that they have."""
    whole = to_host(on_mesh(weights, sizes))

    def share(array, process):
        keys = sorted(array.parts)
        mine = {key for i, key in enumerate(keys) if len(keys) < processes or i * processes // len(keys) == process}
        own = {key for i, key in enumerate(keys) if i * processes // len(keys) == process}
        parts = {key: array.parts[key] for key in mine}
        return dataclasses.replace(array, parts=parts, own=frozenset(own & array.own))

    return [{name: share(array, process) for name, array in whole.items()} for process in range(processes)]


def joined(parts, shapes):
    """The whole arrays, from what all processes hold; NaN where nobody holds anything."""
    arrays = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    for one in parts:
        for name, array in one.items():
            for index, values in array.parts.items():
                arrays[name][within(index, tuple((0, n) for n in shapes[name]))] = values
    return arrays


def numbers_in(fragment, shapes):
    """How many numbers a fragment has."""
    whole = {name: np.zeros(shape, bool) for name, shape in shapes.items()}
    parts = (whole[name][start:stop] for name, runs in fragment.items() for start, stop in runs or ())
    return sum(part.size for part in parts) + sum(whole[name].size for name, runs in fragment.items() if runs is None)
