"""Model families as rows of choices, and the architecture that follows from options, preset and family.

A family fixes the parts of the decoder. A preset (presets.py) is a family with published sizes. Every choice can be
overridden: `model: {preset: gpt2-124m, n_layers: 6}`. No JAX here, so that configurations are checked quickly.
docs/models.md has the table of families. Names of options are those of the tables (option_names.py).
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pretrax.errors import UserError
from pretrax.model.architecture import DROPOUT, UNGATED, Architecture
from pretrax.model.family_checks import NO_EXPERTS, check_choices
from pretrax.model.option_names import key_of
from pretrax.model.presets import PRESETS
from pretrax.model.rope_scaling import RopeScaling

if TYPE_CHECKING:
    from pretrax.model.options import TransformerOptions

# A choice that a family leaves out is that of 'llama', or the default in _DEFAULTS.
_LLAMA = {
    'norm': 'rmsnorm', 'norm_eps': 1e-5, 'positions': 'rope', 'activation': 'swiglu', 'bias': False, 'tied': False,
}  # fmt: skip
_QWEN2 = _LLAMA | {'norm_eps': 1e-6, 'qkv_bias': True, 'rope_base': 1e6}
_QWEN3 = _LLAMA | {'norm_eps': 1e-6, 'qk_norm': 'head', 'rope_base': 1e6}
_PARALLEL = _LLAMA | {'norm': 'layernorm', 'parallel_block': True}
_GEMMA = _LLAMA | {
    'norm_eps': 1e-6, 'norm_offset': 1.0, 'activation': 'geglu', 'tied': True, 'scale_embedding': True,
}  # fmt: skip
_SIGMOID = {'router_scores': 'sigmoid', 'router_bias': True, 'group_scores': 'top2'}
_QWEN3_NEXT = _QWEN3 | {
    'norm_offset': 1.0, 'layer_types': ('delta', 'delta', 'delta', 'full'), 'attention_gate': True, 'rope_base': 1e7,
    'rotary_fraction': 0.25,
}  # fmt: skip
_DEEPSEEK = _LLAMA | {'norm_eps': 1e-6, 'd_head': 128, 'kv_rank': 512, 'd_rope': 64}

FAMILIES: dict[str, dict[str, Any]] = {
    # Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; the released code's choices
    'gpt2': {
        'norm': 'layernorm', 'norm_eps': 1e-5, 'positions': 'learned', 'activation': 'gelu', 'bias': True, 'tied': True,
    },
    # Touvron et al. 2023, arXiv:2302.13971, section 2.2. SmolLM is of this family too.
    'llama': _LLAMA,
    # Jiang et al. 2023, arXiv:2310.06825, section 2. The window is its first release's; later ones have none.
    'mistral': _LLAMA,
    # Yang et al. 2024, arXiv:2407.10671, section 2.2.1, and the released configurations
    'qwen2': _QWEN2,
    # Qwen Team 2025, arXiv:2505.09388, section 2
    'qwen3': _QWEN3,
    # Gemma Team 2024, arXiv:2403.08295, section 2, and the released code
    'gemma': _GEMMA,
    # Gemma Team 2024, arXiv:2408.00118, section 2
    'gemma2': _GEMMA | {
        'block_norms': 'sandwich', 'window': 4096, 'global_every': 2, 'attention_softcap': 50.0, 'final_softcap': 30.0,
        'query_pre_attn_scalar': 256.0,
    },
    # Gemma Team 2025, arXiv:2503.19786, section 2.1
    'gemma3': _GEMMA | {
        'block_norms': 'sandwich', 'qk_norm': 'head', 'window': 1024, 'global_every': 6, 'rope_base': 1e6,
        'local_rope_base': 1e4, 'query_pre_attn_scalar': 256.0,
    },
    # OLMo Team 2025, arXiv:2501.00656, section 3
    'olmo2': _LLAMA | {
        'norm_eps': 1e-6, 'block_norms': 'post', 'qk_norm': 'full', 'rope_base': 500000.0, 'init': 'normal',
    },
    # HuggingFaceTB/SmolLM3-3B: every fourth layer without positions (Yang et al. 2025, arXiv:2501.18795)
    'smollm3': _LLAMA | {'norm_eps': 1e-6, 'tied': True, 'nope_every': 4, 'rope_base': 5e6},
    # Jiang et al. 2024, arXiv:2401.04088, section 2
    'mixtral': _LLAMA | {'rope_base': 1e6, 'n_experts': 8, 'experts_per_token': 2},
    # Yang et al. 2024, arXiv:2407.10671, section 2.2.2, and the released code
    'qwen2-moe': _QWEN2 | {
        'n_experts': 64, 'experts_per_token': 8, 'shared_gate': True, 'normalize_router': False,
    },
    # Qwen Team 2025, arXiv:2505.09388, section 2
    'qwen3-moe': _QWEN3 | {'n_experts': 128, 'experts_per_token': 8},
    # DeepSeek-AI 2024, arXiv:2405.04434, section 2, and the released configurations
    'deepseek-v2': _DEEPSEEK | {
        'n_experts': 160, 'experts_per_token': 6, 'normalize_router': False, 'balance_loss': 0.001,
    },
    # DeepSeek-AI 2024, arXiv:2412.19437, section 2.1 (without multi-token prediction). Kimi K2 and Moonlight are of it too.
    'deepseek-v3': _DEEPSEEK | {
        **_SIGMOID, 'n_experts': 256, 'experts_per_token': 8, 'balance_loss': 0.0001,
    },
    # GLM-4.5 Team 2025, arXiv:2508.06471, section 2.1, and the released configurations
    'glm4-moe': _LLAMA | _SIGMOID | {
        'qkv_bias': True, 'rotary_fraction': 0.5, 'rope_base': 1e6, 'n_experts': 128, 'experts_per_token': 8,
        'balance_loss': 0.0001,
    },
    # MiniMax 2025, MiniMaxAI/MiniMax-M2: its configuration and code
    'minimax-m2': _LLAMA | _SIGMOID | {
        'norm_eps': 1e-6, 'qk_norm': 'full', 'rotary_fraction': 0.5, 'rope_base': 5e6, 'n_experts': 256,
        'experts_per_token': 8, 'balance_loss': 0.001,
    },
    # Meta 2025, "The Llama 4 herd", and the released code
    'llama4': _LLAMA | {
        'rope_base': 500000.0, 'nope_every': 4, 'window': 8192, 'window_type': 'chunked', 'global_every': 4, 'qk_norm': 'l2',
        'attention_temperature': 0.1, 'n_experts': 16, 'experts_per_token': 1, 'router_scores': 'sigmoid',
        'normalize_router': False, 'weigh_inputs': True,
    },
    # OpenAI 2025, arXiv:2508.10925, section 2, and the released code
    'gpt-oss': _LLAMA | {
        'attention_sinks': True, 'window': 128, 'global_every': 2, 'qkv_bias': True, 'o_bias': True, 'mlp_bias': True,
        'activation': 'swiglu_oai', 'n_experts': 32, 'experts_per_token': 4, 'rope_base': 150000.0, 'rope_scaling': {
            'kind': 'yarn', 'factor': 32.0, 'original_length': 4096, 'truncate': False,
        },
    },
    # Abdin et al. 2024, arXiv:2404.14219, section 2: Llama's block. Phi-4 is of this family too.
    'phi3': _LLAMA,
    # Muennighoff et al. 2024, arXiv:2409.02060, section 2
    'olmoe': _LLAMA | {'qk_norm': 'full', 'n_experts': 64, 'experts_per_token': 8, 'normalize_router': False},
    # OLMo Team 2025, arXiv:2512.13961, section 3.1, and the released code
    'olmo3': _LLAMA | {
        'norm_eps': 1e-6, 'block_norms': 'post', 'qk_norm': 'full', 'rope_base': 500000.0,
        'local_rope_base': 500000.0, 'window': 4096,
        'global_every': 4,
    },
    # Black et al. 2022, arXiv:2204.06745, section 2.1; Biderman et al. 2023, arXiv:2304.01373, section 2.2 (Pythia)
    'gpt-neox': _PARALLEL | {'activation': 'gelu_erf', 'bias': True, 'rotary_fraction': 0.25},
    # Li et al. 2023, arXiv:2309.05463, section 2, and the released code of Phi-1, 1.5 and 2
    'phi': _PARALLEL | {
        'activation': 'gelu', 'bias': True, 'rotary_fraction': 0.5, 'shared_norm': True, 'unembed_bias': True,
    },
    # Bellagente et al. 2024, arXiv:2402.17834, section 3.2
    'stablelm': _LLAMA | {'norm': 'layernorm', 'norm_bias': True, 'rotary_fraction': 0.25},
    # Granite Team 2024, "Granite 3.0 Language Models", section 3
    'granite': _LLAMA,
    # Cohere 2025, arXiv:2504.00698, section 2.1, and the released code
    'cohere2': _PARALLEL | {
        'activation': 'swiglu', 'shared_norm': True, 'tied': True, 'rope_base': 50000.0, 'window': 4096,
        'global_every': 4, 'nope_global': True,
    },
    # Parmar et al. 2024, arXiv:2402.16819, section 2; Muralidharan et al. 2024, arXiv:2407.14679 (Minitron)
    'nemotron': _LLAMA | {
        'norm': 'layernorm', 'norm_offset': 1.0, 'norm_bias': True, 'activation': 'relu2', 'rotary_fraction': 0.5,
    },
    # LG AI Research 2025, arXiv:2507.11407, section 2.1
    'exaone4': _LLAMA | {'block_norms': 'post', 'qk_norm': 'head', 'rope_base': 1e6, 'nope_global': True},
    # Qwen Team 2025, "Qwen3-Next", and the released code; gated delta nets: Yang et al. 2024, arXiv:2412.06464
    'qwen3-next': _QWEN3_NEXT | {'n_experts': 512, 'experts_per_token': 10, 'shared_gate': True},
    # Qwen Team 2026, Qwen/Qwen3.5-*: the released configurations and code (the text models)
    'qwen3.5': _QWEN3_NEXT,
    'qwen3.5-moe': _QWEN3_NEXT | {'n_experts': 256, 'experts_per_token': 8, 'shared_gate': True},
    # Dao and Gu 2024, arXiv:2405.21060, section 7.1, and the released code: no attention and no feed-forward
    'mamba2': _LLAMA | {
        'layer_types': ('mamba',), 'd_ff': 0, 'linear_d_head': 64, 'linear_d_key': 128, 'linear_key_heads': 1,
        'conv_bias': True,
    },
}  # fmt: skip

FAMILY_NAMES = tuple(FAMILIES)
# Named activations of a layer, in the order in which they are computed. All of them can be recomputed from 'input', which is
# always kept, on the device or in host memory.
SAVED_NAMES = ('q', 'k', 'v', 'attention', 'attention_out', 'up', 'gate', 'mlp_out')
SAVE_PRESETS: dict[str, tuple[str, ...]] = {
    'none': (),
    'attention': (
        'q',
        'k',
        'v',
        'attention',
    ),  # the inputs of its backward pass, so that attention is not computed twice
    'dots': ('q', 'k', 'v', 'attention_out', 'up', 'gate', 'mlp_out'),  # results of products with weights
    'full': SAVED_NAMES,
}


_DEFAULTS: dict[str, Any] = {
    'norm_offset': 0.0, 'block_norms': 'pre', 'qk_norm': 'none', 'rope_base': 10000.0, 'local_rope_base': None,
    'rope_scaling': None, 'nope_every': 0, 'window': 0, 'window_type': 'sliding', 'global_every': 0,
    'attention_temperature': 0.0, 'temperature_length': 8192, 'query_pre_attn_scalar': None,
    'attention_softcap': 0.0, 'final_softcap': 0.0, 'scale_embedding': False, 'layer_types': None,
    'attention_sinks': False, 'swiglu_limit': 7.0,
    'parallel_block': False, 'shared_norm': False, 'rotary_fraction': 1.0, 'nope_global': False, 'unembed_bias': False,
    'embedding_multiplier': 1.0, 'residual_multiplier': 1.0, 'logit_multiplier': 1.0,
    'kv_rank': 0, 'q_rank': 0, 'd_rope': 0, 'd_nope': 0, 'mtp_layers': 0, 'mtp_loss': 0.3, 'init': 'scaled', 'mup': None,
    'attention_gate': False, 'linear_d_head': 128, 'linear_d_key': 128, 'conv_width': 4, 'conv_bias': False,
}  # fmt: skip
_ATTENTION_SIZES = ('n_heads', 'n_kv_heads', 'd_head')
# Options without effect if no layer has attention
OF_ATTENTION = (
    *_ATTENTION_SIZES, 'attention_dropout', 'kv_rank', 'q_rank', 'd_rope', 'd_nope', 'qk_norm', 'qkv_bias', 'o_bias',
    'rope_base', 'local_rope_base', 'rope_scaling', 'rotary_fraction', 'nope_every', 'nope_global', 'window', 'window_type',
    'global_every', 'query_pre_attn_scalar', 'attention_temperature', 'temperature_length', 'attention_softcap',
    'attention_gate', 'attention_sinks',
)  # fmt: skip
_LINEAR_SIZES = ('linear_heads', 'linear_key_heads', 'linear_d_head', 'linear_d_key')


def choose(said: Mapping[str, Any]) -> dict[str, Any]:
    """The options, then the preset, then the family; and the sizes that follow from them without the data.

    Raises:
        UserError: unknown preset, a missing size, or choices that contradict each other.
    """
    preset = said.get('preset')
    if preset is not None and preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, 1)
        hint = f'; did you mean {near[0]}?' if near else ''
        raise UserError(f"preset: there is no '{preset}'{hint}\nknown: {', '.join(PRESETS)}")
    chosen = {**PRESETS.get(preset or '', {}), **said}
    family = chosen.get('family', 'llama')
    chosen = {'n_kv_heads': chosen.get('n_heads'), **_DEFAULTS, **NO_EXPERTS, **FAMILIES[family], **chosen}
    for name in ('qkv_bias', 'o_bias', 'mlp_bias', 'norm_bias'):
        chosen.setdefault(name, chosen['bias'])
    for name in DROPOUT:
        chosen.setdefault(name, chosen['dropout'])
    if chosen['rope_scaling'] is not None:
        scaling = RopeScaling.model_validate(chosen['rope_scaling'])
        chosen['rope_scaling'] = None if scaling.kind == 'none' else scaling
    if chosen['layer_types'] and not said.get('layer_types'):
        chosen['layer_types'] = chosen['layer_types'][: chosen.get('n_layers')]
    has_attention = any(mixer in ('full', 'window') for mixer in chosen['layer_types'] or ('full',))
    needed = 'n_layers', 'd_model', *['n_heads'] * has_attention
    if missing := [name for name in needed if name not in chosen]:
        keys = ', '.join(key_of(name).removeprefix('model.') for name in missing)
        raise UserError(f'model: {keys} missing\ngive a preset, or n_layers, d_model and attention.n_heads')
    _choose_mixers(chosen, said, has_attention)
    if 'd_head' not in chosen:
        if chosen['d_model'] % chosen['n_heads']:
            raise UserError(
                f'model.d_model = {chosen["d_model"]} is not divisible by model.attention.n_heads = {chosen["n_heads"]}\n'
                'give model.attention.d_head, or make model.d_model a multiple of model.attention.n_heads'
            )
        chosen['d_head'] = chosen['d_model'] // chosen['n_heads']
    if has_attention and not chosen.get('d_ff', 1) and 'd_ff' not in said:
        raise UserError(
            f'model.family = {family} has layers without a feed-forward, and model.layer_types gives some attention\n'
            'give model.feed_forward.d_ff; model.feed_forward.d_ff=0 leaves it out'
        )
    if 'd_ff' not in chosen:  # gated: 2/3 of 4 d_model, so that three matrices cost what two did (Shazeer 2020)
        gated = math.ceil(8 * chosen['d_model'] / 3 / 64) * 64
        chosen['d_ff'] = 4 * chosen['d_model'] if chosen['activation'] in UNGATED else gated
    if not chosen['d_ff']:
        of_none = ('mlp_bias', 'parallel_block') if has_attention else ('mlp_bias', 'parallel_block', 'bias')
        if wrong := [name for name in of_none if said.get(name)]:
            raise UserError(
                f'{key_of(wrong[0])} is of the feed-forward, and layers have none (model.feed_forward.d_ff = 0)\nleave it out'
            )
        chosen['mlp_bias'] = False
    check_choices(chosen, said)
    return chosen


def _choose_mixers(chosen: dict[str, Any], said: dict[str, Any], has_attention: bool) -> None:
    """The sizes of attention, of delta nets and of state-space models; 0: no layer has them."""
    if not has_attention:
        for name in OF_ATTENTION:
            if said.get(name) and said[name] != _DEFAULTS.get(name):
                raise UserError(
                    f'{key_of(name)} = {said[name]} is of attention, and no layer has it\n'
                    "leave it out, or give model.layer_types a 'full'"
                )
        chosen.update({name: _DEFAULTS.get(name, 0) for name in OF_ATTENTION}, qkv_bias=False, o_bias=False)
    if not set(chosen['layer_types'] or ()) & {'delta', 'mamba'}:
        for name in (*_LINEAR_SIZES, 'conv_width', 'conv_bias'):
            if said.get(name):
                raise UserError(
                    f'{key_of(name)} = {said[name]} is of delta nets and state-space models, and there are none\n'
                    "leave it out, or give model.layer_types a 'delta' or a 'mamba'"
                )
        chosen.update(dict.fromkeys(_LINEAR_SIZES, 0), conv_bias=False)
        return
    if 'linear_heads' not in chosen:
        heads, width = 2 * chosen['d_model'], chosen['linear_d_head']
        if heads % width:
            raise UserError(
                f'2 model.d_model = {heads} is not divisible by model.recurrent.d_head = {width}\n'
                'give model.recurrent.n_heads, or another model.recurrent.d_head'
            )
        chosen['linear_heads'] = heads // width
    heads = chosen['linear_heads']
    if heads % chosen.setdefault('linear_key_heads', heads):
        raise UserError(
            f'model.recurrent.n_heads = {heads} is not divisible by model.recurrent.n_key_heads = {chosen["linear_key_heads"]}'
        )


def resolve(options: 'TransformerOptions', vocab_size: int, sequence_length: int) -> Architecture:
    """The architecture, from the options, their preset, their family and the data.

    Args:
        options: as configured.
        vocab_size: of the data's tokenizer.
        sequence_length: of the batches.

    Raises:
        UserError: unknown preset, a missing size, sizes that contradict each other, or too few positions for the batches.
    """
    chosen = choose(options.flat())
    chosen.setdefault('vocab_size', vocab_size)
    chosen.setdefault('max_sequence_length', sequence_length)
    if chosen['positions'] == 'learned' and chosen['max_sequence_length'] < sequence_length:
        raise UserError(
            f'batch.sequence_length = {sequence_length} exceeds model.max_sequence_length = '
            f'{chosen["max_sequence_length"]}, the number of learned positions'
        )
    chosen['padded_vocab_size'] = math.ceil(chosen['vocab_size'] / 128) * 128
    return Architecture(**{field.name: chosen[field.name] for field in dataclasses.fields(Architecture)})
