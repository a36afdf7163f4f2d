"""Facts of a training step that its memory and time depend on, besides the architecture."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from pretrax.model.architecture import Architecture

BYTES = {'f32': 4, 'bf16': 2, 'fp16': 2}
ComputeDtype = Literal['bf16', 'fp16', 'f32']  # of matrix products; the two of 16 bits are equally fast


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives over some mesh axes: `hlo.parse.Collective.bytes` of all of them."""

    kind: str  # one of `hlo.parse.KINDS`
    axes: tuple[str, ...]
    bytes: float


@dataclasses.dataclass(frozen=True)
class UpdateCost:
    """The cost of an optimizer's update per device and step: see `train/update_cost.py`."""

    state: float = 0.0  # bytes of the optimizer's state, and of a moving average of the weights
    copied: float = 0.0  # bytes of the state that XLA for CPUs copies before it updates the weights
    traffic: float = 0.0  # bytes that it reads and writes, without the work on whole matrices
    flops: float = 0.0  # FLOPs of the products of whole matrices
    precision: str = 'f32'  # dtype of these products: 'f32', 'bf16' or 'highest'
    matrices: float = 0.0  # bytes that the work on whole matrices reads and writes
    exchanges: tuple[Exchange, ...] = ()  # between slices and whole matrices


@dataclasses.dataclass(frozen=True)
class EightBits:
    """Products in eight bits: see `cost/eight_bits.py`."""

    kind: str  # 'int8', 'fp8', 'mxfp8' or 'nvfp4'
    params: float  # parameters of layers that a token multiplies in eight bits
    # Per token, the inputs of these products, twice, and their results: what the forward and the backward pass round
    values: float
    head: float  # parameters of the unembedding; 0: its product is in the compute dtype
    experts: float = 0.0  # those of `params` that belong to experts


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """How a training step runs on a mesh."""

    # Size of each mesh axis, 1 if missing. `d`, `t` and `p` shard the weights, `e` those of experts, `r`, `d` and `e`
    # the batch, `c` the sequence.
    mesh: Mapping[str, int]
    # Tokens of one forward pass over the whole mesh (with accumulation: of one micro-batch, not of the batch)
    tokens: int
    platform: str = 'tpu'  # 'tpu', 'cuda' or 'cpu'
    compute: ComputeDtype = 'bf16'  # dtype of matrix products
    eight_bits: EightBits | None = None  # the products in eight bits; None: none
    update: UpdateCost = UpdateCost()  # what the optimizer's update costs
    in_host: tuple[str, ...] = ()  # parts of the state that are in host memory between steps: 'optimizer' and 'weights'
    # Names of values to 'keep' for the backward pass, or to 'offload' to host memory; it recomputes the others. None:
    # all are kept.
    saved: Mapping[str, Any] | None = None
    unrolled: bool = False  # the program contains every layer, instead of a loop over them
    passes: int = 1  # forward and backward passes per step whose gradients are summed
    rounds: int = 1  # chunks of layers per stage of a pipeline (`p` > 1)
    micro_batches: int = 1  # passes per step that a pipeline overlaps, each of `tokens`
    # Inputs of chunks that a stage of a pipeline keeps at the same time in the schedule 1f1b; None: interleaved
    inputs: int | None = None
    loss_chunks: int = 1  # parts of a sequence whose logits exist one after the other
    batch_parts: int = 1  # parts of a device's sequences in each layer
    # Dtype in which gradients are summed over `r` and `d`: `model.request.Reduction`
    reduction: Literal['f32', 'bf16', 'bf16_r_d'] = 'f32'
    context: str = 'all_to_all'  # how attention treats sequences that are sharded over c: 'all_to_all' or 'ring'
    teacher: Architecture | None = None  # the decoder of a teacher that runs forward in each pass; None: there is none
    kept_states: int = 0  # layers of the teacher whose hidden states the student learns
    # Attention probabilities of a head that a token keeps for the backward pass, on average; 0: none, since the kernel
    # computes them again
    probabilities: float = 0.0
    clips_logits: bool = False  # QK clip computes the largest logit of every head: see `model/qk_clip.py`

    @property
    def recomputes(self) -> bool:
        """Whether layers run forward twice."""
        return self.saved == {} or self.inputs is not None

    @property
    def attends_twice(self) -> bool:
        """Whether the backward pass computes attention forward again, because its result was not kept."""
        dropped = self.saved is not None and self.saved.get('attention', 'recompute') == 'recompute'
        return dropped or self.recomputes

    @property
    def all_passes(self) -> int:
        """Forward and backward passes per step."""
        return self.passes * self.micro_batches
