"""The layouts that a plan tries: sizes of the mesh axes that the devices, the batch and the model may allow."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from pretrax.cost.topology import Topology
from pretrax.model.architecture import Architecture
from pretrax.model.axes import AXES

COLUMNS = 4096  # tokens of a sequence that each device along c has at least
MOST_STAGES = 16


def layouts(
    hardware: Topology, arch: Architecture, sequence_length: int, rows: int, only: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """Meshes of all devices. `d` takes those that the other axes leave.

    `t` stays inside a node, or along one side of a slice. `r` is a multiple of the number of slices, so that `d` stays
    inside a slice, or a divisor of it, so that `d` spans whole slices.

    Args:
        arch: the decoder. Not every mesh is possible for it.
        sequence_length: tokens of a sequence.
        rows: sequences that every mesh can shard over r, d and e.
        only: sizes that some axes have instead.
    """
    n = hardware.n_devices
    divisors = [i for i in range(1, n + 1) if n % i == 0]
    widest = min(n // hardware.slices, 8 if hardware.platform == 'cuda' else 16)
    sizes = {
        'r': [r for r in divisors if r % hardware.slices == 0 or hardware.slices % r == 0],
        'e': [e for e in divisors if e == 1 or (arch.experts.n_experts and arch.experts.n_experts % e == 0)],
        'c': [c for c in divisors if c == 1 or (sequence_length % c == 0 and sequence_length // c >= COLUMNS)],
        't': [t for t in divisors if t <= widest],
        'p': [p for p in divisors if p <= MOST_STAGES and arch.n_layers % p == 0],
    } | {axis: [size] for axis, size in only.items() if axis != 'd'}
    for chosen in itertools.product(*sizes.values()):
        d, rest = divmod(n, math.prod(chosen))
        mesh = dict(zip(sizes, chosen, strict=True)) | {'d': d}
        if not rest and d == only.get('d', d) and rows % (mesh['r'] * d * mesh['e']) == 0:
            yield {axis: mesh[axis] for axis in AXES}


def sizes_of(meshes: Sequence[Mapping[str, int]]) -> str:
    """The sizes of the axes of some meshes: 'r=1,2 d=64,128 t=1,2'."""
    sizes = {axis: sorted({mesh[axis] for mesh in meshes}) for axis in AXES}
    return ' '.join(f'{axis}={",".join(map(str, found))}' for axis, found in sizes.items() if found not in ([], [1]))
