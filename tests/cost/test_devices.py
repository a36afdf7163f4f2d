"""Device kinds that JAX reports are recognized, and only those; the numbers agree with a table written elsewhere."""

import subprocess
import sys

import pytest
from jax.experimental.pallas import tpu as pltpu

from pretrax.cost.devices import GIB, known, lookup


@pytest.mark.parametrize(
    ('device_kind', 'name', 'bf16'),
    [
        ('NVIDIA A100-SXM4-40GB', 'A100 40GB', 312e12),
        ('NVIDIA A100-SXM4-80GB', 'A100 SXM 80GB', 312e12),
        ('NVIDIA A100 80GB PCIe', 'A100 PCIe 80GB', 312e12),
        ('NVIDIA H100 80GB HBM3', 'H100 SXM', 989.4e12),
        ('NVIDIA H100 PCIe', 'H100 PCIe', 756e12),
        ('NVIDIA H100 NVL', 'H100 NVL', 835.5e12),
        ('NVIDIA H200', 'H200 SXM', 989.4e12),
        ('NVIDIA H200 NVL', 'H200 NVL', 835.5e12),
        ('NVIDIA GH200 480GB', 'GH200 96GB', 989.4e12),
        ('NVIDIA GH200 144G HBM3e', 'GH200 144GB', 989.4e12),
        ('NVIDIA B200', 'B200', 2250e12),
        ('NVIDIA B300 SXM6 AC', 'B300', 2250e12),
        ('NVIDIA GB200', 'GB200', 2500e12),
        ('NVIDIA GB300', 'GB300', 2500e12),
        ('AMD Instinct MI300X', 'MI300X', 1307.4e12),
        ('AMD Instinct MI300X VF', 'MI300X', 1307.4e12),
        ('TPU v4', 'TPU v4', 275e12),
        ('TPU v5 lite', 'TPU v5e', 197e12),
        ('TPU v5', 'TPU v5p', 459e12),
        ('TPU v5p', 'TPU v5p', 459e12),
        ('TPU v6 lite', 'TPU v6e', 918e12),
        ('TPU7x', 'TPU v7 (half a chip)', 1153.5e12),
    ],
)
def test_device_kinds_of_jax(device_kind, name, bf16):
    device = lookup(device_kind)
    assert device is not None
    assert (device.name, device.bf16) == (name, bf16)
    assert device.peak('bf16') == bf16


@pytest.mark.parametrize(
    'device_kind',
    [
        'cpu',
        'NVIDIA GB10',
        'NVIDIA H20',
        'NVIDIA A10G',
        'NVIDIA A100-SXM4-40GB MIG 1g.5gb',
        'NVIDIA H100 80GB HBM3 MIG 3g.40gb',
        'TPU v4 lite',
        'TPU v3',
        'TPU8t',
        'AMD Instinct MI300A',
        'gfx942:sramecc+:xnack-',
    ],
)
def test_unknown_devices_have_no_peak(device_kind):
    assert lookup(device_kind) is None


@pytest.mark.parametrize(
    ('device_kind', 'version', 'cores'),
    [
        ('TPU v4', pltpu.ChipVersion.TPU_V4, 2),  # a megacore: one device
        ('TPU v5 lite', pltpu.ChipVersion.TPU_V5E, 1),
        ('TPU v5', pltpu.ChipVersion.TPU_V5P, 2),
        ('TPU v6 lite', pltpu.ChipVersion.TPU_V6E, 1),
        ('TPU7x', pltpu.ChipVersion.TPU_7X, 1),  # each core is a device of its own
    ],
)
def test_tpus_agree_with_what_jax_knows_of_one_device(device_kind, version, cores):
    device = lookup(device_kind)
    jax_says = pltpu.get_tpu_info_for_chip(version, cores)  # its numbers are for one core
    assert device is not None
    assert device.bandwidth is not None
    assert device.bf16 == pytest.approx(jax_says.bf16_ops_per_second * cores, rel=0.01)
    assert device.memory == pytest.approx(jax_says.hbm_capacity_bytes * cores, rel=0.02)
    assert device.bandwidth == pytest.approx(jax_says.mem_bw_bytes_per_second * cores, rel=0.13)


def test_every_row_is_complete_and_dense():
    for device in known():
        assert 100e12 < device.bf16 < 3000e12, device  # a sparse figure of a B200 would be 4500
        assert device.f32 <= device.bf16, device
        assert 16 * GIB <= device.memory <= 288 * GIB, device
        assert device.bandwidth is not None
        assert 0.8e12 <= device.bandwidth <= 8e12, device
        assert device.source


def test_what_is_reached_is_physically_possible():
    for device in known():
        reach = device.reach
        for share in (reach.products, reach.attention, reach.memory, reach.links, reach.network):
            assert 0.3 < share <= 1, device
        assert 0 < reach.hop <= reach.far_hop < 1e-3, device  # light passes 200 km in a millisecond
        assert 0 < reach.launch < 1e-3, device
        assert 0 < reach.beside < 0.5, device


def test_the_table_does_not_import_jax():
    code = 'import sys, pretrax.cost.devices, pretrax.system.cpu, pretrax.cost.memory; sys.exit("jax" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0
