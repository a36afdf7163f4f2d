"""Writes what the configuration classes of `transformers` make of a config.json that leaves fields out.

Run by hand, in the environment of make_goldens.py:

    ENV/bin/python tests/goldens/make_defaults.py

`defaults.json` has two parts. `fields` are the defaults of each class, as they are declared: where one is derived from
others, such as the width of a head, it is null. `resolved` are small configurations, and what the class derives from
them.
"""

import dataclasses
import json
from pathlib import Path

import transformers

HERE = Path(__file__).parent
CLASSES = {
    'gpt2': 'GPT2Config', 'llama': 'LlamaConfig', 'mistral': 'MistralConfig', 'mixtral': 'MixtralConfig',
    'qwen2': 'Qwen2Config', 'qwen3': 'Qwen3Config', 'qwen2_moe': 'Qwen2MoeConfig', 'qwen3_moe': 'Qwen3MoeConfig',
    'gemma': 'GemmaConfig', 'gemma2': 'Gemma2Config', 'gemma3_text': 'Gemma3TextConfig',
    'gemma4_text': 'Gemma4TextConfig', 'olmo2': 'Olmo2Config',
    'smollm3': 'SmolLM3Config', 'phi3': 'Phi3Config', 'gpt_oss': 'GptOssConfig', 'olmoe': 'OlmoeConfig',
    'olmo3': 'Olmo3Config',
    'gpt_neox': 'GPTNeoXConfig', 'phi': 'PhiConfig', 'stablelm': 'StableLmConfig', 'granite': 'GraniteConfig',
    'cohere2': 'Cohere2Config', 'nemotron': 'NemotronConfig', 'exaone4': 'Exaone4Config',
    'llama4_text': 'Llama4TextConfig',
    'deepseek_v2': 'DeepseekV2Config', 'deepseek_v3': 'DeepseekV3Config',
    'qwen3_next': 'Qwen3NextConfig', 'qwen3_5_text': 'Qwen3_5TextConfig', 'qwen3_5_moe_text': 'Qwen3_5MoeTextConfig',
    'mamba2': 'Mamba2Config',
    'glm4_moe': 'Glm4MoeConfig', 'minimax_m2': 'MiniMaxM2Config',
}  # fmt: skip
HEADS = {'hidden_size': 96, 'num_attention_heads': 6}
LAYERS = {'num_hidden_layers': 6}
WINDOW = {'use_sliding_window': True, 'sliding_window': 9}
WITHOUT_PLE = {'hidden_size_per_layer_input': 0}
LLAMA3 = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
# What is left out of each: everything else.
GIVEN = {
    'gpt2': [{}, {'n_embd': 96, 'n_head': 6}],
    'llama': [
        {}, HEADS, HEADS | {'num_key_value_heads': 3, 'head_dim': None}, {'rope_theta': 5e5, 'rope_scaling': LLAMA3},
        {'rope_scaling': {'type': 'linear', 'factor': 2.0}}, {'rope_parameters': {'rope_type': 'linear',
        'factor': 4.0}},
        {'rope_theta': 7.0, 'rope_scaling': {'rope_type': 'linear', 'factor': 2.0},
        'rope_parameters': {'rope_theta': 9.0}},
        {'rope_theta': 7.0, 'rope_parameters': {'rope_theta': 9.0}},
    ],
    'mistral': [{}, HEADS | {'num_key_value_heads': 2}, {'sliding_window': None}, {'sliding_window': 9}],
    'mixtral': [{}, HEADS | {'num_key_value_heads': 2}, {'sliding_window': 9}, {'num_experts': 6}],
    'qwen2': [
        {}, HEADS | {'num_key_value_heads': 2}, LAYERS | WINDOW | {'max_window_layers': 0},
        {'use_sliding_window': True, 'max_window_layers': 0}, LAYERS | WINDOW,
        LAYERS | WINDOW | {'max_window_layers': 5},
        LAYERS | {'sliding_window': 9, 'max_window_layers': 0}, LAYERS | WINDOW | {'sliding_window': None},
    ],
    'qwen3': [{}, HEADS | {'num_key_value_heads': 2}, LAYERS | WINDOW | {'max_window_layers': 0}, LAYERS | WINDOW],
    'qwen2_moe': [
        {}, LAYERS | WINDOW, {'use_sliding_window': True}, LAYERS | WINDOW | {'max_window_layers': 0},
        LAYERS | WINDOW | {'max_window_layers': 5}, LAYERS | WINDOW | {'max_window_layers': 3},
        LAYERS | WINDOW | {'layer_types': ['full_attention', 'sliding_attention'] * 3}, LAYERS | {'sliding_window': 9},
    ],
    'qwen3_moe': [
        {}, LAYERS | WINDOW, LAYERS | WINDOW | {'max_window_layers': 3}, LAYERS | {'sliding_window': 9},
        LAYERS | WINDOW | {'layer_types': ['full_attention', 'sliding_attention'] * 3}, {'num_local_experts': 16},
    ],
    'gemma': [{}, {'hidden_act': 'gelu'}],
    'gemma2': [{}, LAYERS, {'sliding_window': 9}],
    'gemma3_text': [
        {}, LAYERS, {'sliding_window_pattern': 3}, {'rope_scaling': {'rope_type': 'linear', 'factor': 8.0}},
        {'rope_theta': 7.0, 'rope_local_base_freq': 3.0},
    ],
    'gemma4_text': [WITHOUT_PLE | one for one in (
        {}, LAYERS, {'attention_k_eq_v': True, 'num_global_key_value_heads': 2}, {'num_global_key_value_heads': 2},
        LAYERS | {'layer_types': ['full_attention', 'sliding_attention'] * 3}, {'global_head_dim': 96},
    )],
    'olmo2': [{}, HEADS],
    'mamba2': [], 'qwen3_next': [],
    'qwen3_5_text': [{}, {'partial_rotary_factor': 0.5, 'rope_theta': 7.0}, {'rope_parameters': {'rope_theta': 9.0}}],
    'qwen3_5_moe_text': [{}, {'rope_parameters': {'rope_theta': 9.0, 'partial_rotary_factor': 0.5}}],
    'smollm3': [{}, LAYERS, LAYERS | WINDOW, {'no_rope_layer_interval': 3}, LAYERS | {'sliding_window': 9},
                LAYERS | WINDOW | {'no_rope_layers': [0] * 6}],
    'gpt_oss': [{}, LAYERS, {'sliding_window': 9}, {'num_experts': 6}, {'rope_theta': 7.0}],
    'phi3': [{}, HEADS, {'sliding_window': 9}],
    'olmoe': [{}, HEADS],
    'olmo3': [{}, LAYERS, LAYERS | {'sliding_window': 9, 'layer_types': ['full_attention', 'sliding_attention'] * 3},
              {'rope_theta': 7.0}],
    'gpt_neox': [{}, HEADS, {'rotary_pct': 0.5, 'rotary_emb_base': 7.0}, {'rope_scaling': {'type': 'linear',
    'factor': 2.0}}],
    'phi': [{}, HEADS, {'partial_rotary_factor': 0.25, 'rope_theta': 7.0}, {'rope_parameters': {'rope_theta': 9.0}}],
    'stablelm': [{}, HEADS | {'num_key_value_heads': 2}, {'partial_rotary_factor': 0.5}],
    'granite': [{}, HEADS, {'rope_theta': 7.0}],
    'cohere2': [{}, LAYERS, LAYERS | {'sliding_window_pattern': 3},
                LAYERS | {'sliding_window': 9, 'layer_types': ['full_attention', 'sliding_attention'] * 3}],
    'nemotron': [HEADS | {'num_key_value_heads': 2}, HEADS | {'num_key_value_heads': 3, 'head_dim': 32,
    'partial_rotary_factor': 0.25}],
    'exaone4': [{}, LAYERS, LAYERS | {'sliding_window_pattern': 3}, LAYERS | {'sliding_window': None,
    'layer_types': ['full_attention'] * 6}],
    'llama4_text': [{}, LAYERS, LAYERS | {'no_rope_layer_interval': 2, 'attention_chunk_size': 9},
    {'no_rope_layers': []},
                    LAYERS | {'layer_types': ['full_attention', 'chunked_attention'] * 3}],
    'deepseek_v2': [], 'deepseek_v3': [],  # widths of heads are not derived
    'glm4_moe': [
        HEADS | {'num_key_value_heads': 2} | more for more in
        ({}, {'partial_rotary_factor': 0.25, 'rope_theta': 7.0}, {'rope_parameters': {'rope_theta': 9.0}})
    ],
    'minimax_m2': [{}, {'rotary_dim': 64}, {'rotary_dim': 64, 'partial_rotary_factor': 0.25}, {'num_experts': 16}],
}  # fmt: skip
# What decides what a model computes
SEEN = {
    'per_layer_config',
    'vocab_size',
    'hidden_size',
    'n_embd',
    'intermediate_size',
    'n_inner',
    'num_hidden_layers',
    'n_layer',
    'n_head',
    'num_attention_heads',
    'num_key_value_heads',
    'head_dim',
    'rms_norm_eps',
    'layer_norm_epsilon',
    'layer_norm_eps',
    'norm_eps',
    'hidden_act',
    'tie_word_embeddings',
    'rope_parameters',
    'sliding_window',
    'layer_types',
    'attention_chunk_size',
    'no_rope_layers',
    'num_experts',
    'num_local_experts',
    'n_routed_experts',
    'num_experts_per_tok',
    'moe_intermediate_size',
    'shared_expert_intermediate_size',
    'norm_topk_prob',
    'query_pre_attn_scalar',
    'attn_logit_softcapping',
    'final_logit_softcapping',
}


