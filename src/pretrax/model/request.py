"""The facts of a run that a model is built from."""

import dataclasses
from typing import Literal

from jax.typing import DTypeLike

from pretrax.model.numerics import EXEMPT, Kind

# The dtype in which gradients are summed over r and d: bf16 over r only, or over both
Reduction = Literal['f32', 'bf16', 'bf16_r_d']


@dataclasses.dataclass(frozen=True)
class ModelRequest:
    """The facts of a run that a model is built from."""

    vocab_size: int
    sequence_length: int
    documents_per_row: int | None  # an upper bound; None: unknown
    dtype: DTypeLike  # compute dtype
    platform: str  # of the devices
    mesh: dict[str, int]  # the size of each axis
    micro_batches: int = 1  # per device and step, for pipeline stages
    device_kind: str = ''
    slices: int = 1  # TPU slices, or nodes of GPUs, that the mesh spans
    matmul: Kind = 'compute'  # `precision.matmul`
    exempt: tuple[str, ...] = EXEMPT  # `precision.exempt`
    reduction: Reduction = 'f32'  # `precision.reduction`
    qk_clip: float | None = None  # the attention logit above which QK clip acts; None: it does not
    host_memory: bool = False  # whether the devices have pinned host memory
    longest_sequence: int | None = None  # of the run, for which learned positions are made; None: sequence_length
    largest_token: int | None = None  # of the data; None: the last one of the vocabulary

    @property
    def longest(self) -> int:
        return self.longest_sequence or self.sequence_length
