"""Options of XLA for the training step: which ones, on which hardware and mesh, why, and how that is known.

XLA's defaults suit small meshes and single devices. `choose_options` picks rows of `TABLE`; `run/compiler_options.py`
leaves out what the installed XLA does not know, and applies `compiler.options` of the configuration.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping

Value = bool | int | float | str

# JAX's `device_kind` of each TPU, by the name of its version.
_TPUS = {
    'v4': 'TPU v4',
    'v5e': 'TPU v5 lite|TPU v5e',
    'v5p': 'TPU v5|TPU v5p',
    'v6e': 'TPU v6 lite|TPU v6e',
    'tpu7x': 'TPU7x',
}
# TPUs whose SparseCores XLA can use for collectives: docs.cloud.google.com/tpu/docs. That of v4 is for embeddings only.
SPARSE_CORE = ('v5p', 'v6e', 'tpu7x')
GPU = ('gpu',)


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a choice depends on.

    Attributes:
        hardware: version of a TPU, such as 'v5p'; 'gpu' for an NVIDIA GPU; otherwise the platform, such as 'cpu'.
        mesh: size of each mesh axis.
        slices: TPU slices, or nodes of GPUs.
    """

    hardware: str
    mesh: Mapping[str, int]
    slices: int = 1

    def __str__(self) -> str:
        several = ', '.join(f'{axis}={n}' for axis, n in self.mesh.items() if n > 1)
        return ', '.join(part for part in (self.hardware, several or 'one device') if part)


@dataclasses.dataclass(frozen=True)
class CompilerOption:
    """An option of XLA, and where it is set.

    Attributes:
        name, value: as XLA has them.
        hardware: versions of TPUs, or 'gpu'.
        reason: what it changes, in one sentence.
        evidence: what was measured by compiling, or the recipe that sets it.
        axes: at least one of these mesh axes has several devices; '': any mesh.
        slices: True: only for several slices or nodes; False: only for one; None: for any number.
    """

    name: str
    value: Value
    hardware: tuple[str, ...]
    reason: str
    evidence: str
    axes: str = ''
    slices: bool | None = None

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
        names = {'gpu': 'NVIDIA GPUs'}
        parts = [', '.join(names.get(one, one) for one in self.hardware)]
        if self.axes:
            parts.append(f'{" or ".join(self.axes)} > 1')
        if self.slices is not None:
            parts.append('several slices or nodes' if self.slices else 'one slice or node')
        return '; '.join(parts)


