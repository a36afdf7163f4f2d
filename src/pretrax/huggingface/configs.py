"""Converts between Hugging Face's config.json and pretrax's model options, with one table per family. Imports no JAX.

A table is a list of fields. Each field can be read into options and written from an architecture. A field of
config.json that no table row mentions is rejected by name, unless it is harmless (harmless.py): nothing is dropped
silently. A field that is absent has the default of transformers (defaults.yaml).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrax.errors import UserError
from pretrax.huggingface.deepseek import DeepSeekExperts, ExtraLayers, LatentAttention
from pretrax.huggingface.fields import (
    Cap,
    Enumerated,
    Experts,
    Field,
    Lacking,
    Number,
    OfEveryLayer,
    Options,
    SameAs,
    Size,
    Unused,
    number,
    only,
    switch,
    whole,
    wrong,
)
from pretrax.huggingface.gemma4 import GlobalLayers
from pretrax.huggingface.harmless import DROPOUT_FIELDS, dropout_options, is_harmless
from pretrax.huggingface.layers import (
    NoPositions,
    Rope,
    Windows,
    even,
    even_below_max_window_layers,
    every_fourth,
    from_max_window_layers,
    outside_pattern,
    without_positions,
)
from pretrax.huggingface.llama4 import ChunkedLayers, InterleavedExperts
from pretrax.huggingface.quantized import check_quantization
from pretrax.huggingface.states import DeltaLayers, Expansion
from pretrax.huggingface.text_part import text_config
from pretrax.model.architecture import KEYS, Architecture, keys_that_change, resolve
from pretrax.model.choices import TransformerOptions
from pretrax.model.option_names import nest
from pretrax.tables import read_table


@dataclass(frozen=True)
class ConfigTable:
    """A family in Hugging Face: its model type, its class and its fields.

    Args:
        family: the pretrax family whose options the fields override.
        names: key of its table of names in `names.TABLES`.
    """

    model_type: str
    architecture: str
    family: str
    names: str
    fields: tuple[Field, ...]


def _heads(config: Mapping[str, Any]) -> Any:
    return config['num_attention_heads']


_TIED = switch('tie_word_embeddings', 'embedding.tied')
_SWIGLU = Enumerated(
    'hidden_act', (('silu', {'feed_forward.activation': 'swiglu'}), ('swish', {'feed_forward.activation': 'swiglu'}))
)
_GEGLU = ('gelu_pytorch_tanh', {'feed_forward.activation': 'geglu'})
_NO_ATTENTION_BIAS = only('attention_bias', False)
_BIASES = (
    switch('attention_bias', 'attention.qkv_bias', 'attention.o_bias'),
    switch('mlp_bias', 'feed_forward.bias'),
)
_LAYER_NORM = Number('layer_norm_eps', 'norm.eps')


_SIZES: tuple[Field, ...] = (
    Size('vocab_size', 'vocab_size'), Size('hidden_size', 'd_model'), Size('intermediate_size', 'feed_forward.d_ff'),
    Size('num_hidden_layers', 'n_layers'), Size('num_attention_heads', 'attention.n_heads'),
    Size('num_key_value_heads', 'attention.n_kv_heads', null=_heads), Size('head_dim', 'attention.d_head', null=None),
    Size('max_position_embeddings', 'max_sequence_length'), Number('rms_norm_eps', 'norm.eps'),
)  # fmt: skip


def _sizes(*replacing: Size | Number) -> tuple[Field, ...]:
    """The sizes that most families have, with other rows for some of the options."""
    options = {size.option for size in replacing}
    return (*(size for size in _SIZES if getattr(size, 'option', None) not in options), *replacing)


# Of classes for which null is neither a number of heads nor a width of a head
_KV_HEADS, _HEAD_DIM = Size('num_key_value_heads', 'attention.n_kv_heads'), Size('head_dim', 'attention.d_head')
_BALANCE = Number('router_aux_loss_coef', 'experts.router.balance_loss', zero=True)
_TOP_K = switch('norm_topk_prob', 'experts.router.normalize')
_QWEN_MOE = (
    *_sizes(_KV_HEADS, Size('moe_intermediate_size', 'feed_forward.d_ff')), _SWIGLU, _TIED, Rope(), _BALANCE,
    Size('num_experts_per_tok', 'experts.experts_per_token'), Experts(mixed=True),
    _TOP_K,
)  # fmt: skip
_DELTA_NET = (
    DeltaLayers(), Size('linear_num_value_heads', 'recurrent.n_heads'), Size('linear_num_key_heads',
    'recurrent.n_key_heads'),
    Size('linear_value_head_dim', 'recurrent.d_head'), Size('linear_key_head_dim', 'recurrent.d_key'),
    Size('linear_conv_kernel_dim', 'recurrent.conv_width'), _NO_ATTENTION_BIAS,
)  # fmt: skip
_NEOX_SIZES = tuple(
    size for size in _SIZES if not set(size.fields) & {'num_key_value_heads', 'head_dim', 'rms_norm_eps'}
)
_TANH = tuple((name, {'feed_forward.activation': 'gelu'}) for name in ('gelu_new', 'gelu_pytorch_tanh', 'gelu_fast'))
_GEMMA = (
    *_sizes(_KV_HEADS, _HEAD_DIM), _TIED, _NO_ATTENTION_BIAS, only('use_bidirectional_attention', None, False),
)  # fmt: skip
_GEMMA2 = (
    # the class reads hidden_activation; released files have hidden_act too
    *_GEMMA, Enumerated('hidden_activation', (_GEGLU,)), only('hidden_act', 'gelu_pytorch_tanh', 'gelu'),
    Number('query_pre_attn_scalar', 'attention.query_pre_attn_scalar', as_integer=True),
    Cap('attn_logit_softcapping', 'attention.softcap'), Cap('final_logit_softcapping', 'head.softcap'),
    SameAs('sliding_window_size', 'sliding_window'),
)  # fmt: skip
_DEEPSEEK = (
    Size('vocab_size', 'vocab_size'), Size('hidden_size', 'd_model'), Size('num_hidden_layers', 'n_layers'),
    Size('max_position_embeddings', 'max_sequence_length'), Number('rms_norm_eps', 'norm.eps'), _SWIGLU, _TIED, Rope(),
    LatentAttention(), Size('n_routed_experts', 'experts.n_experts'), Size('num_experts_per_tok',
    'experts.experts_per_token'),
    Number('routed_scaling_factor', 'experts.router.scale'), _NO_ATTENTION_BIAS,
)  # fmt: skip
# What the classes of Qwen3.5 do not read: they compute what the first three say. The others are of multi-token
# prediction
_QWEN35 = (
    *_sizes(_KV_HEADS, _HEAD_DIM), _SWIGLU, _TIED, Rope(fraction='partial_rotary_factor', unused=('mrope_section',
    'mrope_interleaved')),
    *_DELTA_NET, only('attn_output_gate', True), only('output_gate_type', 'swish'), only('mamba_ssm_dtype', 'float32'),
    only('mlp_only_layers', []), Unused(('mtp_num_hidden_layers', 'mtp_use_dedicated_embeddings')),
)  # fmt: skip
_QWEN_WINDOWS = Windows(from_max_window_layers, ('layer_types', 'max_window_layers'), switch=True)

_GPT_OSS_ROPE = (
    ('rope_type', 'yarn'), ('factor', 32.0), ('truncate', False), ('original_max_position_embeddings', 4096),
)  # fmt: skip

_GEMMA4_ROPE = (
    ('full_attention', {'rope_type': 'proportional', 'partial_rotary_factor': 0.25, 'rope_theta': 1e6}),
    ('sliding_attention', {'rope_type': 'default', 'rope_theta': 1e4}),
)
# The parts of models of Gemma 3n and Gemma 4 that the decoder lacks
_PLE, _SHARED_KEYS = 'an embedding for each layer', 'layers that read the keys and values of another layer'
_TWO_MLPS = 'a mixture of experts beside a dense feed-forward'

TABLES = (
    ConfigTable(
        'gpt2', 'GPT2LMHeadModel', 'gpt2', 'gpt2',
        (
            Size('vocab_size', 'vocab_size'), Size('n_embd', 'd_model'), Size('n_layer', 'n_layers'),
            Size('n_head', 'attention.n_heads'), Size('n_inner', 'feed_forward.d_ff',
            null=lambda config: 4 * whole('n_embd', config['n_embd'])),
            Size('n_positions', 'max_sequence_length'), Number('layer_norm_epsilon', 'norm.eps'),
            Enumerated(
                'activation_function', (('gelu_new', {'feed_forward.activation': 'gelu'}), ('gelu_pytorch_tanh',
                {'feed_forward.activation': 'gelu'}))
            ),
            _TIED,
            only('scale_attn_weights', True),
            only('scale_attn_by_inverse_layer_idx', False),
            only('reorder_and_upcast_attn', False, True),
        ),
    ),
    ConfigTable(
        'llama', 'LlamaForCausalLM', 'llama', 'llama',
        (*_SIZES, _SWIGLU, _TIED, Rope(), *_BIASES),
    ),
    ConfigTable('mistral', 'MistralForCausalLM', 'mistral', 'llama', (*_SIZES, _SWIGLU, _TIED, Rope(), Windows())),
    ConfigTable(
        'qwen2', 'Qwen2ForCausalLM', 'qwen2', 'qwen2',
        (*_SIZES, _SWIGLU, _TIED, Rope(), _QWEN_WINDOWS, only('use_mrope', False)),
    ),
    ConfigTable(
        'qwen3', 'Qwen3ForCausalLM', 'qwen3', 'qwen3',
        (*_sizes(_HEAD_DIM), _SWIGLU, _TIED, Rope(), _QWEN_WINDOWS, _NO_ATTENTION_BIAS),
    ),
    ConfigTable(
        'mixtral', 'MixtralForCausalLM', 'mixtral', 'mixtral',
        (*_SIZES, _SWIGLU, _TIED, Rope(), Windows(), Experts(), _BALANCE,
         Size('num_local_experts', 'experts.n_experts', alias='num_experts'), Size('num_experts_per_tok',
         'experts.experts_per_token')),
    ),
    ConfigTable(
        'qwen2_moe', 'Qwen2MoeForCausalLM', 'qwen2-moe', 'qwen2-moe',
        (*_QWEN_MOE, Windows(even_below_max_window_layers, ('layer_types', 'max_window_layers'), switch=True),
         Size('num_experts', 'experts.n_experts'), Size('shared_expert_intermediate_size', 'experts.d_shared'),
         only('qkv_bias', True)),
    ),
    ConfigTable(
        'qwen3_moe', 'Qwen3MoeForCausalLM', 'qwen3-moe', 'qwen3-moe',
        # the class has a window in every layer or in none, whatever its files say about single layers
        (*_QWEN_MOE, Windows(ignored=('layer_types', 'max_window_layers'), switch=True), _NO_ATTENTION_BIAS,
         Size('num_experts', 'experts.n_experts', alias='num_local_experts')),
    ),
    ConfigTable(
        'deepseek_v2', 'DeepseekV2ForCausalLM', 'deepseek-v2', 'deepseek',
        # the class normalizes no weights, whatever norm_topk_prob says
        (*_DEEPSEEK, DeepSeekExperts('softmax', 'group_limited_greedy', 'greedy'), only('norm_topk_prob', False),
         only('mlp_bias', False)),
    ),
    ConfigTable(
        'deepseek_v3', 'DeepseekV3ForCausalLM', 'deepseek-v3', 'deepseek',
        (*_DEEPSEEK, DeepSeekExperts('sigmoid', 'noaux_tc'),
         Enumerated('norm_topk_prob', ((True, {'experts.router.normalize': True}), (False,
         {'experts.router.normalize': False}))),
         ExtraLayers()),
    ),
    ConfigTable(
        'glm4_moe', 'Glm4MoeForCausalLM', 'glm4-moe', 'glm4-moe',
        (*(size for size in _sizes(_KV_HEADS) if 'intermediate_size' not in size.fields), _SWIGLU, _TIED, _TOP_K,
         Rope(fraction='partial_rotary_factor'),
         switch('attention_bias', 'attention.qkv_bias'),
         Enumerated('use_qk_norm', ((False, {'attention.qk_norm': 'none'}), (True, {'attention.qk_norm': 'head'}))),
         Size('n_routed_experts', 'experts.n_experts', alias='num_local_experts'),
         Size('num_experts_per_tok', 'experts.experts_per_token'), Number('routed_scaling_factor',
         'experts.router.scale'),
         DeepSeekExperts('sigmoid', 'noaux_tc'), ExtraLayers()),
    ),
    ConfigTable(
        'minimax_m2', 'MiniMaxM2ForCausalLM', 'minimax-m2', 'minimax-m2',
        (*_sizes(_KV_HEADS, _HEAD_DIM), _SWIGLU, _TIED, Rope(fraction='partial_rotary_factor', dimensions='rotary_dim'),
         Experts(), _BALANCE, Size('num_local_experts', 'experts.n_experts', alias='num_experts'),
         Size('num_experts_per_tok', 'experts.experts_per_token'), OfEveryLayer('attn_type_list', 1),
         # the class does not read these, and computes what they say
         only('scoring_func', 'sigmoid'), only('use_routing_bias', True), only('use_qk_norm', True),
         only('qk_norm_type', 'per_layer'), only('shared_intermediate_size', 0), only('sliding_window', None),
         *(only(f'layernorm_{part}_{factor}', 1, 1.0) for part in ('full_attention', 'linear_attention', 'mlp')
           for factor in ('alpha', 'beta')),
         Unused(('mlp_intermediate_size', 'shared_moe_mode', 'use_mtp', 'num_mtp_modules', 'mtp_transformer_layers'))),
    ),
    ConfigTable(
        'gemma', 'GemmaForCausalLM', 'gemma', 'llama',
        # the released files say 'gelu', but their code computes the tanh approximation
        (*_GEMMA, Enumerated('hidden_act', (_GEGLU, ('gelu', {'feed_forward.activation': 'geglu'}))),
         only('hidden_activation', None, 'gelu_pytorch_tanh'), Rope()),
    ),
    ConfigTable(
        'gemma2', 'Gemma2ForCausalLM', 'gemma2', 'gemma2', (*_GEMMA2, Rope(), Windows(even, ('layer_types',))),
    ),
    ConfigTable(
        'gemma3_text', 'Gemma3ForCausalLM', 'gemma3', 'gemma3',
        (*_GEMMA2, Rope(by_layer=True), Windows(outside_pattern, ('layer_types', 'sliding_window_pattern')),
         Unused(('_sliding_window_pattern',))),  # written beside layer_types, and not read
    ),
    ConfigTable(
        'gemma4_text', 'Gemma4ForCausalLM', 'gemma4', 'gemma4',
        # only tokens of images see each other in both directions
        (*_sizes(_KV_HEADS, _HEAD_DIM), _TIED, _NO_ATTENTION_BIAS, Enumerated('hidden_activation', (_GEGLU,)),
         only('use_bidirectional_attention', None, 'vision'), Cap('final_logit_softcapping', 'head.softcap'),
         Rope(by_layer=True, local=None, kinds=('default', 'proportional'), absent=_GEMMA4_ROPE), GlobalLayers(),
         Lacking('hidden_size_per_layer_input', _PLE, (0, None)), Lacking('num_kv_shared_layers', _SHARED_KEYS, (0,)),
         Lacking('enable_moe_block', _TWO_MLPS, (False,)),
         # of the parts that pretrax lacks
         Unused(('vocab_size_per_layer_input', 'use_double_wide_mlp', 'num_experts', 'top_k_experts',
                 'moe_intermediate_size'))),
    ),
    ConfigTable(
        'olmo2', 'Olmo2ForCausalLM', 'olmo2', 'olmo2', (*_SIZES, _SWIGLU, _TIED, Rope(), _NO_ATTENTION_BIAS),
    ),
    ConfigTable(
        'smollm3', 'SmolLM3ForCausalLM', 'smollm3', 'llama',
        (*_SIZES, _SWIGLU, _TIED, Rope(), NoPositions(), Windows(without_positions, ('layer_types',),
        ('max_window_layers',),
         switch=True), _NO_ATTENTION_BIAS, only('mlp_bias', False)),
    ),
    ConfigTable(
        'gpt_oss', 'GptOssForCausalLM', 'gpt-oss', 'gpt-oss',
        (*_sizes(_KV_HEADS), only('hidden_act', 'silu'), _TIED, Rope(absent=_GPT_OSS_ROPE), Experts(), _BALANCE,
         Windows(even, ('layer_types',)), only('attention_bias', True), only('swiglu_alpha', 1.702),
         Number('swiglu_limit', 'feed_forward.swiglu_limit'), Size('num_local_experts', 'experts.n_experts',
         alias='num_experts'),
         Size('num_experts_per_tok', 'experts.experts_per_token'), SameAs('experts_per_token', 'num_experts_per_tok'),
         Unused(('initial_context_length',))),  # repeats a key of rope_scaling
    ),
    ConfigTable(
        'qwen3_next', 'Qwen3NextForCausalLM', 'qwen3-next', 'qwen3-next',
        (*(field for field in _QWEN_MOE if not isinstance(field, Rope)), Rope(fraction='partial_rotary_factor'),
         Size('num_experts', 'experts.n_experts'), Size('shared_expert_intermediate_size', 'experts.d_shared'),
         *_DELTA_NET,
         Unused(('use_sliding_window', 'sliding_window', 'max_window_layers'))),  # the class has no window
    ),
    ConfigTable('qwen3_5_text', 'Qwen3_5ForCausalLM', 'qwen3.5', 'qwen3.5', _QWEN35),
    ConfigTable(
        'qwen3_5_moe_text', 'Qwen3_5MoeForCausalLM', 'qwen3.5-moe', 'qwen3.5',
        (*(field for field in _QWEN35 if 'intermediate_size' not in field.fields), Size('moe_intermediate_size',
        'feed_forward.d_ff'),
         Size('num_experts', 'experts.n_experts'), Size('num_experts_per_tok', 'experts.experts_per_token'),
         Size('shared_expert_intermediate_size', 'experts.d_shared'), Experts(), _BALANCE, only('norm_topk_prob', True),
         Unused(('intermediate_size',))),  # every layer has experts
    ),
    ConfigTable(
        'mamba2', 'Mamba2ForCausalLM', 'mamba2', 'mamba2',
        (Size('vocab_size', 'vocab_size'), Size('hidden_size', 'd_model'), Size('num_hidden_layers', 'n_layers'),
         Size('num_heads', 'recurrent.n_heads'), Size('head_dim', 'recurrent.d_head'), Size('state_size',
         'recurrent.d_key'),
         Size('n_groups', 'recurrent.n_key_heads'), Size('conv_kernel', 'recurrent.conv_width'),
         Number('layer_norm_epsilon', 'norm.eps'),
         Enumerated('use_conv_bias', ((True, {'recurrent.conv_bias': True}), (False, {'recurrent.conv_bias': False}))),
         _TIED, Expansion(),
         only('use_bias', False), only('hidden_act', 'silu'), only('rms_norm', True),
         # the class always gates before the norm, whatever files say; the initial values, the size of chunks, what
         # follows from expand, and the dtype of the residual stream, which is the compute dtype here
         Unused(('norm_before_gate', 'intermediate_size', 'time_step_init_scheme', 'time_step_scale',
                 'time_step_min', 'time_step_max', 'time_step_floor', 'time_step_rank', 'rescale_prenorm_residual',
                 'chunk_size', 'residual_in_fp32'))),
    ),
    ConfigTable(
        'llama4_text', 'Llama4ForCausalLM', 'llama4', 'llama4',
        (*(size for size in _SIZES if 'intermediate_size' not in size.fields), only('hidden_act', 'silu'), _TIED,
        Rope(),
         _BIASES[0], Enumerated('use_qk_norm', ((True, {'attention.qk_norm': 'l2'}), (False,
         {'attention.qk_norm': 'none'}))), ChunkedLayers(),
         InterleavedExperts()),
    ),
    ConfigTable(
        'phi3', 'Phi3ForCausalLM', 'phi3', 'phi3',
        # the class takes 'su' and 'yarn' for 'longrope', as early files say
        # and does not read mlp_bias, lm_head_bias, full_attn_mod and interpolate_factor, which Phi-4-mini has
        (*_SIZES, _SWIGLU, _TIED, Windows(), _NO_ATTENTION_BIAS, only('mlp_bias', False), only('lm_head_bias', False),
         only('full_attn_mod', 1), only('interpolate_factor', 1),
         Rope(kinds=('default', 'longrope'), aliases=(('su', 'longrope'), ('yarn', 'longrope')), outer=True,
              fraction='partial_rotary_factor')),
    ),
    ConfigTable(
        'olmoe', 'OlmoeForCausalLM', 'olmoe', 'olmoe',
        (*_SIZES, _SWIGLU, _TIED, Rope(), _NO_ATTENTION_BIAS, only('clip_qkv', None), Experts(), _BALANCE, _TOP_K,
         Size('num_experts', 'experts.n_experts', alias='num_local_experts'), Size('num_experts_per_tok',
         'experts.experts_per_token')),
    ),
    ConfigTable(
        'olmo3', 'Olmo3ForCausalLM', 'olmo3', 'olmo2',
        (*_SIZES, _SWIGLU, _TIED, Rope(by_layer=True, local=None), _NO_ATTENTION_BIAS,
         Windows(every_fourth, ('layer_types',))),
    ),
    ConfigTable(
        'gpt_neox', 'GPTNeoXForCausalLM', 'gpt-neox', 'gpt-neox',
        (*_NEOX_SIZES, _LAYER_NORM, only('attention_probs_dropout_prob', 0), only('hidden_dropout_prob', 0), _TIED,
        Rope(base='rotary_emb_base', fraction='rotary_pct'), _BIASES[0],
         Enumerated('use_parallel_residual', ((True, {'block.parallel': True}), (False, {'block.parallel': False}))),
         Enumerated('hidden_act', (('gelu', {'feed_forward.activation': 'gelu_erf'}), *_TANH))),
    ),
    ConfigTable(
        'phi', 'PhiForCausalLM', 'phi', 'phi',
        (*_sizes(_LAYER_NORM), Enumerated('hidden_act', (*_TANH, ('gelu', {'feed_forward.activation': 'gelu_erf'}))),
        only('tie_word_embeddings', False),
         Rope(fraction='partial_rotary_factor'), only('qk_layernorm', False)),
    ),
    ConfigTable(
        'stablelm', 'StableLmForCausalLM', 'stablelm', 'stablelm',
        (*_sizes(_KV_HEADS, _LAYER_NORM), _SWIGLU, _TIED, Rope(fraction='partial_rotary_factor'),
         switch('use_qkv_bias', 'attention.qkv_bias'),
         Enumerated('qk_layernorm', ((False, {'attention.qk_norm': 'none'}), (True,
         {'attention.qk_norm': 'each_head'}))),
         switch('use_parallel_residual', 'block.parallel', 'block.shared_norm')),
    ),
    ConfigTable(
        'granite', 'GraniteForCausalLM', 'granite', 'llama',
        (*_SIZES, _SWIGLU, _TIED, Rope(), *_BIASES, Number('embedding_multiplier', 'embedding.multiplier'),
         Number('residual_multiplier', 'block.residual_multiplier'), Number('logits_scaling', 'head.multiplier',
         power=-1),
         Number('attention_multiplier', 'attention.query_pre_attn_scalar', power=-2, absent='attention.d_query')),
    ),
    ConfigTable(
        'cohere2', 'Cohere2ForCausalLM', 'cohere2', 'cohere2',
        (*_sizes(_LAYER_NORM), _SWIGLU, _TIED, Rope(), _BIASES[0], Number('logit_scale', 'head.multiplier'),
         # the class does not read these, and computes what they say
         only('order_of_interleaved_layers', 'local_attn_first'), only('position_embedding_type', 'rope_gptj'),
         only('rotary_pct', 1.0), only('use_gated_activation', True), only('use_parallel_block', True),
         only('use_parallel_embedding', False), only('use_qk_norm', False),
         SameAs('layer_switch', 'sliding_window_pattern'), SameAs('use_embedding_sharing', 'tie_word_embeddings'),
         Windows(outside_pattern, ('layer_types', 'sliding_window_pattern'), ('_sliding_window_pattern',),
         positions=True, null=False)),
    ),
    ConfigTable(
        'nemotron', 'NemotronForCausalLM', 'nemotron', 'nemotron',
        (*_sizes(_KV_HEADS, Number('norm_eps', 'norm.eps')), Enumerated('hidden_act', (('relu2',
        {'feed_forward.activation': 'relu2'}),)),
         _TIED, Rope(fraction='partial_rotary_factor'), *_BIASES),
    ),
    ConfigTable(
        'exaone4', 'Exaone4ForCausalLM', 'exaone4', 'exaone4',
        (*_sizes(_KV_HEADS), _SWIGLU, _TIED, Rope(),
         Windows(outside_pattern, ('layer_types', 'sliding_window_pattern'), positions=True)),
    ),
)  # fmt: skip

# Options that may differ if the mixers and windows of all layers are the same
_LAYER_TYPES = ('attention.window', 'attention.global_every', 'layer_types')
BY_TYPE = {table.model_type: table for table in TABLES}
# The values of fields that a config.json leaves out, per model type
DEFAULTS: dict[str, dict[str, Any]] = {
    name: fields
    for name, fields in read_table(Path(__file__).with_name('defaults.yaml')).items()
    if not name.startswith('_')
}
_STORED_IN_ANOTHER_FORM = ('attention.query_pre_attn_scalar', 'head.multiplier')
LARGE_BALANCE = 0.1  # gpt-oss has 0.9
_SAME = {'kimi_k2': 'deepseek_v3'}  # names of the same class
# Options that may differ because they do not affect the forward pass.
NOT_COMPUTED = keys_that_change('training')


# Known types of models that cannot be imported, with the parts that the decoder lacks.
_GEMMA3N = f'several residual streams (AltUp), {_PLE}, {_SHARED_KEYS}'
REFUSED = {'gemma3n': _GEMMA3N, 'gemma3n_text': _GEMMA3N}


def table_of(config: Mapping[str, Any]) -> ConfigTable:
    """The table for a config.json. Raises UserError if the family is not supported."""
    kind = text_config(config).get('model_type')
    kind = _SAME.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in BY_TYPE:
        classes = config.get('architectures')
        named = ', '.join(map(str, classes))[:80] if isinstance(classes, list) and classes else 'none named'
        why = f': it has {REFUSED[str(kind)]}' if str(kind) in REFUSED else ''
        raise UserError(
            f"config.json: model_type is '{str(kind)[:80]}' (architectures: {named}), which pretrax does not "
            f'support{why}\n'
            f'supported: {", ".join(sorted(BY_TYPE))}'
        )
    return BY_TYPE[kind]


def read_options(config: Mapping[str, Any]) -> tuple[Options, list[str]]:
    """The options for a config.json, and notes for the user.

    Raises:
        UserError: the family has no table, no row knows a field, or a field has a value that it cannot have; the
            message names it.
    """
    table, config = table_of(config), text_config(config)
    check_quantization(config)
    known = {name for field in table.fields for name in field.fields} | {'quantization_config'}
    strange = [name for name, value in config.items() if name not in known and not is_harmless(name, value)]
    if strange:
        said = ', '.join(f'{name[:60]} ({str(config[name])[:60]})' for name in strange[:5])
        raise UserError(
            f'config.json has fields that pretrax does not know for {table.model_type}: {said}\n'
            'they may change what the model computes, so the model is not imported\n'
            'if they do not, remove them from config.json'
        )
    values = DEFAULTS[table.model_type] | _without_aliases(config, table)
    options: Options = {'family': table.family}
    for field in table.fields:
        options |= field.read(values)
    return options, [*_notes(options, values), *_notes_on_dropout(config, table.model_type)]


def _without_aliases(config: Mapping[str, Any], table: ConfigTable) -> dict[str, Any]:
    """The configuration with every field under its first name."""
    values = dict(config)
    for field in table.fields:
        alias = getattr(field, 'alias', None)
        if alias in values:
            value = values.pop(alias)
            if values.setdefault(field.fields[0], value) != value:
                raise wrong(alias, value, f'the value of {field.fields[0]}, {values[field.fields[0]]!r:.80}')
    return values


def _notes(options: Options, config: Mapping[str, Any]) -> list[str]:
    """Notes on extra layers, which are left out, and on a load-balance loss far above those of published recipes."""
    notes = []
    for field in ('num_nextn_predict_layers', 'num_mtp_modules'):
        if extra := config.get(field):
            notes.append(
                f'{field} = {whole(field, extra)} of config.json: {extra} more layer{
                    "s" * (extra > 1)
                } for multi-token '
                'prediction, left out (init_from reads as many as model.multi_token.n_layers says)'
            )
    if options.get('experts.router.balance_loss', 0.0) >= LARGE_BALANCE:
        notes.append(
            f'the load-balance loss has the weight {options["experts.router.balance_loss"]:g} of config.json in '
            'continued training; '
            'published recipes have 0.0001 to 0.01 (model.experts.router.balance_loss)'
        )
    return notes


def _notes_on_dropout(config: Mapping[str, Any], model_type: str) -> list[str]:
    notes = []
    for name in DROPOUT_FIELDS:
        value = config.get(name)
        if value is not None and number(name, value, above=False):
            options = ' '.join(f'model.{option}={value}' for option in dropout_options(model_type).get(name, ()))
            how = f'to train with it, use {options}' if options else 'pretrax has nothing like it'
            notes.append(f'{name} = {value} of config.json is not applied; {how}')
    return notes


def write_config(arch: Architecture, family: str | None = None) -> tuple[dict[str, Any], ConfigTable]:
    """The config.json for an architecture, and the Hugging Face family that computes it.

    Args:
        arch: the architecture of the decoder.
        family: the pretrax family to try first.

    Raises:
        UserError: no family computes this architecture; the message names the nearest one and the differences.
    """
    nearest: tuple[int, str, dict[str, str]] | None = None
    for table in sorted(TABLES, key=lambda table: table.family != family):
        config = {'architectures': [table.architecture], 'model_type': table.model_type}
        for field in table.fields:
            config |= field.write(arch)
        try:
            differences = _differences(config, arch)
        except (UserError, ValueError) as error:  # the family does not allow these sizes
            differences = {'': str(error).splitlines()[0]}
        if not differences:
            return config, table
        if nearest is None or len(differences) < nearest[0]:
            nearest = len(differences), table.architecture, differences
    assert nearest is not None
    said = '; '.join(f'{name}: {what}' if name else what for name, what in nearest[2].items())
    raise UserError(
        f'no class of transformers computes this architecture; the nearest is {nearest[1]}, but\n  {said}\n'
        'to export, train with the options of one family'
    )


def _differences(config: dict[str, Any], arch: Architecture) -> dict[str, str]:
    """The differences between an architecture and its config.json, found by reading the config.json back."""
    options, _ = read_options(config)
    back = resolve(TransformerOptions(**nest(options)), arch.vocab_size, arch.max_sequence_length)
    return compare(back, arch, 'in the class', 'here')


def _rounded(one: Architecture, other: Architecture, option: str) -> bool:
    """Whether a number that a class stores in another form, such as its inverse, is the same up to rounding."""
    if option == 'attention.query_pre_attn_scalar':
        a, b = (arch.attention.query_pre_attn_scalar or arch.attention.d_query for arch in (one, other))
    else:
        a, b = one.option(option), other.option(option)
    return option in _STORED_IN_ANOTHER_FORM and math.isclose(a, b, rel_tol=1e-12)


def compare(one: Architecture, other: Architecture, of_one: str, of_other: str) -> dict[str, str]:
    """The options by which two architectures compute different results, as text."""
    found = {}
    same = {*NOT_COMPUTED}
    if _mixers(one) == _mixers(other):
        same |= {*_LAYER_TYPES}
    if [kind.experts for kind in one.kinds] == [kind.experts for kind in other.kinds]:
        same |= {'experts.dense_layers', 'experts.every'}
    if one.experts.router.n_groups == other.experts.router.n_groups == 1:
        same |= {'experts.router.group_scores'}
    for key in KEYS:
        a, b = one.option(key), other.option(key)
        if a != b and key not in same and not _rounded(one, other, key):
            found[key] = f'{a} {of_one}, {b} {of_other}'
    return found


def _mixers(arch: Architecture) -> list[tuple[str, int, bool]]:
    """The mixer of each layer, its window, and whether it has rotary positions."""
    return [(kind.mixer, kind.window, kind.rope_base is not None) for kind in arch.kinds]
