"""Which devices a run uses, how they are arranged, and why: decided here, once, and said."""

import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from pretrax.config import Mesh as MeshSection
from pretrax.config import resolve_mesh
from pretrax.errors import UserError
from pretrax.machine import process_memory
from pretrax.model.axes import AXES, ROWS, along
from pretrax.run.placement import n_slices, place

MEANING = {
    'r': 'replicas', 'd': 'weights sharded', 'e': 'experts', 'c': 'context', 't': 'tensor parallel', 'p': 'pipeline stages',
}  # fmt: skip


def choose_mesh(
    section: MeshSection, rows: int, length: int, absent: Sequence[Any] | None = None
) -> tuple[Mesh, dict[str, int], list[str]]:
    """The mesh of a run, the size of each axis, and the reasons, a line each.

    Args:
        section: the `mesh:` line.
        rows: sequences in a batch, which r, d and e share.
        length: tokens in a sequence, which c shares.
        absent: devices to compile for; None: those that are here.

    Raises:
        UserError: the line does not fit the devices, or the devices do not divide the batch.
    """
    simulated = simulate_cpus(section, rows) if absent is None else ''
    devices = list(absent or jax.devices())
    platform = devices[0].platform
    sizes = resolve_mesh(section, len(devices), platform, n_slices(devices))
    share = along(ROWS, sizes)
    if rows % share:
        near = [n for n in (rows // share * share, -(-rows // share) * share) if n]
        raise UserError(
            f'batch: {rows} sequences a step cannot be shared by mesh {_written(ROWS, sizes)} = {share} devices\n'
            f'give batch.tokens for {" or ".join(map(str, near))} sequences, or a mesh whose {_product(sizes)} divides {rows}'
        )
    if length % sizes['c']:
        near = max(1, round(length / sizes['c'])) * sizes['c']
        raise UserError(
            f'batch.sequence_length = {length} is not divisible by mesh.c = {sizes["c"]}\nuse {near}, or another mesh.c'
        )
    assert tuple(sizes) == AXES
    placed, where = place(devices, sizes)
    mesh = Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    kind = devices[0].device_kind if platform != 'cpu' else 'CPU device'
    why = simulated if platform == 'cpu' else f'the {platform} backend is installed and has them'
    why = 'not here: to compile for' if absent else why
    here = f', {jax.local_device_count()} in each of {jax.process_count()} processes' if jax.process_count() > 1 else ''
    used = {axis: size for axis, size in sizes.items() if size > 1 or axis in 'rdt'}
    arranged = ', '.join(f'{axis}={size} ({MEANING[axis]})' for axis, size in used.items())
    lines = [f'devices: {len(devices)} x {kind}{here} ({why})', f'mesh: {arranged}', f'placement: {where}']
    if platform == 'cpu' and not absent:
        lines.append(f'process memory: {process_memory.described()}')
    return mesh, sizes, lines


def _written(axes: str, sizes: dict[str, int]) -> str:
    """'r=2 x d=4', leaving out the axes of size 1 that few use."""
    return ' x '.join(f'{axis}={sizes[axis]}' for axis in axes.split() if sizes[axis] > 1 or axis in 'rd')


def _product(sizes: dict[str, int]) -> str:
    return ' x '.join(axis for axis in ROWS.split() if sizes[axis] > 1 or axis in 'rd')


def simulate_cpus(section: MeshSection, rows: int) -> str:
    """Makes the CPU, if it comes to that, as many devices as the mesh asks for, or one for two cores. Returns the reason.

    XLA shares out the work of a device over the cores; two devices update the same weights twice and wait for each other
    (docs/lab-notes.md has what was measured).
    """
    if 'xla_force_host_platform_device_count' in os.environ.get('XLA_FLAGS', ''):
        return 'no accelerator; as many as XLA_FLAGS says'
    if jax.distributed.is_initialized():
        return f'no accelerator; {jax.config.jax_num_cpu_devices} in each process'
    if 'JAX_NUM_CPU_DEVICES' in os.environ:
        return 'no accelerator; as many as JAX_NUM_CPU_DEVICES says'
    given = {axis: getattr(section, axis) for axis in AXES}
    asked = math.prod(size for size in given.values() if isinstance(size, int))
    free = 'auto' in (section.r, section.d)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    share = asked // math.prod(size for size in (section.c, section.t, section.p) if isinstance(size, int))
    fits = [n for n in range(1, max(cores // 2 // asked, 1) + 1) if rows % (share * n) == 0] if free else []
    count = asked * max(fits, default=1)
    try:
        jax.config.update('jax_num_cpu_devices', count)
    except RuntimeError:  # JAX is already running, in a program that uses pretrax as a library
        return 'no accelerator; JAX was already running with them'
    return f'no accelerator; one for two cores, of {cores}' if free else 'no accelerator; simulated, as the mesh asks'


def choose_compute(wanted: str, platform: str) -> tuple[Any, str]:
    """The dtype of matrix products and the reason."""
    import jax.numpy as jnp

    if wanted != 'auto':
        return {'bf16': jnp.bfloat16, 'f32': jnp.float32}[wanted], 'as configured'
    if platform != 'cpu':
        return jnp.bfloat16, f'{platform} multiplies bf16 fastest'
    flags = _cpu_flags()
    for flag in ('amx_bf16', 'avx512_bf16'):
        if flag in flags:
            return jnp.bfloat16, f'the processor multiplies bf16 ({flag})'
    return jnp.float32, 'the processor has no bf16 products'


def _cpu_flags() -> set[str]:
    info = pathlib.Path('/proc/cpuinfo')
    text = info.read_text() if info.exists() else ''
    return set(next((line for line in text.splitlines() if line.startswith('flags')), '').split())
