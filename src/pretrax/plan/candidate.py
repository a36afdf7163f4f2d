"""The candidates of a plan: the values that a search chooses, and what it found with them."""

import dataclasses
import shlex
from typing import Any

from pretrax.amounts import size
from pretrax.cost.memory import Memory, shards_on_hosts
from pretrax.cost.roofline import Prediction
from pretrax.plan.compiled_facts import CompiledFact
from pretrax.plan.layouts import sizes_of

HOST_GAIN = 0.05  # what activations or state in host memory must gain: their transfers were never measured


@dataclasses.dataclass(frozen=True)
class Choice:
    """Values of a configuration that a search chooses."""

    mesh: dict[str, int]  # size of each axis
    micro: int  # sequences per device and pass
    save: Any  # what the backward pass keeps, as in `model.save`
    parts: int = 1  # parts of the sequences of a device in each layer, as in `model.batch_parts`
    offload: tuple[str, ...] = ()  # parts of the state in host memory, as in `memory.offload`

    def values(self) -> dict[str, dict[str, Any]]:
        """Its configuration values, by section."""
        axes = {axis: n for axis, n in self.mesh.items() if n > 1 or axis == 'd'}
        parts = {'batch_parts': self.parts} if self.parts > 1 else {}
        values = {'mesh': axes, 'batch': {'micro': self.micro}, 'model': {'save': self.save} | parts}
        return values | ({'memory': {'offload': list(self.offload)}} if self.offload else {})

    def written(self) -> str:
        """Its key=value arguments for a shell."""
        pairs = [f'{section}.{key}={value}' for section, keys in self.values().items() for key, value in keys.items()]
        return ' '.join(shlex.quote(pair.replace("'", '')) for pair in pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate(Choice):
    """A choice with its prediction."""

    memory: Memory
    prediction: Prediction
    compiled: CompiledFact | None = None  # what the compiler said earlier of this step; None: it was not compiled

    @property
    def needed(self) -> int:
        """Bytes per device: the compiler's, or those of the formula."""
        return self.compiled.needed if self.compiled else self.memory.total

    def state_of_machine(self, devices: int) -> int:
        """Bytes that a machine with this number of devices writes of a checkpoint; replicas write nothing."""
        return shards_on_hosts(self.mesh, devices)[1] * self.memory.snapshot

    @property
    def rank(self) -> float:
        """Seconds of a step, to compare candidates. Those that use host memory must be clearly faster."""
        activations = isinstance(self.save, dict) and 'offload' in self.save.values()
        return self.prediction.seconds * (1 + HOST_GAIN * (activations + bool(self.offload)))


@dataclasses.dataclass(frozen=True)
class Search:
    """The candidates that a search tried."""

    found: list[Candidate]  # those that fit, fastest first
    tried: list[tuple[dict[str, int], int]]  # every combination of a mesh and a micro-batch
    # Values of `model.save` and `memory.offload` that were tried with each, until one fits
    ways: list[tuple[Any, tuple[str, ...]]]
    least: Candidate | None  # the candidate that needs the least memory; None: no mesh is possible
    room: float  # bytes per device that a candidate may fill

    def why_none(self) -> list[str]:
        """The lines that say that nothing fits, what was tried, and what to change."""
        fix = 'use more devices, a smaller batch.sequence_length, or optimizer.name=lion'
        if self.least is None:
            return ['nothing was tried: no mesh shards the batch evenly and is possible for the model', fix]
        micros = ','.join(map(str, sorted({micro for _, micro in self.tried})))
        saves = ','.join(dict.fromkeys(str(save).replace("'", '') for save, _ in self.ways))
        offloads = ','.join(dict.fromkeys(f'[{",".join(offload)}]' for _, offload in self.ways))
        meshes = sizes_of([mesh for mesh, _ in self.tried])
        return [
            f'none of {len(self.tried)} candidates fits',
            f'tried: {meshes} batch.micro={micros} model.save={saves} memory.offload={offloads}',
            f'the smallest needs {size(self.least.needed)} of {size(self.room)}: {self.least.written()}',
            fix,
        ]
