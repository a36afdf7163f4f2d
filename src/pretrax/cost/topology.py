"""Hardware to compile for that is not in this machine: its names, and its devices in JAX.

v5e-256, v6e-64        TPU slices by chips; v4-64, v5p-128, tpu7x-64 by cores, two per chip
v5e:16x16, v5p:4x4x4   TPU slices by shape
h200, a100, h100x8     one NVIDIA GPU; a node of eight; `slices` is the number of nodes
a3-high, 'dgx-h100 x4' a machine of eight GPUs by its name; four of them
"""

import dataclasses
import difflib
import itertools
import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from pretrax.cost.devices import Device, lookup
from pretrax.errors import UserError

# libtpu's name of a TPU -> `device_kind`, cores per chip in names, dimensions of a slice, chips of the largest slice.
# Source: docs.cloud.google.com/tpu/docs, the page of each version.
_TPUS = {
    'v4': ('TPU v4', 2, 3, 4096),
    'v5e': ('TPU v5 lite', 1, 2, 256),
    'v5p': ('TPU v5', 2, 3, 8960),
    'v6e': ('TPU v6 lite', 1, 2, 256),
    'tpu7x': ('TPU7x', 2, 3, 9216),
}
# Slices of up to 256 chips in two dimensions, and of fewer than 64 chips in three.
_SMALL: dict[int, list[tuple[int, ...]]] = {
    2: [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)],
    3: [(1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)],
}
_ALSO = {'v5litepod': 'v5e', 'v5lite': 'v5e', 'v7x': 'tpu7x'}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Facts that XLA needs to compile for a GPU without one. Sources: NVIDIA's data sheets, and the tuning guide of
    each architecture, docs.nvidia.com/cuda.
    """

    kind: str  # `device_kind`
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    memory: int  # bytes that the driver reports
    l2: int  # bytes
    clock: float  # GHz
    shared: int  # bytes of shared memory per block


_MIB = 2**20
_GPUS = {
    'a100': Gpu('NVIDIA A100-SXM4-80GB', (8, 0), 108, 81_920 * _MIB, 40 * _MIB, 1.41, 163 * 1024),
    'h100': Gpu('NVIDIA H100 80GB HBM3', (9, 0), 132, 81_559 * _MIB, 50 * _MIB, 1.98, 227 * 1024),
    'h200': Gpu('NVIDIA H200', (9, 0), 132, 143_771 * _MIB, 60 * _MIB, 1.98, 227 * 1024),
    'b200': Gpu('NVIDIA B200', (10, 0), 148, 183_359 * _MIB, 126 * _MIB, 1.965, 227 * 1024),
}


# A machine of eight GPUs -> its GPU, and Gb/s in one direction of the network cards that are for its GPUs. Sources:
# Google, docs.cloud.google.com/compute/docs/gpus/gpu-network-bandwidth (a3-high: four cards of 200 Gb/s; the fifth is
# the host's); Amazon, aws.amazon.com/ec2/instance-types, the page of each; Microsoft,
# learn.microsoft.com/azure/virtual-machines/sizes; NVIDIA, the datasheet of each DGX.
MACHINES = {
    'a2-ultra': ('a100', 100),
    'a3-high': ('h100', 800),
    'a3-mega': ('h100', 1600),
    'a3-ultra': ('h200', 3200),
    'a4': ('b200', 3200),
    'p4de': ('a100', 400),
    'p5': ('h100', 3200),
    'p5en': ('h200', 3200),
    'p6-b200': ('b200', 3200),
    'nd-h100-v5': ('h100', 3200),
    'nd-h200-v5': ('h200', 3200),
    'dgx-a100': ('a100', 1600),
    'dgx-h100': ('h100', 3200),
    'dgx-h200': ('h200', 3200),
    'dgx-b200': ('b200', 3200),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Hardware to compile for.

    Attributes:
        name: as given.
        version: version of the TPU or GPU, such as 'v5e'.
        shape: shape of a slice; of a node for GPUs, such as (8,).
        slices: number of slices or nodes, which a slow network connects.
        machine: one of `MACHINES`; '' if it was not named.
    """

    name: str
    version: str
    shape: tuple[int, ...]
    slices: int
    machine: str = ''

    @property
    def platform(self) -> str:
        return 'tpu' if self.version in _TPUS else 'cuda'

    @property
    def kind(self) -> str:
        """`device_kind` of its devices."""
        return _TPUS[self.version][0] if self.platform == 'tpu' else _GPUS[self.version].kind

    @property
    def device(self) -> Device:
        """Its row in the device table."""
        found = lookup(self.kind)
        assert found is not None, self.kind
        return found

    @property
    def topology(self) -> 'Topology':
        """Itself: see `plan.plan.Hardware`."""
        return self

    @property
    def gpu(self) -> Gpu | None:
        """Facts for XLA; None for a TPU."""
        return _GPUS.get(self.version)

    @property
    def memory(self) -> int:
        """Bytes per device that a program may use, as the driver reports them."""
        return _GPUS[self.version].memory if self.platform == 'cuda' else self.device.memory

    @property
    def chips(self) -> int:
        """Chips of one slice or node."""
        return math.prod(self.shape)

    @property
    def chips_per_host(self) -> int:
        """Chips of one machine: up to 8 for v5e and v6e if the slice is a single machine, else 4."""
        if self.platform != 'tpu':
            return self.chips
        most = 8 if _TPUS[self.version][2] == 2 else 4
        return self.chips if self.chips <= most else 4

    @property
    def hosts(self) -> int:
        """Machines of one slice, each with one process."""
        return self.chips // self.chips_per_host

    @property
    def n_devices(self) -> int:
        # A chip of tpu7x is two devices.
        return math.prod(self.shape) * self.slices * (2 if self.version == 'tpu7x' else 1)

    def __str__(self) -> str:
        shape = 'x'.join(map(str, self.shape))
        one = (
            f'{self.version}:{shape}'
            if self.platform == 'tpu'
            else self.machine or self.version + (f' x{shape}' if shape != '1' else '')
        )
        return f'{self.slices} x {one}' if self.slices > 1 else one


