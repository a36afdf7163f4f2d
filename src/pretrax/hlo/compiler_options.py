"""Options of XLA for the training step: which ones, on which hardware and mesh, why, and how that is known.

XLA's defaults suit small meshes and single devices. `choose_options` picks rows of `TABLE`; `run/compiler_options.py`
leaves out what the installed XLA does not know, and applies `compiler.options` of the configuration.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

from pretrax.cost.devices import lookup, tpus
from pretrax.tables import read_table

Value = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a choice depends on."""

    hardware: str  # version of a TPU, such as 'v5p'; 'gpu' for an NVIDIA GPU; otherwise the platform, such as 'cpu'
    mesh: Mapping[str, int]  # size of each mesh axis
    slices: int = 1  # TPU slices, or nodes of GPUs

    def __str__(self) -> str:
        several = ', '.join(f'{axis}={n}' for axis, n in self.mesh.items() if n > 1)
        return ', '.join(part for part in (self.hardware, several or 'one device') if part)


@dataclasses.dataclass(frozen=True)
class CompilerOption:
    """An option of XLA, and where it is set."""

    # name, value: as XLA has them
    name: str
    value: Value
    hardware: tuple[str, ...]  # versions of TPUs, 'gpu' or 'cpu'
    reason: str  # what it changes, in one sentence
    evidence: str  # what was measured by compiling, or the recipe that sets it
    axes: str = ''  # at least one of these mesh axes has several devices; '': any mesh
    slices: bool | None = None  # True: only for several slices or nodes; False: only for one; None: for any number

    def suits(self, situation: Situation) -> bool:
        """Whether the option is set there."""
        return (
            situation.hardware in self.hardware
            and (not self.axes or any(situation.mesh.get(axis, 1) > 1 for axis in self.axes))
            and self.slices in (None, situation.slices > 1)
        )

    def __str__(self) -> str:
        return f'{self.name}={written(self.value)}'

    def where(self) -> str:
        """The condition in words, such as 'v5p, v6e; d or e > 1'."""
        names = {'gpu': 'NVIDIA GPUs', 'cpu': 'CPUs'}
        parts = [', '.join(names.get(one, one) for one in self.hardware)]
        if self.axes:
            parts.append(f'{" or ".join(self.axes)} > 1')
        if self.slices is not None:
            parts.append('several slices or nodes' if self.slices else 'one slice or node')
        return '; '.join(parts)


TABLE = tuple(
    CompilerOption(name, value, **row | {'hardware': tuple(row['hardware'])})
    for row in read_table(Path(__file__).with_suffix('.yaml'))
    for name, value in row.pop('options').items()
)


def choose_options(situation: Situation) -> list[CompilerOption]:
    """The rows of `TABLE` for a run."""
    return [option for option in TABLE if option.suits(situation)]


def by_reason(options: Iterable[CompilerOption]) -> list[list[CompilerOption]]:
    """Neighboring options with the same condition, reason and evidence together."""
    return [list(group) for _, group in itertools.groupby(options, lambda one: (one.where(), one.reason, one.evidence))]


def written(value: Value) -> str:
    """A value as in YAML and in flags."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def hardware_of(platform: str, device_kind: str) -> str:
    """`Situation.hardware` of a JAX device."""
    if platform == 'tpu':
        device = lookup(device_kind)
        return next((version for version, tpu in tpus().items() if tpu.device == device), 'tpu')
    return 'gpu' if platform in ('gpu', 'cuda') else platform


def wrong_hardware(name: str, hardware: str) -> str | None:
    """Why an option has no effect on this hardware, or breaks the compiler; None: nothing is known against it.

    XLA accepts some of these without a word.
    """
    if any(row.name == name and hardware in row.hardware for row in TABLE):
        return None
    mine = 'tpu' if hardware in (*tpus(), 'tpu') else hardware
    platform = next((one for one in ('tpu', 'gpu', 'cpu') if name.startswith(f'xla_{one}_')), mine)
    if platform != mine:
        return f'it is for {platform.upper()}s'
    sparse_core = [version for version, tpu in tpus().items() if tpu.sparse_core]
    if ('sparse_core' in name or name.startswith('xla_sc_')) and hardware not in sparse_core:
        return f'it is for TPUs whose SparseCores run collectives: {", ".join(sparse_core)}'
    return None
