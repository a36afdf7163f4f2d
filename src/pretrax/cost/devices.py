"""Peak rates and memory of accelerators: the denominator of MFU, and the limit of a plan.

All numbers are per JAX device and dense (NVIDIA's brochures print twice that, for structured sparsity). An accelerator
that is missing here has no MFU: `lookup` returns None.

`f32` is the fastest arithmetic that JAX may use for a product of f32 matrices at its default precision (see
`jax.lax.Precision`): TF32 on NVIDIA and AMD, one bf16 pass on TPU. It is an upper bound: with `highest` precision the
hardware is slower, and MFU is lower than the utilization of the arithmetic units.
"""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

from pretrax.tables import read_table

GIB = 2**30  # vendors write GB for this: an '80 GB' A100 reports 81,920 MiB
GIGA, TERA = 1e9, 1e12


@dataclasses.dataclass(frozen=True)
class Reach:
    """The shares of a device's peak rates that programs reach, and the delays that the peaks leave out."""

    # products, attention, memory: shares of the peak FLOP/s in products and attention, and of the memory bandwidth
    products: float
    attention: float
    memory: float
    # links, network: shares of the link bandwidth inside a slice or node, and between slices or nodes
    links: float = 1.0
    network: float = 1.0
    # hop, far_hop: latency of a collective in seconds, for each device that its data passes inside a slice or node, and
    # for each slice or node
    hop: float = 0.0
    far_hop: float = 0.0
    launch: float = 0.0  # seconds to launch the kernels of a layer, in a forward and backward pass
    beside: float = 0.0  # how much communication slows the work that hides it, as a share of the hidden seconds


@dataclasses.dataclass(frozen=True)
class Device:
    """Peak rates of one JAX device: FLOP/s for matrix products, memory in bytes, memory bandwidth in bytes/s."""

    name: str
    bf16: float
    f32: float
    memory: int
    bandwidth: float | None  # None: unknown, as for CPUs
    host: float | None  # bytes/s to the memory of the host, in one direction; None: unknown
    source: str  # the document with these numbers, or how they were measured
    int8: float | None = None  # None: there are no units for it, or XLA does not use them
    fp8: float | None = None
    fp4: float | None = None
    reach: Reach = Reach(1.0, 1.0, 1.0)

    def peak(self, compute: str) -> float:
        """FLOP/s for matrix products in a compute dtype: 'bf16' or 'fp16', which are equally fast, or 'f32'.

        'int8', 'fp8', 'mxfp8', 'nvfp4': as fast as bf16 on a device without units for it, which multiplies in bf16.

        'highest': f32 products with `jax.lax.Precision.HIGHEST`. TPUs make six bf16 passes. GPUs do not use TF32: the
        other units of A100 and H100 have about an eighth of its rate (the same datasheets).
        """
        full = self.bf16 / 6 if self.name.startswith('TPU') else self.f32 / 8
        narrow = {'int8': self.int8, 'fp8': self.fp8, 'mxfp8': self.fp8, 'nvfp4': self.fp4}
        return narrow.get(compute) or {'f32': self.f32, 'highest': full}.get(compute, self.bf16)


@dataclasses.dataclass(frozen=True)
class Link:
    """Bytes/s of one device: `inside` a slice or node, `between` slices or nodes.

    `inside` is for a TPU that of a ring over one dimension of the torus, which uses a link in both directions; for a
    GPU that of NVLink in one direction.
    """

    inside: float
    between: float
    source: str


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A TPU to compile for."""

    device: Device
    link: Link
    kind: str  # `device_kind`
    cores: int  # per chip in names
    dimensions: int  # of a slice
    chips: int  # of the largest slice
    sparse_core: bool  # whether XLA can use it for collectives; that of v4 is for embeddings only


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU to compile for, with the facts that XLA needs if there is none."""

    device: Device
    link: Link
    kind: str  # `device_kind`
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    memory: int  # bytes that the driver reports
    l2: int  # bytes
    clock: float  # GHz
    shared: int  # bytes of shared memory per block
    domain: int = 8  # GPUs that NVLink connects


@functools.cache
def _tables() -> dict[str, Any]:
    return read_table(Path(__file__).with_suffix('.yaml'))


@functools.cache
def _devices() -> dict[str, Device]:
    """By name."""
    return {
        name: Device(
            name,
            row['bf16'] * TERA,
            row['f32'] * TERA,
            row['memory'] * GIB,
            row['bandwidth'] * GIGA,
            row['host'] * GIGA,
            row['source'],
            *(row[kind] * TERA if kind in row else None for kind in ('int8', 'fp8', 'fp4')),
            reach=Reach(**_tables()['reach'][row['reach']]),
        )
        for name, row in _tables()['devices'].items()
    }


def lookup(device_kind: str) -> Device | None:
    """The row for a JAX `device_kind`, or None if the table has none. For CPUs see `system/cpu.py`."""
    for name, row in _tables()['devices'].items():
        if re.fullmatch(row['kind'], device_kind.strip(), re.IGNORECASE):
            return _devices()[name]
    return None


def known() -> tuple[Device, ...]:
    """Every row of the table."""
    return tuple(_devices().values())


@functools.cache
def tpus() -> dict[str, Tpu]:
    """By libtpu's name, such as 'v5e'."""
    return {version: Tpu(**row | _device_and_link(row)) for version, row in _tables()['tpus'].items()}


@functools.cache
def gpus() -> dict[str, Gpu]:
    """By the names in topologies, such as 'h100'."""
    return {
        version: Gpu(
            **row
            | _device_and_link(row)
            | {
                'capability': tuple(row['capability']),
                'memory': row['memory'] * 2**20,
                'l2': row['l2'] * 2**20,
                'shared': row['shared'] * 2**10,
            }
        )
        for version, row in _tables()['gpus'].items()
    }


def machines() -> dict[str, dict[str, Any]]:
    """Machines of eight GPUs, by name: 'gpu', one of `gpus`, and 'gigabits' per second of their network cards."""
    return _tables()['machines']


def _device_and_link(row: dict[str, Any]) -> dict[str, Any]:
    link = row['link']
    return {
        'device': _devices()[row['device']],
        'link': Link(link['inside'] * GIGA, link['between'] * GIGA, link['source']),
    }
