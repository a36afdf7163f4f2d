"""Hardware to compile for that is not in this machine: its names, and its devices in JAX.

v5e-256, v6e-64        TPU slices by chips; v4-64, v5p-128, tpu7x-64 by cores, two per chip
v5e:16x16, v5p:4x4x4   TPU slices by shape
h200, a100, h100x8     one NVIDIA GPU; a node of eight; `slices` is the number of nodes
gb200x72, gb300x64     GPUs of a rack that NVLink connects
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

from pretrax.cost.devices import Device, Gpu, Reach, Tpu, gpus, lookup, machines, tpus
from pretrax.errors import UserError

# Slices of up to 256 chips in two dimensions, and of fewer than 64 chips in three.
_SMALL: dict[int, list[tuple[int, ...]]] = {
    2: [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)],
    3: [(1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)],
}
_ALSO = {'v5litepod': 'v5e', 'v5lite': 'v5e', 'v7x': 'tpu7x'}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Hardware to compile for."""

    name: str  # as given
    version: str  # version of the TPU or GPU, such as 'v5e'
    shape: tuple[int, ...]  # shape of a slice; of a node for GPUs, such as (8,)
    slices: int  # number of slices or nodes, which a slow network connects
    machine: str = ''  # one of `machines()`; '' if it was not named
    reach: Reach | None = None  # replaces that of the device; None: the device's

    @property
    def target(self) -> Tpu | Gpu:
        """Its row in the table of hardware to compile for."""
        return tpus().get(self.version) or gpus()[self.version]

    @property
    def platform(self) -> str:
        return 'tpu' if isinstance(self.target, Tpu) else 'cuda'

    @property
    def kind(self) -> str:
        """`device_kind` of its devices."""
        return self.target.kind

    @property
    def device(self) -> Device:
        """Its row in the device table."""
        device = self.target.device
        return dataclasses.replace(device, reach=self.reach) if self.reach else device

    @property
    def memory(self) -> int:
        """Bytes per device that a program may use, as the driver reports them."""
        return self.target.memory if isinstance(self.target, Gpu) else self.device.memory

    @property
    def chips(self) -> int:
        """Chips of one slice or node."""
        return math.prod(self.shape)

    @property
    def chips_per_host(self) -> int:
        """Chips of one machine: 4 of a rack of GPUs; up to 8 of v5e and v6e if a slice is a single machine, else 4."""
        if not isinstance(self.target, Tpu):
            return min(self.chips, 4 if self.target.domain > 8 else 8)
        most = 8 if self.target.dimensions == 2 else 4
        return self.chips if self.chips <= most else 4

    @property
    def hosts(self) -> int:
        """Machines of one slice, each with one process."""
        return self.chips // self.chips_per_host

    @property
    def n_devices(self) -> int:
        # A chip of tpu7x is two devices.
        return self.chips * self.slices * (2 if self.version == 'tpu7x' else 1)

    @property
    def devices_per_host(self) -> int:
        return self.n_devices // (self.hosts * self.slices)

    @property
    def sides(self) -> str:
        """The shape in words, such as '4x4x8'."""
        return 'x'.join(map(str, self.shape))

    def __str__(self) -> str:
        shape = self.sides
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
    if gpu := re.fullmatch(rf'({"|".join(gpus())})(?:x(\d+))?', plain):
        here, domain = int(gpu[2] or 1), gpus()[gpu[1]].domain
        if here not in (1, 2, 4, 8) and (here % 4 or not 0 < here <= domain):
            more = f', or up to {domain} in steps of 4' if domain > 8 else ''
            raise UserError(
                f'--topology {name}: a node has 1, 2, 4 or 8 GPUs{more}\nfor more, give --slices, the number of nodes'
            )
        return Topology(plain, gpu[1], (here,), slices)
    if machine := re.fullmatch(rf'({"|".join(machines())})(?: ?x ?(\d+))?', plain):
        number = int(machine[2] or slices)
        if number < 1:
            raise UserError(f'--topology {name}: x{number}: expected 1 machine or more')
        if slices not in (1, number):
            raise UserError(
                f'--topology {name} with --slices {slices}: x{number} is the number of machines; leave one out'
            )
        return Topology(plain, machines()[machine[1]]['gpu'], (8,), number, machine[1])
    if version in tpus() and separator == '-' and size.isdigit():
        return Topology(plain, version, _shape(name, version, int(size)), slices)
    if version in tpus() and separator == ':' and re.fullmatch(r'\d+(x\d+)+', size):
        shape = tuple(map(int, size.split('x')))
        tpu = tpus()[version]
        if len(shape) != tpu.dimensions or math.prod(shape) > tpu.chips or 0 in shape:
            raise UserError(
                f'--topology {name}: a {version} slice has {tpu.dimensions} dimensions and at most {tpu.chips} chips'
            )
        return Topology(plain, version, shape, slices)
    examples = [
        *(f'{one}-{chips * tpu.cores}' for one, tpu in tpus().items() for chips in (16, 64, 256)),
        *gpus(),
        *(f'{gpu}x8' for gpu in gpus()),
        *machines(),
    ]
    family = [one for one in machines() if one.startswith(f'{version}-')]
    near = difflib.get_close_matches(plain, family or examples, 1, 0.5) or family
    raise UserError(
        f'--topology {name}: no such hardware'
        + (f'; did you mean {near[0]}?' if near else '')
        + f'\n    TPU: {", ".join(tpus())} with -SIZE or :SHAPE, such as v5e-256, v5p-128 or v5p:4x4x4'
        + f'\n    GPU: {", ".join(gpus())}, with x8 for a node of eight'
        + '\n    machines of eight GPUs, with x4 for four of them:\n'
        + textwrap.indent(textwrap.fill(', '.join(machines()), 92, break_on_hyphens=False), ' ' * 8)
    )


