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
    """The cost of an optimizer's update per device and step: see `train/update_cost.py`.

    Attributes:
        state: bytes of the optimizer's state, and of a moving average of the weights.
        copied: bytes of the state that XLA for CPUs copies before it updates the weights.
        traffic: bytes that it reads and writes, without the work on whole matrices.
        flops: FLOPs of the products of whole matrices.
        precision: of these products: 'f32', 'bf16' or 'highest'.
        matrices: bytes that the work on whole matrices reads and writes.
        exchanges: between slices and whole matrices.
    """

    state: float = 0.0
    copied: float = 0.0
    traffic: float = 0.0
    flops: float = 0.0
    precision: str = 'f32'
    matrices: float = 0.0
    exchanges: tuple[Exchange, ...] = ()


@dataclasses.dataclass(frozen=True)
class EightBits:
    """Products in eight bits: see `cost/eight_bits.py`.

    Attributes:
        kind: 'int8', 'fp8', 'mxfp8' or 'nvfp4'.
        params: parameters of layers that a token multiplies in eight bits.
        values: per token, the inputs of these products, twice, and their results: what the forward and the backward
            pass round.
        head: parameters of the unembedding; 0: its product is in the compute dtype.
        experts: those of `params` that belong to experts.
    """

    kind: str
    params: float
    values: float
    head: float
    experts: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """How a training step runs on a mesh.

    Attributes:
        mesh: size of each mesh axis, 1 if missing. `d`, `t` and `p` shard the weights, `e` those of experts, `r`, `d`
            and `e` the batch, `c` the sequence.
        tokens: tokens of one forward pass over the whole mesh (with accumulation: of one micro-batch, not of the
            batch).
        platform: 'tpu', 'cuda' or 'cpu'.
        compute: dtype of matrix products.
        eight_bits: the products in eight bits; None: none.
        update: what the optimizer's update costs.
        in_host: parts of the state that are in host memory between steps: 'optimizer' and 'weights'.
        saved: names of values to 'keep' for the backward pass, or to 'offload' to host memory; it recomputes the
            others. None: all are kept.
        unrolled: the program contains every layer, instead of a loop over them.
        passes: forward and backward passes per step whose gradients are summed.
        rounds: chunks of layers per stage of a pipeline (`p` > 1).
        micro_batches: passes per step that a pipeline overlaps, each of `tokens`.
        inputs: inputs of chunks that a stage of a pipeline keeps at the same time in the schedule 1f1b; None:
            interleaved.
        reduction: dtype in which gradients are summed over `r` and `d`: `model.request.Reduction`.
        loss_chunks: parts of a sequence whose logits exist one after the other.
        batch_parts: parts of a device's sequences in each layer.
        context: how attention treats sequences that are sharded over c: 'all_to_all' or 'ring'.
        teacher: the decoder of a teacher that runs forward in each pass; None: there is none.
        kept_states: layers of the teacher whose hidden states the student learns.
        probabilities: attention probabilities of a head that a token keeps for the backward pass, on average; 0: none,
            since the kernel computes them again.
        clips_logits: QK clip computes the largest logit of every head: see `model/qk_clip.py`.
    """

    mesh: Mapping[str, int]
    tokens: int
    platform: str = 'tpu'
    compute: ComputeDtype = 'bf16'
    eight_bits: EightBits | None = None
    update: UpdateCost = UpdateCost()
    in_host: tuple[str, ...] = ()
    saved: Mapping[str, Any] | None = None
    unrolled: bool = False
    passes: int = 1
    rounds: int = 1
    micro_batches: int = 1
    inputs: int | None = None
    loss_chunks: int = 1
    batch_parts: int = 1
    reduction: Literal['f32', 'bf16', 'bf16_r_d'] = 'f32'
    context: str = 'all_to_all'
    teacher: Architecture | None = None
    kept_states: int = 0
    probabilities: float = 0.0
    clips_logits: bool = False

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
