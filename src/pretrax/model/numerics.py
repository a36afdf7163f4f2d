"""The number format of each product with a weight: four or eight bits, or the compute dtype.

A product is named by its layer and its weight, such as '0.q' and '11.down'. The first and the last layer are also named
'first' and 'last'. The product with the unembedding is 'head'. A pattern without a dot means a weight in every layer.
The product with a router is always in f32.
"""

import dataclasses
import fnmatch
import itertools
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pretrax.errors import UserError
from pretrax.model.architecture import Architecture
from pretrax.model.block_scaled import BLOCK
from pretrax.model.eight_bits import mix

Kind = Literal['compute', 'int8', 'fp8', 'mxfp8', 'nvfp4']
_DRAWN = {'int8', 'nvfp4'}  # gradients are rounded stochastically

EXEMPT = ('head', 'first.*', 'last.*')  # Micikevicius et al. 2022, arXiv:2209.05433, section 4, among others


@dataclasses.dataclass(frozen=True)
class Format:
    """How one product is computed."""

    kind: Kind
    seed: jax.Array | None = None  # u32[2] of stochastic rounding, in training with int8 or nvfp4
    scale: jax.Array | None = None  # of each output channel, if the weight itself is int8 (weight_only.py)


@dataclasses.dataclass(frozen=True)
class Formats:
    """The formats of the products of one layer: `formats['q']`. Other weights multiply in the compute dtype."""

    kinds: Mapping[str, Kind] = dataclasses.field(default_factory=dict)
    seed: jax.Array | None = None
    scales: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)  # of int8 weights
    sums: DTypeLike | None = None  # of gradients of matrices over d; None: f32

    def __getitem__(self, weight: str) -> Format:
        kind = self.kinds.get(weight, 'compute')
        if self.seed is None or kind not in _DRAWN:
            return Format(kind, scale=self.scales.get(weight))
        return Format(kind, mix(self.seed ^ jnp.uint32(zlib.crc32(weight.encode()))))


