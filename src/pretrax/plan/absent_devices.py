"""Devices of hardware that is not in this machine, for which JAX can compile."""

import os
from typing import Any

from jax.experimental import topologies

from pretrax.cost.devices import Gpu
from pretrax.cost.topology import Topology
from pretrax.jax_compat import assume_cudnn
from pretrax.system.software import need_extra


def absent_devices(topology: Topology) -> list[Any]:
    """Devices that JAX compiles for. Requires JAX_PLATFORMS=cpu.

    Raises:
        UserError: the plugin for them is not installed.
    """
    plugin, extra = ('libtpu', 'tpu') if topology.platform == 'tpu' else ('jax_cuda13_plugin', 'cuda')
    need_extra(extra, f'{topology.name}: compiling for it', plugin)
    if topology.platform == 'tpu':
        # Otherwise libtpu asks Google's metadata server for its location.
        os.environ |= {
            'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # nothing runs, so several processes may compile
            'TPU_SKIP_MDS_QUERY': '1',
            'TPU_WORKER_HOSTNAMES': 'localhost',
            'TPU_ACCELERATOR_TYPE': 'v5litepod-16',
        }
        several = {'num_slices': topology.slices} if topology.slices > 1 else {}
        # Otherwise each of the two cores of a v4 chip is a device.
        cores = {'chip_config_name': 'megacore'} if topology.version == 'v4' else {}
        return list(
            topologies.get_topology_desc(f'{topology.version}:{topology.sides}', 'tpu', **several, **cores).devices
        )
    gpu, bandwidth = topology.target, topology.device.bandwidth
    assert isinstance(gpu, Gpu)
    assert bandwidth is not None
    assume_cudnn('.'.join(map(str, gpu.capability)))
    return list(
        topologies.get_topology_desc(
            platform='cuda',
            topology_name=topology.version,
            topology=f'1x{topology.slices}x{topology.sides}',
            target_config=_target_config(gpu, bandwidth),
        ).devices
    )


def _target_config(gpu: Gpu, bandwidth: float) -> str:
    """XLA's description of a GPU, a text protobuf (xla/stream_executor/device_description.proto)."""
    toolkit = '"13.0.0"'
    return f"""
gpu_device_info {{
  name: "{gpu.kind}" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]} }}
  core_count: {gpu.cores} fpus_per_core: {64 if gpu.capability < (9, 0) else 128} clock_rate_ghz: {gpu.clock}
  memory_bandwidth: {int(bandwidth)} device_memory_size: {gpu.memory} l2_cache_size: {gpu.l2}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared} shared_memory_per_core: {gpu.shared + 1024}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  driver_version: {toolkit} runtime_version: {toolkit} compile_time_toolkit_version: {toolkit} dnn_version: "9.19.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 19 patch: 0 }}
device_description_str: "{gpu.kind}"
"""
