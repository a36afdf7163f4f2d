"""How a model runs on this mesh and these devices: everything that is chosen before the program is traced, and why."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike

from pretrax.errors import UserError
from pretrax.model.architecture import CHUNK, Architecture, LayerKind
from pretrax.model.attention_kernels import Kernel, choose_kernel
from pretrax.model.axes import along
from pretrax.model.choices import TransformerOptions
from pretrax.model.context import choose_context, kernel_for
from pretrax.model.families import SAVE_PRESETS, SAVED_NAMES
from pretrax.model.loss import check_loss_chunks
from pretrax.model.matmul import choose_grouped
from pretrax.model.numerics import UNIFORM, Numerics, choose_numerics, unsupported_experts
from pretrax.model.pipeline_schedule import PipelineSchedule, choose_schedule
from pretrax.model.request import ModelRequest, Reduction
from pretrax.model.routing import describe_routing
from pretrax.shardlib import Choice

ALL_NAMED: dict[str, Choice] = dict.fromkeys(SAVED_NAMES, 'keep')


@dataclasses.dataclass(frozen=True)
class ExecutionPlan:
    """How a model runs: kernels, number formats, memory and the pipeline."""

    kernel: Kernel = dataclasses.field(default=Kernel('blockwise', 'the default', None))
    context: str = 'all_to_all'  # how attention treats sequences that are sharded over c: 'all_to_all' or 'ring'
    grouped: str = 'blocks'  # method of the products of experts: 'blocks', 'runs' or 'ragged'
    numerics: Numerics = UNIFORM  # number formats of the matrix products
    unrolled: bool = False  # layers one after another in the program, not one layer in a loop
    saved: Mapping[str, Choice] | None = None  # what the backward pass keeps, by name; None: everything
    loss_chunks: int = 1  # parts of a sequence whose logits exist one at a time
    pipeline: PipelineSchedule | None = None  # None: no pipeline stages
    reduced_by_layer: bool = False  # in a step of one pass, the backward pass of a layer reduces its gradients
    reduction: Reduction = 'f32'  # the dtype in which gradients are summed over r and d
    batch_parts: int = 1  # of a device's sequences, in each layer
    global_kernel: Kernel | None = None  # of layers with heads of their own
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)  # topic -> what was chosen and why

    @property
    def saved_in_layers(self) -> Mapping[str, Choice] | None:
        """What the backward pass of a layer keeps.

        A pipeline stage that keeps only its input computes all its layers again at once, and keeps their activations.
        """
        return ALL_NAMED if self.pipeline and self.saved == {} else self.saved

    @property
    def wires(self) -> Mapping[str, DTypeLike]:
        """The dtype in which gradients are sent over a mesh axis, where it is not their own."""
        return {} if self.reduction == 'f32' else {'r': jnp.bfloat16}

    @property
    def sums(self) -> DTypeLike | None:
        """The dtype in which gradients of matrices are summed over d; None: f32."""
        return jnp.bfloat16 if self.reduction == 'bf16_r_d' else None

    @property
    def is_1f1b(self) -> bool:
        """Whether stages run backward while others run forward."""
        return self.pipeline is not None and self.pipeline.order == '1f1b'

    def kernel_of(self, kind: LayerKind) -> Kernel:
        """The attention kernel of a layer."""
        return self.global_kernel if kind.own_heads and self.global_kernel is not None else self.kernel

    def __str__(self) -> str:
        return '\n'.join(f'{topic}: {reason}' for topic, reason in self.reasons.items())


def choose_plan(
    options: TransformerOptions, request: ModelRequest, arch: Architecture, matrices: Sequence[Sequence[str]]
) -> ExecutionPlan:
    """Chooses how a decoder runs. `matrices` are the names of those of each layer.

    Raises:
        UserError: the options ask for something that cannot run on this mesh or these devices.
    """
    check_batch_parts(options.batch_parts, arch, request)
    mesh, length = request.mesh, request.sequence_length
    context, why_context = choose_context(options.attention.context, arch, mesh, length)

    def kernel_for_heads(d_query: int, d_value: int) -> Kernel:
        return choose_kernel(
            kernel_for(context, options.attention.kernel),
            request.platform,
            request.dtype,
            d_query,
            length,
            request.documents_per_row,
            arch.attention,
            d_value,
        )

    kernel, d_global = kernel_for_heads(arch.attention.d_query, arch.attention.d_head), arch.attention.global_d_head
    global_kernel = kernel_for_heads(d_global, d_global) if d_global else None
    unrolled, why_unrolled = choose_unrolled(options.layers, arch.n_layers, mesh)
    saved, why_saved = choose_saved(options.save, mesh, request.host_memory)
    loss_chunks = check_loss_chunks(options.loss_chunks, mesh, length)
    pipeline, why_pipeline = choose_schedule(
        options.pipeline.schedule,
        PipelineSchedule(mesh['p'], options.pipeline.rounds, request.micro_batches),
        arch,
        saved,
        length // along('c t', mesh) // loss_chunks,
    )
    widths = arch.d_model, arch.feed_forward.d_ff // mesh['t']
    grouped, why_grouped = choose_grouped(request.platform, request.dtype, *widths)
    numerics, why_numerics = choose_numerics(
        request.matmul,
        request.exempt,
        matrices,
        unsupported_experts(arch),
        mesh,
        request.platform,
        request.device_kind,
    )
    reduced_by_layer, why_reduced = choose_reduction(request.platform, request.device_kind, request.slices, pipeline)
    narrow = describe_sums(request.reduction, mesh)
    scaling = arch.rope.scaling
    reasons = {
        **({'attention': str(kernel)} if arch.attention.n_heads else {}),
        **({'attention without a window': str(global_kernel)} if global_kernel else {}),
        **({'states': describe_chunks(request.platform)} if arch.has_states else {}),
        **({'context': f'{context} ({why_context})'} if mesh['c'] > 1 else {}),
        **({'positions': scaling.describe(length)} if scaling and scaling.kind == 'longrope' else {}),
        **({'experts': describe_routing(arch, why_grouped)} if arch.experts.n_experts else {}),
        **({'pipeline': why_pipeline} if pipeline or 'no effect' in why_pipeline else {}),
        **({'products': why_numerics} if request.matmul != 'compute' else {}),
        'layers': why_unrolled + (f'; in {options.batch_parts} parts of the batch' if options.batch_parts > 1 else ''),
        'activations': why_saved,
        **({'gradients': why_reduced + narrow} if along('r e c', mesh) > 1 or narrow else {}),
    }
    return ExecutionPlan(
        kernel, context, grouped, numerics, unrolled, saved, loss_chunks, pipeline, reduced_by_layer, request.reduction,
        options.batch_parts, global_kernel, reasons,
    )  # fmt: skip


MOST_ROUNDED = 256  # devices that add up in bf16: benchmarks/bf16_rings.py


def describe_sums(reduction: Reduction, mesh: Mapping[str, int]) -> str:
    """Which sums of gradients are sent in bf16, for the report."""
    wanted = {'f32': '', 'bf16': 'r', 'bf16_r_d': 'rd'}[reduction]
    many = [axis for axis in wanted if mesh[axis] > 1]
    if not wanted:
        return ''
    sent = f'; sums over {" and ".join(many)} in bf16, all others in f32' if many else ''
    if 'd' in wanted and mesh['d'] > MOST_ROUNDED:
        sent += f' (mesh.d is above {MOST_ROUNDED}: in one ring, rounding would add up to a bias)'
    return sent + ''.join(f'; NOT over {axis} in bf16, because mesh.{axis} = 1' for axis in wanted if axis not in many)


def check_batch_parts(parts: int, arch: Architecture, request: ModelRequest) -> None:
    """Raises UserError if a layer cannot run in parts of the batch."""
    if parts > 1 and arch.experts.n_experts:
        raise UserError(f'model.batch_parts = {parts}: a mixture of experts runs on the whole batch\nleave it out')
    if parts > 1 and request.matmul != 'compute':
        raise UserError(
            f'model.batch_parts = {parts}: precision.matmul = {request.matmul} rounds the whole batch at once\n'
            'leave out one of them'
        )


def choose_reduction(
    platform: str, device_kind: str, slices: int, pipeline: PipelineSchedule | None
) -> tuple[bool, str]:
    """Whether the backward pass of each layer reduces its gradients over the axes that replicate them; and the reason.

    The other way is to reduce those of all layers at the end of the step. Steps of several passes always do.
    """
    if pipeline is not None:
        return False, 'reduced at the end of the step (a stage runs its layers once per micro-batch)'
    if platform == 'tpu' and slices == 1:
        return False, 'reduced at the end of the step (within a TPU slice, nothing hides a sum that is reduced earlier)'
    if platform == 'tpu' and device_kind not in _SPARSE_CORES:
        return (
            False,
            'reduced at the end of the step (between these slices, more of it would be exposed layer by layer)',
        )
    return True, 'reduced layer by layer in steps of one pass (the rest of the backward pass hides it), else at the end'


# `device_kind` of TPUs whose SparseCores run collectives: v5p, v6e, tpu7x.
_SPARSE_CORES = ('TPU v5', 'TPU v5p', 'TPU v6 lite', 'TPU v6e', 'TPU7x')


def choose_unrolled(wanted: str, n_layers: int, mesh: dict[str, int]) -> tuple[bool, str]:
    """Whether the program contains every layer, or one layer in a loop; and the reason."""
    if wanted != 'auto':
        return wanted == 'unroll', f'{wanted} (as configured)'
    if along('d e c t p', mesh) == 1 and n_layers <= 48:
        return True, 'unroll (faster than a loop if weights are not sharded; model.layers=scan compiles faster)'
    return False, 'scan (many devices or layers: compiles faster)'


def choose_saved(
    wanted: str | Mapping[str, Choice], mesh: dict[str, int], host_memory: bool
) -> tuple[Mapping[str, Choice] | None, str]:
    """What the backward pass keeps, see `recompute_by_name`; and the reason.

    Raises:
        UserError: something is to be offloaded, and the devices have no pinned host memory.
    """
    if wanted == 'all' and mesh['d'] * mesh['p'] == 1:
        return None, 'all kept'
    if wanted == 'all':
        many = f'{"d" if mesh["d"] > 1 else "p"} > 1'
        return ALL_NAMED, f'kept: {", ".join(ALL_NAMED)}; gathered weights and cheap values are recomputed ({many})'
    if wanted == 'none' and mesh['p'] > 1:
        return {}, 'kept: the input of each stage and micro-batch; the rest is recomputed (model.save=none)'
    if wanted == 'none':
        return {}, 'everything is recomputed in the backward pass (model.save=none)'
    saved: dict[str, Choice] = dict.fromkeys(SAVE_PRESETS[wanted], 'keep') if isinstance(wanted, str) else dict(wanted)
    kept, offloaded = ([name for name in saved if saved[name] == choice] for choice in ('keep', 'offload'))
    if offloaded and not host_memory:
        raise UserError(
            f'model.save: {", ".join(offloaded)}: offload: the devices have no pinned host memory\n'
            'keep or recompute instead'
        )
    in_host = f'; in host memory: {", ".join(offloaded)}' if offloaded else ''
    return saved, f'kept: {", ".join(kept) or "none"}{in_host}; the rest is recomputed (model.save)'


def describe_chunks(platform: str) -> str:
    """How states are computed, for the start-up report."""
    return ('' if platform == 'cpu' else 'SLOW: ') + f'chunks of {CHUNK} tokens in plain XLA (there is no fused kernel)'
