"""The names that pretrax 0.1 had for the decoder's options, whose section `model:` was flat. No JAX here.

A configuration writes `model.attention.window`, or in dotted tables 'attention.window'. Version 0.1 wrote
`model.window`. `RENAMED` has every name that differs.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_OF_ATTENTION = (
    'n_heads', 'n_kv_heads', 'd_head', 'qk_norm', 'qkv_bias', 'o_bias', 'window', 'window_type', 'global_every',
    'query_pre_attn_scalar', 'temperature_length', 'context',
)  # fmt: skip
_LATENT = ('kv_rank', 'q_rank', 'd_rope', 'd_nope')
_OF_EXPERTS = ('n_experts', 'experts_per_token', 'dense_layers', 'd_ff_dense', 'd_shared', 'shared_gate', 'capacity')
_TO_SECTIONS: dict[str, dict[str, str]] = {
    'norm': {'norm': 'kind', 'norm_eps': 'eps', 'norm_offset': 'offset', 'norm_bias': 'bias'},
    'block': {
        'block_norms': 'norms', 'parallel_block': 'parallel', 'shared_norm': 'shared_norm',
        'residual_multiplier': 'residual_multiplier', 'residual_dropout': 'dropout',
    },
    'attention': {
        **{name: name for name in _OF_ATTENTION}, 'attention_temperature': 'temperature',
        'attention_softcap': 'softcap',
        'attention_sinks': 'sinks', 'attention_gate': 'gate', 'attention_dropout': 'dropout', 'attention': 'kernel',
    },
    'attention.latent': {name: name for name in _LATENT},
    'rope': {
        'rope_base': 'base', 'local_rope_base': 'local_base', 'rope_scaling': 'scaling', 'rotary_fraction': 'fraction',
        'nope_every': 'nope_every', 'nope_global': 'nope_global',
    },
    'recurrent': {
        'linear_heads': 'n_heads', 'linear_key_heads': 'n_key_heads', 'linear_d_head': 'd_head',
        'linear_d_key': 'd_key',
        'conv_width': 'conv_width', 'conv_bias': 'conv_bias',
    },
    'feed_forward': {
        'd_ff': 'd_ff', 'activation': 'activation', 'swiglu_limit': 'swiglu_limit', 'mlp_bias': 'bias',
    },
    'embedding': {
        'tied': 'tied', 'scale_embedding': 'scale', 'embedding_multiplier': 'multiplier',
        'embedding_dropout': 'dropout',
    },
    'head': {'unembed_bias': 'bias', 'final_softcap': 'softcap', 'logit_multiplier': 'multiplier'},
    'experts': {**{name: name for name in _OF_EXPERTS}, 'expert_every': 'every'},
    'experts.router': {
        'router_scores': 'scores', 'router_bias': 'bias', 'router_bias_rate': 'bias_rate',
        'n_expert_groups': 'n_groups',
        'groups_per_token': 'groups_per_token', 'group_scores': 'group_scores', 'normalize_router': 'normalize',
        'router_scale': 'scale', 'weigh_inputs': 'weigh_inputs', 'balance_loss': 'balance_loss',
        'balance_over': 'balance_over', 'router_z_loss': 'z_loss',
    },
    'multi_token': {'mtp_layers': 'n_layers', 'mtp_loss': 'loss'},
    'init': {'init': 'kind', 'init_std': 'std'},
    'pipeline': {'pipeline_rounds': 'rounds', 'pipeline_schedule': 'schedule'},
}  # fmt: skip
SECTIONS = tuple(_TO_SECTIONS)
# Former name -> dotted key below `model`. Names that are not here are the same.
RENAMED = {name: f'{section}.{key}' for section, names in _TO_SECTIONS.items() for name, key in names.items()}


def is_former(name: str, value: Any) -> bool:
    """Whether a key of `model:` with this value is one of pretrax 0.1.

    `attention`, `norm` and `init` were options, and are sections now. A mapping is a section; anything else is the
    option.
    """
    return name in RENAMED and not (name in SECTIONS and isinstance(value, Mapping))


def nest(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with dotted keys or former names, as the section `model:`. Keys that are nested already stay."""
    nested: dict[str, Any] = {}
    for path, value in _paths(options, ''):
        node = nested
        *sections, last = path.split('.')
        for section in sections:
            below = node.get(section)
            node[section] = node = below if isinstance(below, dict) else {}
        node[last] = value
    return nested


def dotted(section: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the section `model:` by dotted key, the inverse of `nest`. A null `latent` is a `kv_rank` of 0."""
    options = dict(_paths(section, ''))
    if options.get('attention.latent', 0) is None:
        del options['attention.latent']
        options |= dict.fromkeys(f'attention.latent.{name}' for name in _LATENT) | {'attention.latent.kv_rank': 0}
    return options


def _paths(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The dotted key below `model` and the value of every option; a section without options has its own path."""
    for key, value in values.items():
        path = f'{prefix}{key}'
        if path in SECTIONS and isinstance(value, Mapping):
            yield from _paths(value, f'{path}.')
        else:
            yield path if prefix else RENAMED.get(key, key), value
