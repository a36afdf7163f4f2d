"""The devices of a run, their mesh, and the dtype of matrix products."""

import math
import os
import re
import resource
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from pretrax.config import Mesh as MeshSection
from pretrax.config import resolve_mesh
from pretrax.config.batch import check_batch, common_sequences
from pretrax.config.schema import Batch
from pretrax.cost.devices import lookup
from pretrax.errors import UserError, first_line
from pretrax.jax_compat import cache_only_what_can_be_loaded
from pretrax.model.axes import AXES
from pretrax.run.placement import n_slices, place
from pretrax.run.variables import check_variables
from pretrax.system import process_memory
from pretrax.system.accelerators import idle_plugins, reserve_gpu_memory, skip_absent_accelerators
from pretrax.system.cores import cpu_flags, total_memory, usable_cores

MEANING = {
    'r': 'replicas',
    'd': 'weights sharded',
    'e': 'experts',
    'c': 'context',
    't': 'tensor parallel',
    'p': 'pipeline stages',
}


def choose_mesh(section: MeshSection, batch: Batch, absent: Sequence[Any] | None = None) -> tuple[Mesh, dict[str, str]]:
    """The mesh of a run, and its part of the start-up report, {topic: text}.

    Args:
        absent: devices to compile for that are not in this machine; None: the devices of this machine.

    Raises:
        UserError: `mesh:` does not fit the devices, or the batch cannot be sharded over the mesh.
    """
    simulated = simulate_cpus(section, common_sequences(batch)) if absent is None else ''
    reserve_gpu_memory()
    devices = list(absent or available_devices())
    platform = devices[0].platform
    sizes = resolve_mesh(section, len(devices), platform, n_slices(devices))
    assert tuple(sizes) == AXES
    check_batch(batch, sizes)
    placed, placement = place(devices, sizes)
    mesh = Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    kind = 'CPU device' if platform == 'cpu' else devices[0].device_kind
    reason = 'not in this machine' if absent else simulated if platform == 'cpu' else f'{platform} backend'
    if idle := '' if absent else idle_plugins():
        reason += f'; {idle}'
    processes = jax.process_count()
    spread = f', {jax.local_device_count()} in each of {processes} processes' if processes > 1 else ''
    shown = ', '.join(f'{axis}={n} ({MEANING[axis]})' for axis, n in sizes.items() if n > 1 or axis in 'rdt')
    facts = {
        'devices': f'{len(devices)} x {kind}{spread} ({reason})',
        'mesh': shown,
        'placement': placement,
    }
    if platform == 'cpu' and not absent:
        facts['process memory'] = process_memory.described()
    return mesh, facts


def available_devices() -> list[Any]:
    """The devices of all processes, as JAX finds them.

    Raises:
        UserError: JAX finds no platform of JAX_PLATFORMS, or a run cannot be trained with a variable or a setting of
            JAX.
    """
    check_variables()
    cache_only_what_can_be_loaded()
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: no platform of JAX_PLATFORMS is available
        if not (platforms := jax.config.jax_platforms):
            raise
        said = first_line(error).partition(' (set ')[0][:200]
        raise UserError(
            f'JAX_PLATFORMS={platforms}: JAX finds no such device{f": {said}" if said else ""}\n'
            'unset JAX_PLATFORMS to use what is there, or run pretrax doctor to see why'
        ) from error


def simulate_cpus(section: MeshSection, n_sequences: int) -> str:
    """Splits the CPU into as many devices as the mesh needs, or one per two cores. Returns the reason.

    XLA spreads the work of one device over the cores. More devices than that cost time: each updates its own copy of
    the weights, and they wait for each other (measurements: benchmarks/lab-notes.md).
    """
    skip_absent_accelerators()
    if 'xla_force_host_platform_device_count' in os.environ.get('XLA_FLAGS', ''):
        return 'no accelerator; the number is from XLA_FLAGS'
    if jax.distributed.is_initialized():
        return f'no accelerator; {max(jax.config.jax_num_cpu_devices, 1)} per process'  # -1: not set
    if 'JAX_NUM_CPU_DEVICES' in os.environ:
        return 'no accelerator; the number is from JAX_NUM_CPU_DEVICES'
    sizes = {axis: getattr(section, axis) for axis in AXES}
    needed = math.prod(size for size in sizes.values() if isinstance(size, int))
    shards = math.prod(size for axis, size in sizes.items() if isinstance(size, int) and axis in 'rde')
    is_free = 'auto' in (section.r, section.d)
    cores = usable_cores()
    copies = range(1, max(cores // 2 // needed, 1) + 1) if is_free else range(0)
    count = needed * max((n for n in copies if n_sequences % (shards * n) == 0), default=1)
    try:
        jax.config.update('jax_num_cpu_devices', count)
    except RuntimeError:  # the program that uses pretrax as a library has started JAX already
        return 'no accelerator; JAX was already running with them'
    return f'no accelerator; one per two cores of {cores}' if is_free else 'no accelerator; simulated, as mesh asks'


def device_memory(device: Any) -> int | None:
    """Bytes of a device of this machine that programs may use; None if it does not report them."""
    return (device.memory_stats() or {}).get('bytes_limit') if device.platform != 'cpu' else None


def memory_limit(devices: Sequence[Any]) -> int | None:
    """Bytes of each of these devices of this machine; None: unknown. CPU devices share the machine's memory."""
    device = devices[0]
    if device.platform == 'cpu':
        return total_memory() // len(devices)
    known = lookup(device.device_kind)
    return device_memory(device) or (known.memory if known else None)


def peak_memory(devices: Sequence[Any]) -> int:
    """The most bytes that were in use on one of these devices; of CPUs, by the process."""
    peaks = [(device.memory_stats() or {}).get('peak_bytes_in_use') for device in devices]
    known = [peak for peak in peaks if peak is not None]
    unit = 1 if sys.platform == 'darwin' else 1024
    return max(known) if known else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def choose_compute(choice: str, platform: str, capability: str = '') -> tuple[Any, str]:
    """The dtype of matrix products, and the reason. Raises UserError if the devices cannot use the choice.

    `capability` is the compute capability of an NVIDIA GPU, such as '9.0'. Its tensor cores multiply bf16 from 8.0 on.
    """
    if choice == 'fp16' and platform == 'tpu':
        raise UserError('precision.compute = fp16: TPUs multiply bf16, not fp16\nuse precision.compute=bf16')
    if choice == 'fp16' and platform == 'cpu':
        return jnp.float16, 'as configured; SLOW: processors multiply it as f32'
    if choice != 'auto':
        return {'bf16': jnp.bfloat16, 'fp16': jnp.float16, 'f32': jnp.float32}[choice], 'as configured'
    if re.fullmatch(r'[1-7]\.\d', capability):
        return jnp.float32, f'a GPU of compute capability {capability} has no bf16 products'
    if platform != 'cpu':
        return jnp.bfloat16, f'{platform} multiplies bf16 fastest'
    flags = cpu_flags()
    for flag in ('amx_bf16', 'avx512_bf16'):
        if flag in flags:
            return jnp.bfloat16, f'the processor multiplies bf16 ({flag})'
    return jnp.float32, 'the processor has no bf16 products'
