"""Compiles the program that `pretrax train` runs, also for hardware that is not in this machine."""

import dataclasses
import re
import time
from typing import Any

import jax

from pretrax.config import RunConfig
from pretrax.cost.links import places_of
from pretrax.cost.memory import memory_of
from pretrax.cost.topology import Topology
from pretrax.errors import Report
from pretrax.hlo.schedule import Schedule, read_schedule
from pretrax.observe.device_memory import bytes_per_device
from pretrax.plan.absent_devices import absent_devices
from pretrax.run.compiled_step import lower_step
from pretrax.run.devices import device_memory
from pretrax.run.processes import join_processes
from pretrax.run.setup import Run, prepare


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A step that was compiled, or that does not fit."""

    run: Run  # the run that `train` would prepare
    topology: Topology | None  # the hardware; None: the devices of this machine
    lowered: Any  # the program before XLA's optimizations
    compiled: Any | None  # the executable; None: it does not fit
    seconds: tuple[float, float]  # for tracing, for compiling
    needed: int  # bytes per device; if it does not fit, as the compiler reports them
    limit: int | None  # bytes that a device has; None: unknown

    @property
    def fits(self) -> bool:
        return self.compiled is not None and (self.limit is None or self.needed <= self.limit)


def compile_ahead(config: RunConfig, topology: Topology | None, say: Report) -> PlannedStep:
    """Prepares a run as `train` does, and compiles its step.

    Raises:
        UserError: the configuration does not fit the data, the model or the devices; the plugin for the hardware is
            missing; or an option of XLA cannot be used.
    """
    if topology is None:
        join_processes(config.processes, config.run_dir, config.faults.heartbeat_seconds)
    run = prepare(config, say, None if topology is None else absent_devices(topology))
    options = run.compiler_options.values
    limit = topology.memory if topology else device_memory(run.mesh.devices.flat[0])
    with jax.set_mesh(run.mesh):
        began = time.perf_counter()
        lowered = lower_step(run)
        traced = time.perf_counter()
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if (temporaries := _temporaries_in(str(error))) is None:
                raise
            needed = temporaries + bytes_held(run.like)
            return PlannedStep(
                run, topology, lowered, None, (traced - began, time.perf_counter() - traced), needed=needed, limit=limit
            )
    seconds = traced - began, time.perf_counter() - traced
    return PlannedStep(run, topology, lowered, compiled, seconds=seconds, needed=memory_of(compiled), limit=limit)


def schedule_of(planned: PlannedStep) -> Schedule | None:
    """The communication of a compiled step; None: it was not compiled, or for devices of this machine."""
    if planned.compiled is None or planned.topology is None:
        return None
    mesh, text = planned.run.mesh, planned.compiled.as_text()
    return read_schedule(text, dict(mesh.shape), planned.topology, places_of(mesh.devices.flat))


def bytes_held(arrays: Any) -> int:
    """Bytes per device of arrays with shardings."""
    return sum(map(bytes_per_device, jax.tree.leaves(arrays)))


def _temporaries_in(text: str) -> int | None:
    """Bytes of temporaries in XLA's error for a program that is too large for a TPU; None: another error.

    XLA compiles such programs for GPUs without an error.
    """
    found = re.search(r'HLO temporaries \(([\d.]+[KMGT]?)\) exceeds', text)
    return _bytes(found[1]) if found else None


def _bytes(text: str) -> int:
    number, unit = re.fullmatch(r'([\d.]+)([KMGT]?)', text.rstrip('B')).groups()  # type: ignore[union-attr]
    return int(float(number) * 1024 ** ' KMGT'.index(unit or ' '))
