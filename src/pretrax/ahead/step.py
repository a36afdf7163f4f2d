"""The training step compiled ahead of time: the very program that `pretrax train` runs, for hardware that need not be here."""

import dataclasses
import math
import re
import time
from typing import Any

import jax

from pretrax.config import RunConfig
from pretrax.errors import Report
from pretrax.run.setup import Run, prepare
from pretrax.scale.memory import memory_here, memory_of
from pretrax.scale.topology import Topology, absent_devices
from pretrax.train.step import make_step


@dataclasses.dataclass(frozen=True)
class Ahead:
    """A step compiled for a topology, or the reason why it does not fit.

    Attributes:
        run: what `train` would prepare.
        topology: the hardware; None: the devices that are here.
        lowered: the program before XLA's passes.
        compiled: the executable; None: it needs more memory than there is.
        seconds: of tracing, of compiling.
        needed: bytes a device; of a program that does not fit, what the compiler says it would take.
        limit: bytes that a device has; None: not known.
    """

    run: Run
    topology: Topology | None
    lowered: Any
    compiled: Any | None
    seconds: tuple[float, float]
    needed: int
    limit: int | None

    @property
    def fits(self) -> bool:
        return self.compiled is not None and (self.limit is None or self.needed <= self.limit)


def compile_ahead(config: RunConfig, topology: Topology | None, say: Report) -> Ahead:
    """Prepares a run as `train` does, and compiles its step.

    Raises:
        UserError: the configuration does not fit itself or the devices, or the plugin for the hardware is missing.
    """
    run = prepare(config, say, None if topology is None else absent_devices(topology))
    limit = topology.memory if topology else memory_here(run.mesh.devices.flat[0])
    with jax.set_mesh(run.mesh):
        began = time.perf_counter()
        lowered = make_step(run.recipe).lower(run.like, run.abstract_batch())
        traced = time.perf_counter()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if (temporaries := _temporaries_said(str(error))) is None:
                raise
            needed = temporaries + bytes_held(run.like)
            return Ahead(run, topology, lowered, None, (traced - began, time.perf_counter() - traced), needed, limit)
    seconds = traced - began, time.perf_counter() - traced
    return Ahead(run, topology, lowered, compiled, seconds, memory_of(compiled), limit)


def bytes_held(arrays: Any) -> int:
    """Of arrays with shardings, on one device."""
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(arrays))


def _temporaries_said(text: str) -> int | None:
    """Of XLA's error about a program that no TPU's memory holds; None: another error. For GPUs XLA compiles such programs."""
    told = re.search(r'HLO temporaries \(([\d.]+[KMGT]?)\) exceeds', text)
    return _bytes(told[1]) if told else None


def _bytes(text: str) -> int:
    number, unit = re.fullmatch(r'([\d.]+)([KMGT]?)', text.rstrip('B')).groups()  # type: ignore[union-attr]
    return int(float(number) * 1024 ** ' KMGT'.index(unit or ' '))