COMPUTE = Formats()


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The formats of every product of a decoder."""

    wanted: Kind  # `precision.matmul`
    blocks: tuple[Mapping[str, Kind], ...]  # of each layer
    head: Kind

    @property
    def draws(self) -> bool:
        """Whether anything is rounded stochastically."""
        return not _DRAWN.isdisjoint({self.head, *(kind for block in self.blocks for kind in block.values())})

    def head_format(self, seed: jax.Array | None = None) -> Format:
        """The format of the product with the unembedding."""
        return Formats({'head': self.head}, seed)['head']

    def seeds(self, key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
        """A seed for each layer, u32[layers, 2], and for the head, u32[2]. None: nothing is rounded stochastically."""
        if key is None or not self.draws:
            return None, None
        seeds = jax.random.bits(key, (len(self.blocks) + 1, 2), jnp.uint32)
        return seeds[:-1], seeds[-1]


UNIFORM = Numerics('compute', (), 'compute')


def choose_numerics(
    wanted: Kind,
    exempt: tuple[str, ...],
    layers: Sequence[Sequence[str]],
    unsupported: str,
    mesh: Mapping[str, int],
    platform: str,
    device_kind: str,
) -> tuple[Numerics, str]:
    """The format of every product, and a line for the report.

    Args:
        wanted: `precision.matmul`.
        exempt: patterns of products that stay in the compute dtype.
        layers: the matrices of each layer.
        unsupported: why the products of experts stay in the compute dtype, see `unsupported_experts`.
        mesh: size of each axis.
        platform: of the devices.
        device_kind: their name.

    Raises:
        UserError: a pattern matches no product, or an accelerator has no units for scales of blocks.
    """
    n_layers, weights = len(layers), list(dict.fromkeys(itertools.chain(*layers)))
    products = [(None, 'head'), *((i, name) for i, names in enumerate(layers) for name in names)]
    if wanted == 'compute':
        return Numerics('compute', ({},) * n_layers, 'compute'), 'in the compute dtype'
    for pattern in exempt:
        if not any(_matches(pattern, i, n_layers, name) for i, name in products):
            raise UserError(
                f"precision.exempt: '{pattern}' matches no product\n"
                f'there are head, and in each of the layers 0 (also first) to {n_layers - 1} (also last): '
                f'{", ".join(weights)}'
            )

    if wanted in BLOCK and platform != 'cpu' and (slow := fast_path(wanted, platform, device_kind)).startswith('SLOW'):
        raise UserError(f'precision.matmul={wanted}: {slow[6:]}\nuse precision.matmul=compute, or fp8 or int8')
    without = {name: unsupported for name in weights if unsupported and name.startswith('expert_')}

    def kind(i: int | None, name: str) -> Kind:
        free = name in without or any(_matches(pattern, i, n_layers, name) for pattern in exempt)
        return 'compute' if free else wanted

    blocks: tuple[dict[str, Kind], ...] = tuple(
        {name: kind(i, name) for name in names} for i, names in enumerate(layers)
    )
    numerics = Numerics(wanted, blocks, kind(None, 'head'))
    if wanted not in {numerics.head, *(one for block in blocks for one in block.values())}:
        raise UserError(
            f'precision.matmul={wanted}: precision.exempt exempts every product ({", ".join(exempt)}; {n_layers} '
            'layers)\n'
            "exempt fewer, such as precision.exempt='[head]', or use precision.matmul=compute"
        )
    _check_stages(numerics, mesh)
    return numerics, _describe(numerics, exempt, platform, device_kind, without)


def unsupported_experts(arch: Architecture) -> str:
    """Why the products of experts have no other format than the compute dtype; '': they may have one."""
    if not arch.experts.n_experts or arch.experts.capacity is not None:
        return ''
    return 'products of rows by expert do not support it; with model.experts.capacity they are plain products'


def _check_stages(numerics: Numerics, mesh: Mapping[str, int]) -> None:
    """Pipeline stages run one program, and stochastic rounding has no seed per micro-batch yet."""
    if mesh['p'] > 1 and numerics.draws:
        raise UserError(
            f'precision.matmul={numerics.wanted} does not support pipeline stages (mesh.p = {mesh["p"]})\n'
            'use precision.matmul=fp8, or mesh.p=1'
        )
    formats = {item for block in numerics.blocks for item in block.items()}
    if mesh['p'] > 1 and len(formats) > len(dict(formats)):
        raise UserError(
            f'precision.exempt differs between layers, but the stages of mesh.p = {mesh["p"]} run one program\n'
            "exempt weights of all layers or none, as in precision.exempt='[head]'"
        )


def _matches(pattern: str, i: int | None, n_layers: int, name: str) -> bool:
    names = [name]
    if i is not None:
        names += [f'{i}.{name}', *['first.' + name] * (i == 0), *['last.' + name] * (i == n_layers - 1)]
    return any(fnmatch.fnmatchcase(one, pattern) for one in names)


def _describe(
    numerics: Numerics, exempt: tuple[str, ...], platform: str, device_kind: str, without: Mapping[str, str]
) -> str:
    every = [(kinds[name], name) for kinds in numerics.blocks for name in kinds] + [(numerics.head, 'head')]
    count = sum(kind != 'compute' for kind, _ in every)
    how = {
        'int8': 'int8 (a scale per row and column, gradients rounded stochastically)',
        'fp8': 'fp8 (e4m3, gradients e5m2; one scale per operand, computed when it is used)',
        'mxfp8': 'mxfp8 (e4m3; a scale per 32 numbers of a sum)',
        'nvfp4': 'nvfp4 (e2m1; a scale per 16 numbers of a sum; gradients rounded stochastically)',
    }[numerics.wanted]
    parts = [
        f'{how} in {count} of {len(every)} products',
        f'compute dtype: {", ".join(exempt) or "none"} (precision.exempt)',
    ]
    parts += [f'{name} too: {why}' for name, why in without.items()]
    parts.append(fast_path(numerics.wanted, platform, device_kind))
    return '; '.join(parts)


def fast_path(kind: Kind, platform: str, device_kind: str) -> str:
    """Whether the devices have hardware for a format that XLA uses."""
    if re.search(_HAVE_UNITS[kind], f'{platform} {device_kind}'):
        return f'{device_kind or platform} has hardware for it'
    gpus = 'NVIDIA GPUs from B200 and GB200 on'
    only = {'int8': 'TPUs', 'fp8': 'NVIDIA GPUs from Ada and Hopper on, and TPUs from v7 on,'}.get(kind, gpus)
    return f'SLOW: {only} have hardware for it; {device_kind or platform} emulates it'


# On 'platform kind', as JAX names devices (cost/devices.py)
_HAVE_UNITS = {
    'int8': r'^tpu ',
    'fp8': r'^(cuda|gpu) NVIDIA .*(\bH[12]00|\bH[28]0\b|GH200|\bB[123]00|\bGB[123]|\bL4\b|\bL40|RTX '
    r'[45]0\d\d|Ada)|^tpu TPU7',
    **dict.fromkeys(BLOCK, r'^(cuda|gpu) NVIDIA .*\bG?B[123]00'),
}