def parse_topology(name: str, slices: int = 1) -> Topology:
    """Parses the name of hardware.

    Args:
        name: name of a TPU slice, of one or more GPUs, or of a machine, with `xN` for N machines.
        slices: number of slices or nodes. The N of `xN` machines says the same.

    Raises:
        UserError: the name or the size does not exist, and the message has the nearest ones; `xN` and `slices` differ.
    """
    if slices < 1:
        raise UserError(f'--slices {slices}: expected 1 or more')
    plain = name.strip().lower()
    version, separator, size = re.fullmatch(r'(.*?)(?:([-:])(.*))?', plain).groups('')  # type: ignore[union-attr]
    version = _ALSO.get(version, version)
    if gpu := re.fullmatch(rf'({"|".join(_GPUS)})(?:x(\d+))?', plain):
        here = int(gpu[2] or 1)
        if here not in (1, 2, 4, 8):
            raise UserError(
                f'--topology {name}: a node has 1, 2, 4 or 8 GPUs\nfor more, give --slices, the number of nodes'
            )
        return Topology(plain, gpu[1], (here,), slices)
    if machine := re.fullmatch(rf'({"|".join(MACHINES)})(?: ?x ?(\d+))?', plain):
        number = int(machine[2] or slices)
        if number < 1:
            raise UserError(f'--topology {name}: x{number}: expected 1 machine or more')
        if slices not in (1, number):
            raise UserError(
                f'--topology {name} with --slices {slices}: x{number} is the number of machines; leave one out'
            )
        return Topology(plain, MACHINES[machine[1]][0], (8,), number, machine[1])
    if version in _TPUS and separator == '-' and size.isdigit():
        return Topology(plain, version, _shape(name, version, int(size)), slices)
    if version in _TPUS and separator == ':' and re.fullmatch(r'\d+(x\d+)+', size):
        shape = tuple(map(int, size.split('x')))
        dimensions = _TPUS[version][2]
        if len(shape) != dimensions or math.prod(shape) > _TPUS[version][3] or 0 in shape:
            raise UserError(
                f'--topology {name}: a {version} slice has {dimensions} dimensions and at most {_TPUS[version][3]} '
                'chips'
            )
        return Topology(plain, version, shape, slices)
    examples = [
        *(f'{tpu}-{chips * cores}' for tpu, (_, cores, _, _) in _TPUS.items() for chips in (16, 64, 256)),
        *_GPUS,
        *(f'{gpu}x8' for gpu in _GPUS),
        *MACHINES,
    ]
    family = [one for one in MACHINES if one.startswith(f'{version}-')]
    near = difflib.get_close_matches(plain, family or examples, 1, 0.5) or family
    raise UserError(
        f'--topology {name}: no such hardware'
        + (f'; did you mean {near[0]}?' if near else '')
        + f'\n    TPU: {", ".join(_TPUS)} with -SIZE or :SHAPE, such as v5e-256, v5p-128 or v5p:4x4x4'
        + f'\n    GPU: {", ".join(_GPUS)}, with x8 for a node of eight'
        + '\n    machines of eight GPUs, with x4 for four of them:\n'
        + textwrap.indent(textwrap.fill(', '.join(MACHINES), 92, break_on_hyphens=False), ' ' * 8)
    )


