"""Replaces `mesh: auto` and `batch.micro: auto` with numbers before a run begins.

The mesh is the fastest that fits according to `pretrax plan`, with its micro-batch if `batch.micro` is null. If that is
`auto`, it is measured on this machine's devices (`run/micro_batch.py`). If it cannot be measured, because the devices
are not in this machine or several processes would have to agree, it is planned too. A resumed run keeps its numbers.
The resolved configuration contains the chosen numbers, with the reason as their origin.
"""

import dataclasses
from typing import Any

import jax

from pretrax.amounts import size
from pretrax.config import RunConfig, diff, may_change_on_resume, read_resolved, resolve_mesh, settle
from pretrax.config.batch import common_sequences
from pretrax.cost.topology import Topology, topology_of
from pretrax.errors import Report, UserError
from pretrax.plan.candidate import Candidate
from pretrax.plan.plan import Planner
from pretrax.run.devices import available_devices, device_memory, simulate_cpus
from pretrax.run.micro_batch import measured_micro
from pretrax.run.processes import join_processes


@dataclasses.dataclass(frozen=True)
class Here(Topology):
    """The devices of this machine, as hardware of a plan: its driver may report less memory than the table has."""

    reported: int = 0  # bytes per device

    @property
    def memory(self) -> int:
        return self.reported

    def __str__(self) -> str:
        return f'{self.n_devices} x {self.device.name} in this machine'


def settled(config: RunConfig, say: Report, topology: Topology | None = None) -> RunConfig:
    """The configuration with a number for each `auto` in `mesh:` and `batch.micro`.

    Args:
        topology: hardware that is not in this machine; None: the devices of this machine.

    Raises:
        UserError: nothing fits.
    """
    if not config.mesh.is_planned and config.batch.micro != 'auto':
        return config
    hardware: Topology | None = topology
    if topology is None:
        join_processes(config.processes, config.run_dir, config.faults.heartbeat_seconds)
        if jax.distributed.is_initialized() and jax.process_index():
            say = lambda text: None  # noqa: E731 - only process 0 reports
        simulate_cpus(config.mesh.plain(), common_sequences(config.batch))
        if (before := _as_it_began(config, len(available_devices()))) is not None:
            return _report(before, say)
        hardware = _here()
    if config.mesh.is_planned:
        config = _with_mesh(config, hardware)
    if config.batch.micro == 'auto':
        config = _with_micro(config, hardware, say, is_here=topology is None)
    return _report(config, say)


def _report(config: RunConfig, say: Report) -> RunConfig:
    for key in ('mesh', 'batch.micro'):
        origin = config.origins.get(tuple(key.split('.')), '')
        if origin.startswith('auto'):
            mesh = ' '.join(f'{axis}={n}' for axis, n in config.mesh.model_dump().items() if n != 1)
            say(f'{key}: {config.batch.micro if key == "batch.micro" else mesh or "one device"} ({origin})')
    return config


def _as_it_began(config: RunConfig, n_devices: int) -> RunConfig | None:
    """The configuration with the numbers of the run that it resumes; None if that differs or has other devices."""
    path = config.run_dir / 'config.yaml'
    if not path.is_file():
        return None
    try:
        began = read_resolved(path)
        changes: dict[str, Any] = {'origin': 'auto: as at the start of this run'}
        if config.mesh.is_planned:
            changes['mesh'] = resolve_mesh(began.mesh, n_devices, jax.default_backend())
        planned = config.mesh.is_planned and config.batch.micro is None and began.batch.micro is not None
        if planned or config.batch.micro == 'auto':
            changes['micro'] = began.batch.micro
        config = settle(config, **changes)
    except UserError:  # unreadable, or for other devices: `train` reports what is wrong
        return None
    return config if all(may_change_on_resume(key) for key, _, _ in diff(began, config)) else None


def _here() -> Here | None:
    """The devices of this machine; None if the plan does not know them:
    CPUs, devices that are not in its tables, and parts of a slice.
    """
    devices = jax.devices()
    topology, memory = topology_of(devices), device_memory(jax.local_devices()[0])
    if topology is None or memory is None:
        return None
    return Here(**vars(topology), reported=memory)


def _with_mesh(config: RunConfig, hardware: Topology | None) -> RunConfig:
    """Replaces `auto` in the mesh with the sizes of the fastest candidate that fits, whose micro-batch the run has if
    none is given.
    """
    if hardware is None:
        sizes = resolve_mesh(config.mesh.plain(), len(jax.devices()), jax.default_backend())
        return settle(config, mesh=sizes, origin='auto: the default, since the plan does not know this device')
    planner = Planner(config, hardware, lambda text: None)
    only = {axis: n for axis, n in config.mesh.model_dump().items() if n != 'auto'}
    best = _best(planner, only, config)
    micro = best.micro if config.batch.micro is None else 'as it is'
    return settle(config, mesh=best.mesh, micro=micro, origin=f'auto: {_why(best, hardware)}')


def _best(planner: Planner, only: dict[str, int], config: RunConfig) -> Candidate:
    """The fastest candidate that fits and has the configured micro-batch."""
    micro = config.batch.micro
    search = planner.search((planner.save,), only, micro if isinstance(micro, int) else None)
    if search.found:
        return search.found[0]
    why, *more, fix = search.why_none()
    if found := planner.search(only=only).found:
        fix = f'use {found[0].written()}, which is predicted to fit'
    raise UserError('\n'.join([f'mesh and batch.micro: {why} {planner.hardware}', *more, fix]))


def _why(candidate: Candidate, hardware: Topology) -> str:
    prediction = candidate.prediction
    return (
        f'planned, {prediction.seconds:.3g} s per step, MFU {prediction.mfu:.0%}, limited by {prediction.bound}, '
        f'{size(candidate.memory.total)} of {size(hardware.memory)}'
    )


def _with_micro(config: RunConfig, hardware: Topology | None, say: Report, is_here: bool) -> RunConfig:
    if is_here and jax.process_count() == 1:
        micro, why = measured_micro(config, say)
        return settle(config, micro=micro, origin=f'auto: {why}')
    if hardware is None:
        return settle(config, micro=None, origin='auto: the whole batch, since several processes cannot measure')
    planner = Planner(config, hardware, lambda text: None)
    mesh = resolve_mesh(config.mesh, hardware.n_devices, hardware.platform, hardware.slices)
    best = _best(planner, mesh, config)
    return settle(config, micro=best.micro, origin=f'auto: {_why(best, hardware)}')