def check_rentable(topology: Topology) -> None:
    """Raises UserError if Google Cloud has no TPU slice of this shape; a compiler takes others too."""
    shape = topology.shape
    if topology.platform != 'tpu':
        raise UserError(
            f'{topology.name} is not a TPU\nexpected one of: {", ".join(tpus())}, such as v5p-128 or v5p:4x4x4'
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
    device = lookup(kind)
    version = next((name for name, target in {**tpus(), **gpus()}.items() if target.device == device), None)
    if version is None:
        return None
    shape: tuple[int, ...] = (len(devices) // slices,)
    if version in tpus():
        along = list(zip(*(device.coords for device in devices), strict=True))[: tpus()[version].dimensions]
        shape = tuple(max(places) - min(places) + 1 for places in along)
    found = Topology(kind, version, shape, slices)
    return found if found.n_devices == len(devices) else None


def _shape(name: str, version: str, size: int) -> tuple[int, ...]:
    """The shape of the slice of a size: the most cubic one, in multiples of 4 from 64 chips on."""
    tpu = tpus()[version]
    cores, chips = tpu.cores, size // tpu.cores
    if size % cores == 0 and 0 < chips <= tpu.chips:
        if shape := next((shape for shape in _SMALL[tpu.dimensions] if math.prod(shape) == chips), None):
            return shape
        if tpu.dimensions == 3 and chips % 64 == 0:
            return tuple(4 * side for side in _most_cubic(chips // 64))
    sizes = [s for s in range(cores, cores * tpu.chips + 1, cores) if _exists(version, s // cores)]
    near = sorted(sorted(sizes, key=lambda s: abs(s - size))[:4])
    what = 'chips' if cores == 1 else 'cores, two per chip'
    raise UserError(
        f'--topology {name}: no {version} slice has {size} {what}\nnear: {", ".join(f"{version}-{s}" for s in near)}'
    )


def _exists(version: str, chips: int) -> bool:
    if tpus()[version].dimensions == 2:
        return chips in (1, 4, 8, 16, 32, 64, 128, 256)
    return chips in (1, 4, 8, 16, 32) or chips % 64 == 0


def _most_cubic(n: int) -> tuple[int, int, int]:
    sides = [
        (a, b, n // (a * b)) for a, b in itertools.product(range(1, n + 1), repeat=2) if a <= b and n % (a * b) == 0
    ]
    return min((s for s in sides if s[1] <= s[2]), key=lambda s: (s[2], s[1]))
