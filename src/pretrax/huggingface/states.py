"""Fields of config.json for layers with a state: gated delta nets and state-space models. Imports no JAX."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrax.errors import UserError
from pretrax.huggingface.fields import Field, Options, whole, wrong
from pretrax.huggingface.layers import FULL, LINEAR, all_but_every, types_of_layers
from pretrax.model.architecture import Architecture


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