def declared(kind):
    """The defaults as the class declares them, and the base of RoPE, which is no field of its own."""
    found = {
        field.name: field.default for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING
    }
    theta = kind.default_theta
    base = (
        {'rope_theta': theta['global'], 'rope_local_base_freq': theta['local']}
        if isinstance(theta, dict)
        else {'rope_theta': theta}
    )
    return found | base


def resolved(kind, given):
    config = kind(**given)
    found = config.to_dict()
    return {name: value for name, value in found.items() if name in SEEN}


def plain(value):
    return value if isinstance(value, int | float | str | bool | None | list | dict) else None


if __name__ == '__main__':
    fields, cases = {}, []
    for model_type, name in CLASSES.items():
        kind = getattr(transformers, name)
        fields[model_type] = {key: plain(value) for key, value in sorted(declared(kind).items())}
        cases += [{'model_type': model_type, 'given': given, 'resolved': resolved(kind, json.loads(json.dumps(given)))}
                  for given in GIVEN[model_type]]  # fmt: skip
    lines = [f'"transformers": "{transformers.__version__}"']
    lines += ['"fields": {\n' + ',\n'.join(f'  "{key}": {json.dumps(value)}' for key, value in fields.items()) + '\n }']
    lines += ['"resolved": [\n' + ',\n'.join(f'  {json.dumps(case)}' for case in cases) + '\n ]']
    (HERE / 'defaults.json').write_text('{\n ' + ',\n '.join(lines) + '\n}\n')
