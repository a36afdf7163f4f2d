"""Fields of config.json for the layers and experts of Llama 4. Imports no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrax.huggingface.fields import Field, Options, number, whole, wrong
from pretrax.huggingface.layers import (
    FULL,
    no_rope_layers,
    nope_every,
    positions_of_layers,
    types_of_layers,
    window_options,
)
from pretrax.model.architecture import Architecture

CHUNKED = 'chunked_attention'


@dataclass(frozen=True)
class ChunkedLayers(Field):
    """Layers with chunked attention, and layers without positions, whose queries have a temperature."""

    fields = (
        'attention_chunk_size',
        'layer_types',
        'no_rope_layers',
        'no_rope_layer_interval',
        'attn_temperature_tuning',
        'attn_scale',
        'floor_scale',
    )

    def read(self, config: Mapping[str, Any]) -> Options:
        count = whole('num_hidden_layers', config['num_hidden_layers'])
        has_positions = positions_of_layers(config, loose=True)
        types = config['layer_types']
        chunked = has_positions if types is None else types_of_layers(types, count, CHUNKED)
        options: Options = {
            'rope.nope_every': nope_every(has_positions),
            **window_options(chunked, whole('attention_chunk_size', config['attention_chunk_size'])),
        }
        options['attention.window_type'] = 'chunked' if any(chunked) else 'sliding'
        on = config['attn_temperature_tuning']
        if not isinstance(on, bool):
            raise wrong('attn_temperature_tuning', on, 'true or false')
        scale = number('attn_scale', config['attn_scale'], above=False) if on else 0.0
        if not scale or all(has_positions):
            return options | {'attention.temperature': 0.0}
        length = whole('floor_scale', config['floor_scale'])
        return options | {'attention.temperature': scale, 'attention.temperature_length': length}

    def write(self, arch: Architecture) -> dict[str, Any]:
        return {
            'attention_chunk_size': arch.attention.window or arch.max_sequence_length,
            'layer_types': [CHUNKED if window else FULL for window in arch.windows],
            'no_rope_layers': no_rope_layers(arch),
            'no_rope_layer_interval': arch.rope.nope_every or arch.n_layers + 1,
            'attn_temperature_tuning': arch.attention.temperature > 0,
            'attn_scale': arch.attention.temperature,
            'floor_scale': arch.attention.temperature_length,
        }


@dataclass(frozen=True)
class InterleavedExperts(Field):
    """Which layers have experts, their widths, and a shared expert of the same width."""

    fields = (
        'intermediate_size',
        'intermediate_size_mlp',
        'num_local_experts',
        'num_experts_per_tok',
        'moe_layers',
        'interleave_moe_layer_step',
        'router_aux_loss_coef',
    )

    def read(self, config: Mapping[str, Any]) -> Options:
        count = whole('num_hidden_layers', config['num_hidden_layers'])
        step, said = whole('interleave_moe_layer_step', config['interleave_moe_layer_step']), config['moe_layers']
        if said is not None and not isinstance(said, list):
            raise wrong('moe_layers', said, 'a list of numbers of layers, or null')
        every = list(range(step - 1, count, step))
        layers = every if said is None else sorted({i for i in said if whole('moe_layers', i, 0) < count})
        dense = whole('intermediate_size_mlp', config['intermediate_size_mlp'])
        if not layers:
            return {'experts.n_experts': 0, 'feed_forward.d_ff': dense}
        width = whole('intermediate_size', config['intermediate_size'])
        options: Options = {
            'experts.n_experts': whole('num_local_experts', config['num_local_experts']),
            'experts.experts_per_token': whole('num_experts_per_tok', config['num_experts_per_tok']),
            'feed_forward.d_ff': width,
            'experts.d_shared': width,
            'experts.router.balance_over': 'batch',
            'experts.router.balance_loss': number('router_aux_loss_coef', config['router_aux_loss_coef'], above=False),
        }
        if len(layers) == count:
            return options
        if layers == every:
            return options | {'experts.every': step, 'experts.d_ff_dense': dense}
        return options | {
            'experts.dense_layers': tuple(sorted(set(range(count)) - set(layers))),
            'experts.d_ff_dense': dense,
        }

    def write(self, arch: Architecture) -> dict[str, Any]:
        if not arch.experts.n_experts:
            return {
                'moe_layers': [],
                'intermediate_size_mlp': arch.feed_forward.d_ff,
                'intermediate_size': arch.feed_forward.d_ff,
            }
        return {
            'intermediate_size': arch.feed_forward.d_ff,
            'intermediate_size_mlp': arch.experts.d_ff_dense or arch.feed_forward.d_ff,
            'num_local_experts': arch.experts.n_experts,
            'num_experts_per_tok': arch.experts.experts_per_token,
            'moe_layers': [i for i, kind in enumerate(arch.kinds) if kind.experts],
            'interleave_moe_layer_step': arch.experts.every,
            'router_aux_loss_coef': arch.experts.router.balance_loss,
        }
