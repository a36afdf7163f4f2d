"""Peak rates and memory of accelerators: the denominator of MFU, and the limit of a plan.

All numbers are per JAX device and dense (NVIDIA's brochures print twice that, for structured sparsity). An accelerator
that is missing here has no MFU: `lookup` returns None.

`f32` is the fastest arithmetic that JAX may use for a product of f32 matrices at its default precision (see
`jax.lax.Precision`): TF32 on NVIDIA and AMD, one bf16 pass on TPU. It is an upper bound: with `highest` precision the
hardware is slower, and MFU is lower than the utilization of the arithmetic units.
"""

import dataclasses
import re

GIB = 2**30  # vendors write GB for this: an '80 GB' A100 reports 81,920 MiB
TERA = 1e12


@dataclasses.dataclass(frozen=True)
class Device:
    """Peak rates of one JAX device: FLOP/s for matrix products, memory in bytes, memory bandwidth in bytes/s."""

    name: str
    bf16: float
    f32: float
    memory: int
    bandwidth: float | None  # None: unknown, as for CPUs
    source: str  # the document with these numbers, or how they were measured

    def peak(self, compute: str) -> float:
        """FLOP/s for matrix products in a compute dtype: 'bf16' or 'fp16', which are equally fast, or 'f32'."""
        return {'bf16': self.bf16, 'fp16': self.bf16, 'f32': self.f32}[compute]


# Titles of the vendors' documents for the rows below.
_A100 = 'NVIDIA A100 Tensor Core GPU datasheet, nvidia.com/en-us/data-center/a100'
_H100 = 'NVIDIA H100 Tensor Core GPU datasheet, resources.nvidia.com/en-us-tensor-core'  # PCIe card: 2023 edition
_H200 = 'NVIDIA H200 Tensor Core GPU datasheet, nvidia.com/en-us/data-center/h200'
_B200 = 'NVIDIA HGX B200 and DGX B200 datasheets, nvidia.com/en-us/data-center/hgx'
_GH200 = 'NVIDIA GH200 Grace Hopper Superchip datasheet, resources.nvidia.com/en-us-grace-cpu'
_MI300X = 'AMD Instinct MI300X accelerator data sheet, amd.com/en/products/accelerators/instinct/mi300'
_TPU = 'docs.cloud.google.com/tpu/docs/'


def _tpu(name: str, page: str, bf16: float, gib: float, bandwidth: float) -> Device:
    return Device(name, bf16 * TERA, bf16 * TERA, int(gib * GIB), bandwidth * TERA, _TPU + page)


# `device_kind` of JAX (a regular expression that must match all of it) -> device.
# NVIDIA: the driver's product name. 'GH200 480GB' and '120GB' count the CPU's memory; the GPU has 96 GB. A slice of a
# GPU (MIG) ends with, for example, 'MIG 1g.10gb'. It matches no row and has no MFU, since it is another device.
# AMD: the product name, with ' VF' inside a virtual machine. If the driver has no name, it is 'gfx942:sramecc+:xnack-',
# which MI300A, MI300X and MI325X share, so it is unknown. TPU v4 and v5p are one device per chip (two cores form a
# 'megacore'), v5e and v6e have one core. A v7 chip (Ironwood) is two devices, so its row is half of Google's numbers
# for the chip.
_TABLE: dict[str, Device] = {
    r'NVIDIA A100-(SXM4|SXM|PCIE)-40GB': Device('A100 40GB', 312e12, 156e12, 40 * GIB, 1.555e12, _A100),
    r'NVIDIA A100-(SXM4|SXM)-80GB': Device('A100 SXM 80GB', 312e12, 156e12, 80 * GIB, 2.039e12, _A100),
    r'NVIDIA A100 80GB PCIe|NVIDIA A100-PCIE-80GB': Device('A100 PCIe 80GB', 312e12, 156e12, 80 * GIB, 1.935e12, _A100),
    r'NVIDIA H100 80GB HBM3|NVIDIA H100 SXM5?': Device('H100 SXM', 989.4e12, 494.7e12, 80 * GIB, 3.35e12, _H100),
    r'NVIDIA H100 PCIe': Device('H100 PCIe', 756e12, 378e12, 80 * GIB, 2.0e12, _H100),
    r'NVIDIA H100 NVL': Device('H100 NVL', 835.5e12, 417.5e12, 94 * GIB, 3.9e12, _H100),
    r'NVIDIA H200': Device('H200 SXM', 989.4e12, 494.7e12, 141 * GIB, 4.8e12, _H200),
    r'NVIDIA H200 NVL': Device('H200 NVL', 835.5e12, 417.5e12, 141 * GIB, 4.8e12, _H200),
    r'NVIDIA GH200 (480GB|120GB)': Device('GH200 96GB', 989.4e12, 494.7e12, 96 * GIB, 4.0e12, _GH200),
    r'NVIDIA GH200 144G HBM3e': Device('GH200 144GB', 989.4e12, 494.7e12, 144 * GIB, 4.9e12, _GH200),
    r'NVIDIA B200': Device('B200', 2250e12, 1125e12, 180 * GIB, 8.0e12, _B200),
    r'AMD Instinct MI300X( VF)?': Device('MI300X', 1307.4e12, 653.7e12, 192 * GIB, 5.3e12, _MI300X),
    r'TPU v4': _tpu('TPU v4', 'v4', 275, 32, 1.2),
    r'TPU v5 lite|TPU v5e': _tpu('TPU v5e', 'v5e', 197, 16, 0.819),
    r'TPU v5|TPU v5p': _tpu('TPU v5p', 'v5p', 459, 95, 2.765),
    r'TPU v6 lite|TPU v6e': _tpu('TPU v6e', 'v6e', 918, 32, 1.64),
    r'TPU7x': _tpu('TPU v7 (half a chip)', 'tpu7x', 2307 / 2, 192 / 2, 7.38 / 2),
}


def lookup(device_kind: str) -> Device | None:
    """The row for a JAX `device_kind`, or None if the table has none. For CPUs see `system/cpu.py`."""
    for pattern, device in _TABLE.items():
        if re.fullmatch(pattern, device_kind.strip(), re.IGNORECASE):
            return device
    return None


def known() -> tuple[Device, ...]:
    """Every row of the table."""
    return tuple(_TABLE.values())