def check_rentable(topology: Topology) -> None:
    """Raises UserError if Google Cloud has no TPU slice of this shape; a compiler takes others too."""
    shape = topology.shape
    if topology.platform != 'tpu':
        raise UserError(
            f'{topology.name} is not a TPU\nexpected one of: {", ".join(_TPUS)}, such as v5p-128 or v5p:4x4x4'
        )
    if shape in _SMALL[len(shape)] or (len(shape) == 3 and all(side % 4 == 0 for side in shape)):
        return
    offered = [('x'.join(map(str, small)), math.prod(small)) for small in _SMALL[len(shape)]]
    if len(shape) == 3:
        up = [-(-side // 4) * 4 for side in shape]
        offered.append(('x'.join(map(str, up)), math.prod(up)))
    near = sorted(offered, key=lambda one: abs(one[1] - topology.chips))[:3]
    raise UserError(
        f'{topology.name}: there is no such TPU slice'
        + ('; from 64 chips on, each side is a multiple of 4' if len(shape) == 3 else '')
        + f'\nnear: {", ".join(f"{topology.version}:{name}" for name, _ in near)}'
    )


def topology_of(devices: Sequence[Any]) -> Topology | None:
    """The hardware of JAX devices; None: its kind has no shape here,
    or the devices do not fill their slices or nodes.
    """
    kind, slices = devices[0].device_kind, len({getattr(device, 'slice_index', 0) for device in devices})
    names = {row[0]: version for version, row in _TPUS.items()} | {gpu.kind: version for version, gpu in _GPUS.items()}
    version = next((names[name] for name in names if lookup(name) == lookup(kind)), None)
    if version is None:
        return None
    shape: tuple[int, ...] = (len(devices) // slices,)
    if version in _TPUS:
        along = list(zip(*(device.coords for device in devices), strict=True))[: _TPUS[version][2]]
        shape = tuple(max(places) - min(places) + 1 for places in along)
    found = Topology(kind, version, shape, slices)
    return found if found.n_devices == len(devices) else None


def _shape(name: str, version: str, size: int) -> tuple[int, ...]:
    """The shape of the slice of a size: the most cubic one, in multiples of 4 from 64 chips on."""
    _, cores, dimensions, most = _TPUS[version]
    chips = size // cores
    if size % cores == 0 and 0 < chips <= most:
        if shape := next((shape for shape in _SMALL[dimensions] if math.prod(shape) == chips), None):
            return shape
        if dimensions == 3 and chips % 64 == 0:
            return tuple(4 * side for side in _most_cubic(chips // 64))
    sizes = [s for s in range(cores, cores * most + 1, cores) if _exists(version, s // cores)]
    near = sorted(sorted(sizes, key=lambda s: abs(s - size))[:4])
    what = 'chips' if cores == 1 else 'cores, two per chip'
    raise UserError(
        f'--topology {name}: no {version} slice has {size} {what}\nnear: {", ".join(f"{version}-{s}" for s in near)}'
    )


def _exists(version: str, chips: int) -> bool:
    if _TPUS[version][2] == 2:
        return chips in (1, 4, 8, 16, 32, 64, 128, 256)
    return chips in (1, 4, 8, 16, 32) or chips % 64 == 0


def _most_cubic(n: int) -> tuple[int, int, int]:
    sides = [
        (a, b, n // (a * b)) for a, b in itertools.product(range(1, n + 1), repeat=2) if a <= b and n % (a * b) == 0
    ]
    return min((s for s in sides if s[1] <= s[2]), key=lambda s: (s[2], s[1]))
