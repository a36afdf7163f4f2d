"""The machines that a run is meant for, which may not be this one. Imports no JAX."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The devices of a run, as far as its configuration has to fit them."""

    count: int  # of all processes; 0: not known yet
    platform: str  # as JAX names it: 'cpu', 'gpu' or 'tpu'
    kind: str = ''  # as JAX names it, such as 'NVIDIA H100 80GB HBM3'; '': not known
    capability: str = ''  # compute capability of an NVIDIA GPU, such as '9.0'; '': not known
    slices: int = 1  # TPU slices, or nodes of GPUs
    host_memory: bool = True  # whether the devices can read the memory of their host


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(Hardware):
    """The machines that `pretrax launch` starts a run on, and their devices."""

    has_these_files: bool = True  # whether they have the files and packages of this machine. Containers have their own.
    # Names of the variables that their processes get; None: those of this environment
    variables: tuple[str, ...] | None = None