TABLE: tuple[CompilerOption, ...] = (
    *(
        CompilerOption(
            name,
            True,
            ('v4', 'v5p', 'tpu7x'),
            'Gathers weights by asynchronous all-gathers; by default they are all-reduces, of twice the bytes.',
            'One gather and one sum over v4:8x8x4 (`tests/deviceless/options.py`): all-reduce becomes all-gather. The '
            'same over v5p:8x8x4 and tpu7x:4x4x4, '
            'together with the next options.',
            axes='de',
        )
        for name in ('xla_enable_async_all_gather', 'xla_tpu_prefer_async_allgather_to_allreduce')
    ),
    *(
        CompilerOption(
            f'xla_tpu_enable_sparse_core_collective_offload_{what}',
            True,
            SPARSE_CORE,
            'Scatters gradients instead of all-reducing them, on the SparseCores, while the TensorCore computes.',
            'One gather and one sum over v5p:8x8x4 and v6e:16x16 (`tests/deviceless/options.py`): the all-reduce of '
            'the sum '
            'becomes a reduce-scatter. On tpu7x:4x4x4 it is one by default.',
            axes='de',
        )
        for what in ('all_gather', '3d_all_gather', 'reduce_scatter', 'nd_reduce_scatter')
    ),
    CompilerOption(
        'xla_tpu_enable_sparse_core_collective_offload_2d_all_gather',
        True,
        SPARSE_CORE,
        'Gathers over two dimensions of the torus on the SparseCores; by default the TensorCore gathers over one '
        'ring, and waits.',
        'Three layers of 8B on v6e:8x8, d=64, everything saved: 50.0 ms of communication exposed without it, 38.4 ms '
        'with it. 32B '
        'on v5p:4x4x4, d=16 t=4: 18.3 ms exposed over d without it, 3.5 ms with it.',
        axes='de',
    ),
    CompilerOption(
        'xla_tpu_enable_concurrent_sparse_core_offloading',
        True,
        ('v5p', 'tpu7x'),
        'Runs several collectives at a time on the SparseCores, such as one over d and one over t.',
        'Three layers of 32B on v5p:4x4x4, d=16 t=4, products saved: 62.9 ms of communication exposed without it, '
        '53.2 ms with '
        'it, of 622.6 ms of other work. On v6e it changes nothing.',
        axes='de',
    ),
    *(
        CompilerOption(
            name,
            value,
            SPARSE_CORE,
            'Chooses layouts in which XLA can scatter; without them it all-reduces the gradients of wide '
            'feed-forwards.',
            'Llama 3 8B on v5p:8x8x4, d=256: reduce-scatters and all-gathers (61.9 GB) replace all-reduces (123.8 '
            'GB); 88 % of '
            'the bytes are behind work. With only the options above, the gradients of 4,096 x 28,672 matrices are '
            'all-reduces.',
            axes='de',
        )
        for name, value in (
            ('xla_tpu_use_minor_sharding_for_major_trivial_input', True),
            ('xla_tpu_relayout_group_size_threshold_for_reduce_scatter', 1),
            ('xla_tpu_assign_all_reduce_scatter_layout', True),
        )
    ),
    *(
        CompilerOption(
            name,
            value,
            ('v5e',),
            'Runs the sums of gradients inside the products that follow them.',
            'Four layers of 16b on v5e:16x16, d=256: 106 ms of communication exposed by default, 66 ms with them, of '
            '801 ms '
            'of other work. Between several slices the schedule is not better.',
            axes='de',
            slices=False,
        )
        for name, value in (
            ('xla_enable_async_all_reduce', 'true'),
            ('xla_tpu_enable_async_collective_fusion_fuse_all_reduce', True),
        )
    ),
    CompilerOption(
        'xla_gpu_enable_latency_hiding_scheduler',
        True,
        GPU,
        'Starts collectives early and ends them late, so that kernels run meanwhile; newer versions of XLA do it by '
        'default.',
        'Four layers of llama3-8b on h100x8: 22.4 ms of 25.8 ms of communication exposed without it, 9.0 ms with it. '
        'NVIDIA recommends it (docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance).',
        axes='rdectp',
    ),
)


def choose_options(situation: Situation) -> list[CompilerOption]:
    """The rows of `TABLE` for a run. On CPUs there are none."""
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
        return next((name for name, kinds in _TPUS.items() if re.fullmatch(kinds, device_kind.strip())), 'tpu')
    return 'gpu' if platform in ('gpu', 'cuda') else platform


def wrong_hardware(name: str, hardware: str) -> str | None:
    """Why an option has no effect on this hardware, or breaks the compiler; None: nothing is known against it.

    XLA accepts some of these without a word.
    """
    if any(row.name == name and hardware in row.hardware for row in TABLE):
        return None
    mine = 'tpu' if hardware in (*_TPUS, 'tpu') else hardware
    platform = next((one for one in ('tpu', 'gpu', 'cpu') if name.startswith(f'xla_{one}_')), mine)
    if platform != mine:
        return f'it is for {platform.upper()}s'
    if ('sparse_core' in name or name.startswith('xla_sc_')) and hardware not in SPARSE_CORE:
        return f'it is for TPUs whose SparseCores run collectives: {", ".join(SPARSE_CORE)}'
    return None
