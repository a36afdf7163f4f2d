"""The training step compiled ahead of time: the very program that `pretrax train` runs, for hardware that need not be here."""

import dataclasses
import re
import time
from typing import Any

import jax

from ..config import RunConfig
from ..scale.topology import Topology, absent_devices
from ..train.setup import Run, Say, prepare
from ..train.step import make_step


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One of the largest buffers of a program that does not fit: bytes, shape, and the operation it belongs to."""

    bytes: int
    shape: str
    operation: str


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
        largest: buffers of a program that does not fit.
    """

    run: Run
    topology: Topology | None
    lowered: Any
    compiled: Any | None
    seconds: tuple[float, float]
    needed: int
    limit: int | None
    largest: tuple[Allocation, ...] = ()

    @property
    def fits(self) -> bool:
        return self.compiled is not None and (self.limit is None or self.needed <= self.limit)


def compile_ahead(config: RunConfig, topology: Topology | None, say: Say) -> Ahead:
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
            if 'memory' not in str(error):
                raise
            needed, largest = _said_of_memory(str(error))
            return Ahead(
                run, topology, lowered, None, (traced - began, time.perf_counter() - traced), needed, limit, largest
            )
    seconds = traced - began, time.perf_counter() - traced
    return Ahead(run, topology, lowered, compiled, seconds, memory_of(compiled), limit)


def memory_of(compiled: Any) -> int:
    """Bytes that a compiled step takes on each device while it runs: arguments, temporaries, the program, and results that
    do not take the place of an argument."""
    stats = compiled.memory_analysis()
    results = 0 if _on_tpu(compiled) else stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + temporaries_of(compiled) + results + stats.generated_code_size_in_bytes


def temporaries_of(compiled: Any) -> int:
    """Bytes of temporaries. libtpu counts all results among them, those that take the place of an argument too."""
    stats = compiled.memory_analysis()
    return stats.temp_size_in_bytes - (stats.alias_size_in_bytes if _on_tpu(compiled) else 0)


def _on_tpu(compiled: Any) -> bool:
    return all(device.platform == 'tpu' for device in jax.tree.leaves(compiled.input_shardings)[0].device_set)


def memory_here(device: Any) -> int | None:
    """Bytes that a program may take of a device that is here; None: it does not say."""
    return (device.memory_stats() or {}).get('bytes_limit') if device.platform != 'cpu' else None


def _said_of_memory(text: str) -> tuple[int, tuple[Allocation, ...]]:
    """From XLA's report for TPUs: how much would be used, and the largest allocations."""
    used = re.search(r'Used ([\d.]+[KMGT]?) of', text) or re.search(r'usage >= ([\d.]+[KMGT]?)', text)
    largest = []
    for part in re.split(r'\n\s*\d+\. Size: ', text)[1:]:
        shape = re.search(r'Shape: (\w+\[[\d,]*\])', part)
        name = re.search(r'op_name="([^"]*)"', part)
        largest.append(Allocation(_bytes(part.split()[0]), shape[1] if shape else '', name[1] if name else ''))
    return _bytes(used[1]) if used else 0, tuple(largest)


def _bytes(text: str) -> int:
    number, unit = re.fullmatch(r'([\d.]+)([KMGT]?)', text.rstrip('B')).groups()  # type: ignore[union-attr]
    return int(float(number) * 1024 ** ' KMGT'.index(unit or ' '))
