"""Fields of config.json for latent attention and experts as in DeepSeek V2 and V3. Imports no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrax.huggingface.fields import Field, Options, number, whole, wrong
from pretrax.model.architecture import Architecture

# Option -> its field
_WIDTHS = {
    'attention.latent.kv_rank': 'kv_lora_rank',
    'attention.latent.d_nope': 'qk_nope_head_dim',
    'attention.latent.d_rope': 'qk_rope_head_dim',
    'attention.d_head': 'v_head_dim',
}


@dataclass(frozen=True)
class LatentAttention(Field):
    """The widths of latents and heads. The files store rotated pairs next to each other (names.py)."""

    fields = (
        *_WIDTHS.values(),
        'q_lora_rank',
        'num_attention_heads',
        'num_key_value_heads',
        'rope_interleave',
        'head_dim',
        'qk_head_dim',
    )

    def read(self, config: Mapping[str, Any]) -> Options:
        heads = whole('num_attention_heads', config['num_attention_heads'])
        if config['num_key_value_heads'] not in (None, heads):
            raise wrong('num_key_value_heads', config['num_key_value_heads'], f'{heads}, the number of heads')
        if config.get('rope_interleave', True) is not True:
            raise wrong('rope_interleave', config['rope_interleave'], 'true')
        q_rank = config['q_lora_rank']
        return {
            'attention.n_heads': heads,
            'attention.latent.q_rank': 0 if q_rank is None else whole('q_lora_rank', q_rank),
            **{option: whole(field, config[field]) for option, field in _WIDTHS.items()},
        }

    def write(self, arch: Architecture) -> dict[str, Any]:
        if not arch.attention.latent.kv_rank:
            return {}
        return {
            'num_attention_heads': arch.attention.n_heads,
            'num_key_value_heads': arch.attention.n_kv_heads,
            'q_lora_rank': arch.attention.latent.q_rank or None,
            **{field: arch.option(option) for option, field in _WIDTHS.items()},
        }


@dataclass(frozen=True)
class ExtraLayers(Field):
    """Modules of multi-token prediction after the last layer; `HuggingFaceModel.with_modules` adds them."""

    fields = ('num_nextn_predict_layers',)

    def write(self, arch: Architecture) -> dict[str, Any]:
        return {'num_nextn_predict_layers': arch.multi_token.n_layers}


@dataclass(frozen=True)
class DeepSeekExperts(Field):
    """Experts with shared experts of the same width, dense layers first, and groups.

    Args:
        scores: of the router, as the files name them.
        grouped: the method by which experts are chosen from groups, as the files name it.
        greedy: the same without groups; None: there are always groups.
    """

    scores: str
    grouped: str
    greedy: str | None = None

    fields = (
        'moe_intermediate_size',
        'intermediate_size',
        'n_shared_experts',
        'first_k_dense_replace',
        'n_group',
        'topk_group',
        'topk_method',
        'scoring_func',
        'aux_loss_alpha',
        'seq_aux',
        'moe_layer_freq',
        'ep_size',
    )

    def read(self, config: Mapping[str, Any]) -> Options:
        method = config.get('topk_method', self.grouped)
        if method not in (self.grouped, self.greedy):
            raise wrong('topk_method', method, ' or '.join(repr(one) for one in (self.grouped, self.greedy) if one))
        for field, value in {'scoring_func': self.scores, 'moe_layer_freq': 1, 'seq_aux': True}.items():
            if config.get(field, value) != value:
                raise wrong(field, config[field], repr(value))
        width = whole('moe_intermediate_size', config['moe_intermediate_size'])
        shared, dense = config['n_shared_experts'] or 0, config['first_k_dense_replace'] or 0
        options: Options = {
            'feed_forward.d_ff': width,
            'experts.d_shared': whole('n_shared_experts', shared, 0) * width,
            'experts.router.balance_over': 'sequence',
            'experts.router.balance_loss': number('aux_loss_alpha', config.get('aux_loss_alpha', 0.0), above=False),
        }
        if whole('first_k_dense_replace', dense, 0):
            options |= {
                'experts.dense_layers': dense,
                'experts.d_ff_dense': whole('intermediate_size', config['intermediate_size']),
            }
        groups = {'experts.router.n_groups': 'n_group', 'experts.router.groups_per_token': 'topk_group'}
        if method == self.grouped:
            options |= {name: whole(field, config[field] or 1) for name, field in groups.items()}
        return options

    def write(self, arch: Architecture) -> dict[str, Any]:
        if not arch.experts.n_experts:
            return {}
        grouped = self.greedy is None or arch.experts.router.n_groups > 1
        return {
            'moe_intermediate_size': arch.feed_forward.d_ff,
            'n_shared_experts': arch.experts.d_shared // arch.feed_forward.d_ff,
            'first_k_dense_replace': len(arch.experts.dense_layers),
            'n_group': arch.experts.router.n_groups,
            'topk_group': arch.experts.router.groups_per_token,
            'topk_method': self.grouped if grouped else self.greedy,
            'scoring_func': self.scores,
            'aux_loss_alpha': arch.experts.router.balance_loss,
            'seq_aux': True,
            'moe_layer_freq': 1,
            **({'intermediate_size': arch.experts.d_ff_dense} if arch.experts.d_ff_dense else {}),
        }
