"""Which products with a weight multiply in eight bits and which in the compute dtype: chosen here, once, and said.

A product is named by its block and its weight, '0.q' or '11.down'; the first and the last block also have the names
'first' and 'last'; the product with the unembedding is 'head'. A pattern that has no dot means a weight in any block.
The router of a mixture of experts decides, in f32 always.
"""

import dataclasses
import fnmatch
import itertools
import re
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pretrax.errors import UserError
from pretrax.model.architecture import Architecture
from pretrax.model.eight_bits import mix

Kind = Literal['compute', 'int8', 'fp8']

EXEMPT = ('head', 'first.*', 'last.*')  # Micikevicius et al. 2022, arXiv:2209.05433, section 4, among others


@dataclasses.dataclass(frozen=True)
class Format:
    """How one product is computed."""

    kind: Kind
    seed: Any = None  # u32[2] of rounding by chance, in training with int8


@dataclasses.dataclass(frozen=True)
class Formats:
    """How the products of one block are: `formats['q']`. Weights that are not named multiply in the compute dtype."""

    kinds: Mapping[str, Kind] = dataclasses.field(default_factory=dict)
    seed: Any = None

    def __getitem__(self, weight: str) -> Format:
        kind = self.kinds.get(weight, 'compute')
        if self.seed is None or kind != 'int8':
            return Format(kind)
        return Format(kind, mix(self.seed ^ jnp.uint32(zlib.crc32(weight.encode()))))


