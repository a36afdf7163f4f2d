"""What a model is told of the run when it is built."""

import dataclasses
from typing import Any

from pretrax.model.numerics import EXEMPT, Kind


@dataclasses.dataclass(frozen=True)
class ModelRequest:
    """What a model is told when it is built."""

    vocab_size: int
    sequence_length: int
    documents_per_row: int | None
    dtype: Any  # compute dtype
    platform: str  # of the devices
    mesh: dict[str, int]
    micro_batches: int = 1  # in which a model of several stages takes the rows of a device
    device_kind: str = ''
    matmul: Kind = 'compute'  # `precision.matmul`
    exempt: tuple[str, ...] = EXEMPT  # `precision.exempt`
    host_memory: bool = False  # that the devices can reach
