"""Fields of config.json for each layer: its positions and window, or its state. Imports no JAX."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pretrax.errors import UserError
from pretrax.huggingface.fields import Field, Options, number, whole, wrong
from pretrax.huggingface.rope_scaling import KINDS, ORIGINAL, read_scaling, write_scaling
from pretrax.model.architecture import Architecture

FULL, WINDOW, LINEAR = 'full_attention', 'sliding_attention', 'linear_attention'  # values of layer_types
_PARAMETERS = ('rope_type', 'type', 'rope_theta', 'partial_rotary_factor')


@dataclass(frozen=True)
class Rope(Field):
    """Base and scaling of rotary positions, in the old form (rope_theta, rope_scaling) and the new (rope_parameters).

    As in transformers, `rope_scaling` replaces `rope_parameters` where a file has both.

    Args:
        by_layer: layers with a window have a base of their own, and the new form has one entry per type of layer (Gemma
            3).
        kinds: scalings that the class has.
        aliases: other names of scalings, in files of some versions.
        absent: the scaling if the configuration says nothing.
        outer: the original length is a field of its own, beside the scaling (Phi-3).
        base: name of the base in the old form.
        fraction: name of the part of a head that is rotated, in the old form; None: the class rotates whole heads.
        dimensions: name of the number of rotated dimensions of a head, which files may have in the place of the
            fraction.
        local: name of the base of layers with a window in the old form; None: they have none of their own there.
        unused: keys of the new form that change nothing in a text. Qwen3.5 divides the pairs of dimensions into
            `mrope_section`, one for the time, the height and the width of an image, which are all the position of the
            token in a text.
    """

    by_layer: bool = False
    kinds: Sequence[str] = KINDS
    aliases: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    outer: bool = False
    base: str = 'rope_theta'
    fraction: str | None = None
    dimensions: str | None = None
    local: str | None = 'rope_local_base_freq'
    unused: Sequence[str] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        local, original = self.local if self.by_layer else None, ORIGINAL if self.outer else None
        names = (self.fraction, self.dimensions, local, original)
        return (self.base, 'rope_scaling', 'rope_parameters', *(name for name in names if name))

    def read(self, config: Mapping[str, Any]) -> Options:
        scaling, parameters = (_mapping(name, config.get(name)) for name in ('rope_scaling', 'rope_parameters'))
        if self.by_layer:
            parameters = parameters or self.absent
        else:
            return self._one(scaling or parameters or self.absent, self.base, config)
        if strange := sorted(set(parameters) - {FULL, WINDOW}):
            raise UserError(
                f'config.json: rope_parameters has {", ".join(strange)[:80]}; expected {FULL} and {WINDOW}, one entry '
                'each'
            )
        full, local = (_mapping(f'rope_parameters.{name}', parameters.get(name)) for name in (FULL, WINDOW))
        options = self._one(full | scaling, self.base, config)
        local = self._one(local, 'rope_local_base_freq', config)
        if 'rope.scaling' in local:
            raise UserError('config.json: rope_parameters scale layers with a window, which is not supported')
        return options | {'rope.local_base': local['rope.base']}

    def _one(self, rope: Mapping[str, Any], base: str, config: Mapping[str, Any]) -> Options:
        kind = rope.get('rope_type', rope.get('type', 'default'))
        kind = self.aliases.get(kind, kind) if isinstance(kind, str) else kind
        if not isinstance(kind, str) or kind not in self.kinds:
            why = ', because its frequencies change while a text grows' if kind == 'dynamic' else ''
            raise UserError(f"config.json: rope_scaling of the type '{str(kind)[:40]}' is not supported{why}")
        options: Options = {'rope.base': number('rope_theta', rope.get('rope_theta', config[base]))}
        if self.fraction is not None:
            fraction = rope.get('partial_rotary_factor', config[self.fraction])
            if self.dimensions is not None and fraction is None:
                rotated, d_head = config.get(self.dimensions), whole('head_dim', config['head_dim'])
                fraction = 1.0 if rotated is None else whole(self.dimensions, rotated, most=d_head) / d_head
            options['rope.fraction'] = number('partial_rotary_factor', fraction)
        elif rope.get('partial_rotary_factor', 1.0) != 1.0 and kind != 'proportional':
            raise UserError(f'config.json: partial_rotary_factor = {rope["partial_rotary_factor"]} is not supported')
        return options | read_scaling(kind, rope, config, (*_PARAMETERS, *self.unused))

    def write(self, arch: Architecture) -> dict[str, Any]:
        scaling = write_scaling(arch.rope.scaling)
        if self.by_layer and self.local is None:
            full = {'rope_theta': arch.rope.base, **(scaling or {'rope_type': 'default'})}
            local = {'rope_theta': arch.rope.local_base, 'rope_type': 'default'}
            return {'rope_parameters': {FULL: full, WINDOW: local}}
        more: dict[str, Any] = {}
        if self.by_layer and self.local is not None:
            more[self.local] = arch.rope.local_base
        if self.fraction is not None:
            more[self.fraction] = arch.rope.fraction
        if self.outer and arch.rope.scaling is not None:
            more[ORIGINAL] = arch.rope.scaling.original_length
        return {self.base: arch.rope.base, 'rope_scaling': scaling, **more}


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise wrong(name, value, 'an object or null')
    return dict(value or {})


@dataclass(frozen=True)
class Windows(Field):
    """The sliding window and the layers that have it.

    Args:
        rule: the layers with a window, if config.json has no `layer_types`: all but every n-th, 0 for all of them, or
            the name of a rule of `_by_rule`.
        more: the other fields that the class reads.
        ignored: fields that released files have and the class does not read.
        switch: there is a window only if `use_sliding_window`.
        positions: layers without a window have no positions, if sliding_window is not null.
        may_be_null: whether sliding_window may be null.
    """

    rule: int | str = 0
    more: Sequence[str] = ()
    ignored: Sequence[str] = ()
    switch: bool = False
    positions: bool = False
    may_be_null: bool = True

    @property
    def fields(self) -> tuple[str, ...]:
        return ('sliding_window', *['use_sliding_window'] * self.switch, *self.more, *self.ignored)

    def read(self, config: Mapping[str, Any]) -> Options:
        count, window = whole('num_hidden_layers', config['num_hidden_layers']), config['sliding_window']
        if window is None and not self.may_be_null:
            raise wrong('sliding_window', window, 'a number: without a window, no layer of this class has positions')
        on = True
        if self.switch:
            on = config['use_sliding_window']
            if not isinstance(on, bool):
                raise wrong('use_sliding_window', on, 'true or false')
        types = config.get('layer_types') if 'layer_types' in self.more else None
        if types is not None:
            windows = types_of_layers(types, count, WINDOW)
            if any(windows) and (window is None or not on):
                off = 'sliding_window is null' if on else 'use_sliding_window is false'
                raise UserError(
                    f'config.json: layer_types has {WINDOW}, but {off}\n'
                    f'write {FULL} for every layer, or give the window'
                )
        else:
            windows = self._by_rule(config, count) if on and window is not None else [False] * count
        if not any(windows) and self.positions and window is not None:
            raise wrong('layer_types', types, 'a layer with a window: without one, no layer has positions')
        return window_options(windows, whole('sliding_window', window) if any(windows) else 0)

    def _by_rule(self, config: Mapping[str, Any], count: int) -> list[bool]:
        if isinstance(self.rule, int):
            return all_but_every(self.rule, count)
        if self.rule == 'without_positions':
            return [not has for has in positions_of_layers(config)]
        if self.rule == 'sliding_window_pattern':
            return all_but_every(whole(self.rule, config[self.rule]), count)
        first = whole('max_window_layers', config['max_window_layers'], least=0)
        if self.rule == 'from_max_window_layers':
            return [layer >= first for layer in range(count)]
        assert self.rule == 'even_below_max_window_layers', self.rule
        return [layer % 2 == 0 and layer < first for layer in range(count)]

    def write(self, arch: Architecture) -> dict[str, Any]:
        config: dict[str, Any] = {'sliding_window': arch.attention.window or None}
        if self.switch:
            config['use_sliding_window'] = arch.attention.window > 0
        if 'layer_types' in self.more:
            config['layer_types'] = [WINDOW if window else FULL for window in arch.windows]
        return config


def window_options(windows: list[bool], size: int) -> Options:
    """The options for a window of this size in some layers. `windows`: whether each layer has it."""
    if not any(windows):
        return {'attention.window': 0, 'attention.global_every': 0}
    every = windows.index(False) + 1 if False in windows else 0
    if windows == all_but_every(every, len(windows)):
        return {'attention.window': size, 'attention.global_every': every}
    types = tuple('window' if has else 'full' for has in windows)
    return {'attention.window': size, 'attention.global_every': 0, 'layer_types': types}


def types_of_layers(types: Any, count: int, local: str) -> list[bool]:
    """Whether each layer has this type in layer_types; the others must have full attention. Raises UserError."""
    if not isinstance(types, list) or len(types) != count:
        raise wrong('layer_types', types, f'a list of {count}, the type of each layer')
    strange = [str(kind)[:40] for kind in types if kind not in (FULL, local)]
    if strange:
        raise UserError(f'config.json: layer_types has {strange[0]}, which is not supported')
    return [kind == local for kind in types]


def all_but_every(n: int, count: int) -> list[bool]:
    """False for every n-th of `count` layers, True for the others. 0: True for all."""
    return [not n or (layer + 1) % n != 0 for layer in range(count)]


def positions_of_layers(config: Mapping[str, Any], loose: bool = False) -> list[bool]:
    """Whether each layer has positions, from no_rope_layers: 1 means that it has them.

    Args:
        config: config.json with all defaults.
        loose: an empty list stands for null, and a longer one is cut, as in the class of Llama 4; that of SmolLM3 does
            not.

    Raises:
        UserError: the field has another value.
    """
    count = whole('num_hidden_layers', config['num_hidden_layers'])
    said = config['no_rope_layers']
    if said is None or (loose and said == []):
        return all_but_every(whole('no_rope_layer_interval', config['no_rope_layer_interval']), count)
    if loose and isinstance(said, list):
        said = said[:count]
    if (
        not isinstance(said, list)
        or len(said) != count
        or any(type(one) is not int or one not in (0, 1) for one in said)
    ):
        raise wrong('no_rope_layers', said, f'a list of {count}, 1 for each layer with positions and 0 for the others')
    return [one == 1 for one in said]


def nope_every(has_positions: list[bool]) -> int:
    """The n if every n-th layer has no positions; 0: all have them. Raises UserError if it is not every n-th."""
    every = has_positions.index(False) + 1 if False in has_positions else 0
    if has_positions != all_but_every(every, len(has_positions)):
        raise UserError('config.json: no_rope_layers must repeat a pattern in which every n-th layer has no positions')
    return every


def no_rope_layers(arch: Architecture) -> list[int]:
    """The field of this name: 1 for each layer with positions, and 0 for the others."""
    return [int(has) for has in all_but_every(arch.rope.nope_every, arch.n_layers)]


@dataclass(frozen=True)
class NoPositions(Field):
    """The layers without positions. SmolLM3."""

    fields = ('no_rope_layers', 'no_rope_layer_interval')

    def read(self, config: Mapping[str, Any]) -> Options:
        return {'rope.nope_every': nope_every(positions_of_layers(config))}

    def write(self, arch: Architecture) -> dict[str, Any]:
        return {'no_rope_layers': no_rope_layers(arch), 'no_rope_layer_interval': arch.rope.nope_every}


@dataclass(frozen=True)
class Expansion(Field):
    """The width of all heads of a state-space model over that of the decoder, which its class requires."""

    fields = ('expand', 'time_step_limit')

    def read(self, config: Mapping[str, Any]) -> Options:
        heads, width = (whole(name, config[name]) for name in ('num_heads', 'head_dim'))
        if whole('expand', config['expand']) * whole('hidden_size', config['hidden_size']) != heads * width:
            raise wrong(
                'expand',
                config['expand'],
                f'num_heads * head_dim / hidden_size, {heads * width} / {config["hidden_size"]}',
            )
        limit = config.get('time_step_limit')
        if limit not in (None, [0.0, math.inf], [0.0, {'__float__': 'Infinity'}]):
            raise wrong('time_step_limit', limit, '[0.0, Infinity]: pretrax does not limit steps')
        return {}

    def write(self, arch: Architecture) -> dict[str, Any]:
        expand = arch.recurrent.n_heads * arch.recurrent.d_head / arch.d_model
        return {'expand': int(expand) if expand.is_integer() else expand}


@dataclass(frozen=True)
class DeltaLayers(Field):
    """Which layers have a gated delta net, and which attention."""

    fields = ('layer_types', 'full_attention_interval')

    def read(self, config: Mapping[str, Any]) -> Options:
        count, types = whole('num_hidden_layers', config['num_hidden_layers']), config.get('layer_types')
        if types is None:
            every = whole('full_attention_interval', config.get('full_attention_interval', 4))
            types = [LINEAR if is_linear else FULL for is_linear in all_but_every(every, count)]
        linear = types_of_layers(types, count, LINEAR)
        if all(linear):
            raise UserError(
                f'config.json: all {count} layers have {LINEAR} (layer_types, or full_attention_interval without it)\n'
                f'pretrax reads this class only if some layers have {FULL}'
            )
        ours = tuple('delta' if is_linear else 'full' for is_linear in linear)
        cycle = next(n for n in range(1, count + 1) if all(ours[i] == ours[i % n] for i in range(count)))
        return {'layer_types': ours[:cycle]}

    def write(self, arch: Architecture) -> dict[str, Any]:
        return {'layer_types': [LINEAR if kind.mixer == 'delta' else FULL for kind in arch.kinds]}