COMPUTE = Formats()


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The formats of every product of a decoder."""

    wanted: Kind
    blocks: tuple[Mapping[str, Kind], ...]  # of each block
    head: Kind

    def runs(self, count: int) -> list[tuple[slice, Mapping[str, Kind]]]:
        """The longest runs of blocks that have the same formats, of all blocks, or of the `count` of a pipeline stage."""
        runs, start = [], 0
        for kinds, run in itertools.groupby(self.blocks[:count]):
            runs.append((slice(start, start := start + len(list(run))), kinds))
        return runs if len(runs) > 1 else [(slice(None), self.blocks[0])]

    @property
    def draws(self) -> bool:
        """Whether anything is rounded by chance."""
        return 'int8' in (self.head, *(kind for block in self.blocks for kind in block.values()))

    def head_format(self, seed: jax.Array | None = None) -> Format:
        """The format of the product with the unembedding."""
        return Formats({'head': self.head}, seed)['head']

    def seeds(self, key: Any) -> tuple[Any, Any]:
        """u32[blocks, 2] and u32[2]: a seed for each block, and for the head. None where nothing is left to chance."""
        if key is None or not self.draws:
            return None, None
        seeds = jax.random.bits(key, (len(self.blocks) + 1, 2), jnp.uint32)
        return seeds[:-1], seeds[-1]


UNIFORM = Numerics('compute', (), 'compute')


def choose_numerics(
    wanted: Kind,
    exempt: tuple[str, ...],
    arch: Architecture,
    grouped: str,
    mesh: Mapping[str, int],
    platform: str,
    device_kind: str,
) -> tuple[Numerics, str]:
    """The format of every product, and a line for the start-up report.

    Args:
        wanted: `precision.matmul`.
        exempt: patterns on products that stay in the compute dtype.
        arch: the decoder.
        grouped: method of the products of experts, `matmul.choose_grouped`.
        mesh: size of each axis.
        platform: of the devices.
        device_kind: their name.

    Raises:
        UserError: a pattern matches no product.
    """
    n_layers, weights = arch.n_layers, _multiplied(arch)
    if wanted == 'compute':
        return Numerics('compute', ({},) * n_layers, 'compute'), 'in the compute dtype'
    for pattern in exempt:
        if not any(_matches(pattern, i, n_layers, name) for i, name in _products(weights, n_layers)):
            raise UserError(
                f"precision.exempt: '{pattern}' matches no product\n"
                f'there are head, and in each of the blocks 0 (also first) to {n_layers - 1} (also last): '
                f'{", ".join(weights)}'
            )

    reason = ''
    if arch.n_experts and arch.capacity is None and mesh['e'] > 1:
        reason = 'tokens travel to them over e in rounds; with model.capacity they are plain products'
    elif arch.n_experts and arch.capacity is None and grouped == 'ragged':
        reason = 'jax.lax.ragged_dot has none; with model.capacity they are plain products'
    without = {}
    if reason:
        without = {name: reason for name in weights if name.startswith('expert_')}

    def kind(i: int | None, name: str) -> Kind:
        free = name in without or any(_matches(pattern, i, n_layers, name) for pattern in exempt)
        return 'compute' if free else wanted

    blocks: tuple[dict[str, Kind], ...] = tuple({name: kind(i, name) for name in weights} for i in range(n_layers))
    numerics = Numerics(wanted, blocks, kind(None, 'head'))
    if wanted not in {numerics.head, *(one for block in blocks for one in block.values())}:
        raise UserError(
            f'precision.matmul={wanted}: precision.exempt leaves no product to it ({", ".join(exempt)}; {n_layers} blocks)\n'
            "exempt fewer, such as precision.exempt='[head]', or use precision.matmul=compute"
        )
    _check_stages(numerics, mesh)
    return numerics, _describe(numerics, exempt, platform, device_kind, without)


def _check_stages(numerics: Numerics, mesh: Mapping[str, int]) -> None:
    """Stages of a pipeline run one program; and of its passes none has a number yet that chance could depend on."""
    if mesh['p'] > 1 and numerics.draws:
        raise UserError(
            f'precision.matmul=int8 rounds by chance, which the stages of mesh.p = {mesh["p"]} cannot do yet\n'
            'use precision.matmul=fp8, or mesh.p=1'
        )
    if mesh['p'] > 1 and len(numerics.runs(len(numerics.blocks))) > 1:
        raise UserError(
            f'precision.exempt tells blocks apart, and the stages of mesh.p = {mesh["p"]} run one program\n'
            "exempt weights of all blocks or none, as in precision.exempt='[head]'"
        )


def _multiplied(arch: Architecture) -> tuple[str, ...]:
    """The weights of a block that pass through `matmul.product`."""
    mlp = ('gate', 'up', 'down') if arch.gated else ('up', 'down')
    if not arch.n_experts:
        return ('q', 'k', 'v', 'o', *mlp)
    of_experts = [f'{prefix}_{name}' for prefix in ('expert', *['shared'] * bool(arch.d_shared)) for name in mlp]
    return ('q', 'k', 'v', 'o', *of_experts)


def _products(weights: tuple[str, ...], n_layers: int) -> list[tuple[int | None, str]]:
    return [(None, 'head'), *itertools.product(range(n_layers), weights)]


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
        'int8': 'int8 (a scale a row and column, gradients rounded by chance)',
        'fp8': 'fp8 (e4m3, gradients e5m2; an operand has one scale, chosen as it is used)',
    }[numerics.wanted]
    parts = [f'{how} in {count} of {len(every)}', f'compute dtype: {", ".join(exempt) or "none"} (precision.exempt)']
    parts += [f'{name} too: {why}' for name, why in without.items()]
    parts.append(fast_path(numerics.wanted, platform, device_kind))
    return '; '.join(parts)


def fast_path(kind: Kind, platform: str, device_kind: str) -> str:
    """Whether the devices have units for a format that XLA makes use of."""
    if re.search(_HAVE_UNITS[kind], f'{platform} {device_kind}'):
        return f'{device_kind or platform} has units for it'
    only = {'int8': 'TPUs', 'fp8': 'NVIDIA GPUs from Ada and Hopper on, and TPUs from v7 on,'}[kind]
    return f'SLOW: {only} have units for it, and {device_kind or platform} only imitates them'


# On 'platform kind', as JAX names devices (scale/devices.py)
_HAVE_UNITS = {
    'int8': r'^tpu ',
    'fp8': r'^(cuda|gpu) NVIDIA .*(\bH[12]00|\bH[28]0\b|GH200|\bB[123]00|\bGB[123]|\bL4\b|\bL40|RTX [45]0\d\d|Ada)|^tpu TPU7',
}
