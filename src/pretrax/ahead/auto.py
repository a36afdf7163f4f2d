"""`mesh: auto` and `batch.micro: auto`: numbers for them, and why, before a run begins.

A mesh is what `pretrax plan` finds fastest among those that fit. A micro-batch is measured on the devices that will run it
(`measure.py`); where nothing can be measured, because they are not here or several processes would have to agree, it is
planned too. A run that goes on keeps what it began with, so that its numbers do not change. What was chosen stands in the
resolved configuration, with the reason as its origin.
"""

import dataclasses
import pathlib
from typing import Any

import jax

from pretrax.ahead.plan import Choice, Planner
from pretrax.config import RunConfig, diff, is_harmless, load, resolve_mesh, settle
from pretrax.config.batch import n_sequences
from pretrax.errors import Report, UserError
from pretrax.run.devices import simulate_cpus
from pretrax.run.micro_batch import measured_micro
from pretrax.run.placement import n_slices
from pretrax.run.processes import join_processes
from pretrax.scale.devices import Device, lookup
from pretrax.scale.memory import memory_here, size
from pretrax.scale.topology import Topology


@dataclasses.dataclass(frozen=True)
class Here:
    """The devices that are here, as far as a plan goes."""

    platform: str
    device: Device
    memory: int
    n_devices: int
    slices: int

    def __str__(self) -> str:
        return f'{self.n_devices} x {self.device.name}, here'


def settled(config: RunConfig, say: Report, topology: Topology | None = None) -> RunConfig:
    """The configuration with a number for each `auto` of `mesh:` and `batch.micro`; the choices are said.

    Args:
        config: as it was read.
        say: told what was chosen and why.
        topology: hardware that is not here; None: the devices that are.

    Raises:
        UserError: nothing fits.
    """
    if not config.mesh.is_planned and config.batch.micro != 'auto':
        return config
    hardware: Topology | Here | None = topology
    if topology is None:
        join_processes(config)
        if jax.distributed.is_initialized() and jax.process_index():
            say = lambda text: None  # noqa: E731 - the first process speaks
        simulate_cpus(config.mesh.plain(), n_sequences(config.batch))
        if (before := _as_it_began(config, len(jax.devices()))) is not None:
            return _told(before, say)
        hardware = _here()
    if config.mesh.is_planned:
        config = _with_mesh(config, hardware)
    if config.batch.micro == 'auto':
        config = _with_micro(config, hardware, say, is_here=topology is None)
    return _told(config, say)


def _told(config: RunConfig, say: Report) -> RunConfig:
    for key in ('mesh', 'batch.micro'):
        origin = config.origins.get(tuple(key.split('.')), '')
        if origin.startswith('auto'):
            mesh = ' '.join(f'{axis}={n}' for axis, n in config.mesh.model_dump().items() if n != 1)
            say(f'{key}: {config.batch.micro if key == "batch.micro" else mesh or "one device"} ({origin})')
    return config


def _as_it_began(config: RunConfig, n_devices: int) -> RunConfig | None:
    """With the numbers that this run was begun with, if it was begun with this configuration on as many devices."""
    path = pathlib.Path(config.run_dir) / 'config.yaml'
    if not path.is_file():
        return None
    try:
        began = load(path)
        changes: dict[str, Any] = {'origin': 'auto: as this run began'}
        if config.mesh.is_planned:
            changes['mesh'] = resolve_mesh(began.mesh, n_devices, jax.default_backend())
        if config.batch.micro == 'auto':
            changes['micro'] = began.batch.micro
        config = settle(config, **changes)
    except UserError:  # not readable, or of other devices: as if there were none; `train` says what else is wrong
        return None
    return config if all(is_harmless(key) for key, _, _ in diff(began, config)) else None


def _here() -> Here | None:
    """The devices that are here; None: the plan knows too little of them (a CPU, a device that is not in its tables)."""
    devices = jax.devices()
    device = lookup(devices[0].device_kind)
    memory = memory_here(jax.local_devices()[0])
    if device is None or device.bandwidth is None or memory is None:
        return None
    return Here(devices[0].platform, device, memory, len(devices), n_slices(devices))


def _with_mesh(config: RunConfig, hardware: Topology | Here | None) -> RunConfig:
    """The mesh of the fastest way that fits; of its micro-batch too, if that is to be chosen and cannot be measured."""
    if hardware is None:
        sizes = resolve_mesh(config.mesh.plain(), len(jax.devices()), jax.default_backend())
        return settle(config, mesh=sizes, origin='auto: as mesh: {} does, since the plan knows nothing of this device')
    planner = Planner(config, hardware, lambda text: None)
    only = {axis: n for axis, n in config.mesh.model_dump().items() if n != 'auto' and axis != 'c'}
    best = _best(planner, only, config)
    return settle(config, mesh=best.mesh, origin=f'auto: {_why(best, hardware)}')


def _best(planner: Planner, only: dict[str, int], config: RunConfig) -> Choice:
    """The fastest way that fits and has what is configured."""
    every = planner.search((planner.save,), only)
    micro = config.batch.micro
    fits = [one for one in planner.fitting(every) if micro in ('auto', None) or one.micro == micro]
    if fits:
        return fits[0]
    least = min((one.memory.total for one in every), default=None)
    raise UserError(
        f'mesh and batch.micro: none of {len(every)} ways fits {planner.hardware}'
        + (f'; the smallest takes {size(least)} of {size(planner.hardware.memory)}' if least else '')
        + '\nuse more devices, model.save=none, a smaller batch.sequence_length, or optimizer.name=lion'
    )


def _why(choice: Choice, hardware: Topology | Here) -> str:
    prediction = choice.prediction
    return (
        f'planned, {prediction.seconds:.3g} s a step, MFU {prediction.mfu:.0%}, limited by {prediction.bound}, '
        f'{size(choice.memory.total)} of {size(hardware.memory)}'
    )


def _with_micro(config: RunConfig, hardware: Topology | Here | None, say: Report, is_here: bool) -> RunConfig:
    if is_here and jax.process_count() == 1:
        micro, why = measured_micro(config, say)
        return settle(config, micro=micro, origin=f'auto: {why}')
    if hardware is None:
        return settle(config, micro=None, origin='auto: all at once, as several processes do not measure')
    planner = Planner(config, hardware, lambda text: None)
    mesh = resolve_mesh(config.mesh, hardware.n_devices, hardware.platform, hardware.slices)
    best = _best(planner, mesh, config)
    return settle(config, micro=best.micro, origin=f'auto: {_why(best, hardware)}')
