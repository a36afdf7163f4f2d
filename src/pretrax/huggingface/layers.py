"""Fields of config.json for the positions and windows of each layer. Imports no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pretrax.errors import UserError
from pretrax.model.architecture import Architecture

Options = dict[str, Any]
FULL, WINDOW = 'full_attention', 'sliding_attention'
_LLAMA3 = {
    'factor': 'factor', 'low_freq_factor': 'low_freq_factor', 'high_freq_factor': 'high_freq_factor',
    'original_length': 'original_max_position_embeddings',
}  # fmt: skip


@dataclass(frozen=True)
class Rope:
    """Base and scaling of rotary positions, in the old form (rope_theta, rope_scaling) and the new one (rope_parameters).

    Args:
        default: the base if the configuration has none.
        local: the default base of layers with a window (Gemma 3); None: all layers have the same base.
    """

    default: float = 10000.0
    local: float | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        return ('rope_theta', 'rope_scaling', 'rope_parameters', *['rope_local_base_freq'] * (self.local is not None))

    def read(self, config: Mapping[str, Any]) -> Options:
        said = config.get('rope_parameters') or {}
        by_layer = self.local is not None and (FULL in said or WINDOW in said)
        rope = {'rope_theta': config.get('rope_theta', self.default), **(config.get('rope_scaling') or {})}
        options = self._one(rope | (said.get(FULL, {}) if by_layer else said))
        if self.local is not None:
            local = said.get(WINDOW, {}) if by_layer else {}
            local = self._one({'rope_theta': config.get('rope_local_base_freq', self.local), **local})
            if 'rope_scaling' in local:
                raise UserError('config.json: rope_parameters scale layers with a window, which is not supported')
            options['local_rope_base'] = local['rope_base']
        return options

    def _one(self, rope: Mapping[str, Any]) -> Options:
        kind = rope.get('rope_type', rope.get('type', 'default'))
        if kind not in ('default', 'linear', 'llama3'):
            raise UserError(f"config.json: rope_scaling of the type '{kind}' is not supported")
        if rope.get('partial_rotary_factor', 1.0) != 1.0:
            raise UserError(f'config.json: partial_rotary_factor = {rope["partial_rotary_factor"]} is not supported')
        options: Options = {'rope_base': float(rope['rope_theta'])}
        if kind == 'linear':
            options['rope_scaling'] = {'kind': 'linear', 'factor': float(rope['factor'])}
        if kind == 'llama3':
            options['rope_scaling'] = {'kind': 'llama3', **{ours: rope[theirs] for ours, theirs in _LLAMA3.items()}}
        return options

    def write(self, arch: Architecture) -> dict[str, Any]:
        local = {} if arch.local_rope_base is None else {'rope_local_base_freq': arch.local_rope_base}
        scaling: dict[str, Any] | None = None
        if arch.rope_scaling is not None:
            scaling = {'rope_type': arch.rope_scaling.kind, 'factor': arch.rope_scaling.factor}
            if arch.rope_scaling.kind == 'llama3':
                scaling |= {theirs: getattr(arch.rope_scaling, ours) for ours, theirs in _LLAMA3.items()}
        return {'rope_theta': arch.rope_base, 'rope_scaling': scaling, **local}


@dataclass(frozen=True)
class Windows:
    """The sliding window and the layers that have it.

    Args:
        by_layer: the class has `layer_types`.
        switch: a window exists only if `use_sliding_window`, from layer `max_window_layers` on (Qwen).
        pattern: by default every n-th layer has full attention (Gemma).
    """

    by_layer: bool = False
    switch: bool = False
    pattern: int = 0

    @property
    def fields(self) -> tuple[str, ...]:
        types = ['layer_types'] * self.by_layer
        switch = ['use_sliding_window', 'max_window_layers'] * self.switch
        return (
            'sliding_window',
            *types,
            *switch,
            *['sliding_window_pattern', '_sliding_window_pattern'] * (self.pattern > 2),
        )

    def read(self, config: Mapping[str, Any]) -> Options:
        window, count = config.get('sliding_window') or 0, config['num_hidden_layers']
        types: Sequence[str] | None = config.get('layer_types')
        if self.switch and not config.get('use_sliding_window', False):
            window = 0
        if not window or types == [FULL] * count:
            return {'window': 0, 'global_every': 0}
        if types is None and self.switch:
            types = [WINDOW if i >= config.get('max_window_layers', 28) else FULL for i in range(count)]
        every = config.get('sliding_window_pattern', config.get('_sliding_window_pattern', self.pattern)) or 0
        if types is not None:
            if strange := set(types) - {FULL, WINDOW}:
                raise UserError(f'config.json: layer_types has {", ".join(sorted(strange))}, which is not supported')
            every = types.index(FULL) + 1 if FULL in types else 0
            if list(types) != layer_types(count, every):
                raise UserError(
                    'config.json: layer_types must repeat a pattern in which every n-th layer has full attention'
                )
        return {'window': window, 'global_every': every}

    def write(self, arch: Architecture) -> dict[str, Any]:
        config: dict[str, Any] = {'sliding_window': arch.window or None}
        if self.switch:
            config['use_sliding_window'] = arch.window > 0
        if self.by_layer:
            config['layer_types'] = [WINDOW if window else FULL for window in arch.windows]
        return config


def layer_types(count: int, every: int) -> list[str]:
    """Types of `count` layers. Every n-th layer has full attention (0: none)."""
    return [FULL if every and (i + 1) % every == 0 else WINDOW for i in range(count)]


@dataclass(frozen=True)
class NoPositions:
    """The layers without positions, as a list of 1 (positions) and 0 (no positions). SmolLM3."""

    fields = ('no_rope_layers', 'no_rope_layer_interval')

    def read(self, config: Mapping[str, Any]) -> Options:
        said, count = config.get('no_rope_layers'), config['num_hidden_layers']
        every = config.get('no_rope_layer_interval', 4)
        if said is not None:
            every = list(said).index(0) + 1 if 0 in said else 0
            if list(said) != [int(not every or (i + 1) % every != 0) for i in range(count)]:
                raise UserError(
                    'config.json: no_rope_layers must repeat a pattern in which every n-th layer has no positions'
                )
        return {'nope_every': every}

    def write(self, arch: Architecture) -> dict[str, Any]:
        every = arch.nope_every
        layers = [int(not every or (i + 1) % every != 0) for i in range(arch.n_layers)]
        return {'no_rope_layers': layers, 'no_rope_layer_interval': every}
