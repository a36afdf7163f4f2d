"""The values of fields that a config.json leaves out, which are those of the configuration classes of `transformers`.

A field that is present and null is not left out. `tests/goldens/make_defaults.py` writes the defaults of
`transformers`, and `tests/huggingface/test_defaults.py` compares them with these.
"""

from typing import Any

_LLAMA = {
    'vocab_size': 32000, 'hidden_size': 4096, 'intermediate_size': 11008, 'num_hidden_layers': 32,
    'num_attention_heads': 32, 'num_key_value_heads': None, 'head_dim': None, 'max_position_embeddings': 2048,
    'rms_norm_eps': 1e-6, 'hidden_act': 'silu', 'tie_word_embeddings': False, 'rope_theta': 10000.0,
}  # fmt: skip
_MISTRAL = _LLAMA | {
    'intermediate_size': 14336, 'num_key_value_heads': 8, 'max_position_embeddings': 131072, 'sliding_window': 4096,
}  # fmt: skip
_QWEN2 = _LLAMA | {
    'vocab_size': 151936, 'intermediate_size': 22016, 'num_key_value_heads': 32, 'max_position_embeddings': 32768,
    'sliding_window': 4096, 'use_sliding_window': False,
}  # fmt: skip
_DEEPSEEK = {
    'num_key_value_heads': None, 'rms_norm_eps': 1e-6, 'hidden_act': 'silu', 'tie_word_embeddings': False,
    'rope_theta': 10000.0, 'kv_lora_rank': 512, 'q_lora_rank': 1536, 'qk_nope_head_dim': 128, 'qk_rope_head_dim': 64,
    'v_head_dim': 128,
}  # fmt: skip
_BY_LAYER = {'max_window_layers': 28, 'layer_types': None}
_QWEN_MOE = _QWEN2 | {
    'hidden_size': 2048, 'num_hidden_layers': 24, 'router_aux_loss_coef': 0.001, 'norm_topk_prob': False,
    'decoder_sparse_step': 1, 'mlp_only_layers': None,
}  # fmt: skip
_DELTA_NET = {
    'linear_conv_kernel_dim': 4, 'linear_key_head_dim': 128, 'linear_value_head_dim': 128, 'linear_num_key_heads': 16,
    'linear_num_value_heads': 32, 'layer_types': None,
}  # fmt: skip
_QWEN35 = _DELTA_NET | {
    'vocab_size': 248320, 'num_attention_heads': 16, 'head_dim': 256, 'hidden_act': 'silu',
    'max_position_embeddings': 32768,
    'rms_norm_eps': 1e-6, 'tie_word_embeddings': False, 'rope_theta': 10000.0, 'partial_rotary_factor': 0.25,
}  # fmt: skip
_GEMMA2 = {
    'vocab_size': 256000, 'hidden_size': 2304, 'intermediate_size': 9216, 'num_hidden_layers': 26,
    'num_attention_heads': 8, 'num_key_value_heads': 4, 'head_dim': 256, 'max_position_embeddings': 8192,
    'rms_norm_eps': 1e-6, 'hidden_activation': 'gelu_pytorch_tanh', 'tie_word_embeddings': True, 'rope_theta': 10000.0,
    'query_pre_attn_scalar': 256, 'sliding_window': 4096, 'layer_types': None,
    'attn_logit_softcapping': 50.0, 'final_logit_softcapping': 30.0,
}  # fmt: skip

DEFAULTS: dict[str, dict[str, Any]] = {
    'gpt2': {
        'vocab_size': 50257, 'n_embd': 768, 'n_layer': 12, 'n_head': 12, 'n_inner': None, 'n_positions': 1024,
        'layer_norm_epsilon': 1e-5, 'activation_function': 'gelu_new', 'tie_word_embeddings': True,
    },
    'llama': _LLAMA,
    'mistral': _MISTRAL,
    'mixtral': _MISTRAL | {
        'rms_norm_eps': 1e-5, 'rope_theta': 1e6, 'sliding_window': None, 'router_aux_loss_coef': 0.001,
        'num_local_experts': 8, 'num_experts_per_tok': 2,
    },
    'qwen2': _QWEN2 | _BY_LAYER,
    'qwen3': _QWEN2 | _BY_LAYER | {'head_dim': 128},
    'qwen2_moe': _QWEN_MOE | _BY_LAYER | {
        'num_attention_heads': 16, 'num_key_value_heads': 16, 'intermediate_size': 5632, 'moe_intermediate_size': 1408,
        'num_experts': 60, 'num_experts_per_tok': 4, 'shared_expert_intermediate_size': 5632,
    },
    'qwen3_moe': _QWEN_MOE | {
        'num_key_value_heads': 4, 'intermediate_size': 6144, 'moe_intermediate_size': 768,
        'num_experts': 128, 'num_experts_per_tok': 8,
    },
    'deepseek_v2': _DEEPSEEK | {
        'vocab_size': 102400, 'hidden_size': 4096, 'intermediate_size': 11008, 'num_hidden_layers': 32,
        'num_attention_heads': 32, 'max_position_embeddings': 2048, 'moe_intermediate_size': 1407,
        'n_shared_experts': 2,
        'n_routed_experts': 64, 'num_experts_per_tok': None, 'first_k_dense_replace': 0, 'n_group': None,
        'topk_group': None, 'topk_method': 'greedy', 'norm_topk_prob': False, 'routed_scaling_factor': 1.0,
    },
    'deepseek_v3': _DEEPSEEK | {
        'vocab_size': 129280, 'hidden_size': 7168, 'intermediate_size': 18432, 'num_hidden_layers': 61,
        'num_attention_heads': 128, 'num_key_value_heads': 128, 'max_position_embeddings': 4096,
        'moe_intermediate_size': 2048, 'n_shared_experts': 1, 'n_routed_experts': 256, 'num_experts_per_tok': 8,
        'first_k_dense_replace': 3, 'n_group': 8, 'topk_group': 4, 'norm_topk_prob': True, 'routed_scaling_factor': 2.5,
        'rope_interleave': True,
    },
    'glm4_moe': {
        'vocab_size': 151552, 'hidden_size': 4096, 'intermediate_size': 10944, 'num_hidden_layers': 46,
        'num_attention_heads': 96, 'num_key_value_heads': 8, 'head_dim': None, 'max_position_embeddings': 131072,
        'rms_norm_eps': 1e-5, 'hidden_act': 'silu', 'tie_word_embeddings': False, 'rope_theta': 10000.0,
        'partial_rotary_factor': 0.5, 'attention_bias': False, 'use_qk_norm': False, 'moe_intermediate_size': 1408,
        'num_experts_per_tok': 8, 'n_shared_experts': 1, 'n_routed_experts': 128, 'routed_scaling_factor': 1.0,
        'n_group': 1, 'topk_group': 1, 'first_k_dense_replace': 1, 'norm_topk_prob': True,
    },
    'minimax_m2': {
        'vocab_size': 200064, 'hidden_size': 3072, 'intermediate_size': 1536, 'num_hidden_layers': 62,
        'num_attention_heads': 48, 'num_key_value_heads': 8, 'head_dim': 128, 'max_position_embeddings': 196608,
        'rms_norm_eps': 1e-6, 'hidden_act': 'silu', 'tie_word_embeddings': False, 'rope_theta': 5e6,
        'partial_rotary_factor': None, 'num_local_experts': 256, 'num_experts_per_tok': 8,
        'router_aux_loss_coef': 0.001,
    },
    'gemma': {
        'vocab_size': 256000, 'hidden_size': 3072, 'intermediate_size': 24576, 'num_hidden_layers': 28,
        'num_attention_heads': 16, 'num_key_value_heads': 16, 'head_dim': 256, 'max_position_embeddings': 8192,
        'rms_norm_eps': 1e-6, 'hidden_act': 'gelu_pytorch_tanh', 'tie_word_embeddings': True, 'rope_theta': 10000.0,
    },
    'gemma2': _GEMMA2,
    'gemma3_text': _GEMMA2 | {
        'vocab_size': 262208, 'max_position_embeddings': 131072, 'rope_theta': 1e6, 'rope_local_base_freq': 1e4,
        'attn_logit_softcapping': None, 'final_logit_softcapping': None, 'sliding_window_pattern': 6,
    },
    'gemma4_text': {
        'vocab_size': 262144, 'hidden_size': 2304, 'intermediate_size': 9216, 'num_hidden_layers': 30,
        'num_attention_heads': 8, 'num_key_value_heads': 4, 'head_dim': 256, 'max_position_embeddings': 131072,
        'rms_norm_eps': 1e-6, 'hidden_activation': 'gelu_pytorch_tanh', 'tie_word_embeddings': True,
        'sliding_window': 512, 'layer_types': None, 'final_logit_softcapping': None, 'attention_k_eq_v': False,
        'global_head_dim': 512, 'num_global_key_value_heads': None, 'hidden_size_per_layer_input': 256,
        'num_kv_shared_layers': 0, 'enable_moe_block': False, 'rope_theta': 1e4, 'rope_local_base_freq': 1e4,
    },
    'olmo2': _LLAMA | {'vocab_size': 50304, 'rms_norm_eps': 1e-5},
    'smollm3': _LLAMA | {
        'vocab_size': 128256, 'hidden_size': 2048, 'num_hidden_layers': 36, 'num_attention_heads': 16,
        'num_key_value_heads': 4, 'max_position_embeddings': 32768, 'tie_word_embeddings': True, 'rope_theta': 2e6,
        'use_sliding_window': False, 'sliding_window': None, 'layer_types': None, 'no_rope_layers': None,
        'no_rope_layer_interval': 4,
    },
    'gpt_oss': _LLAMA | {
        'vocab_size': 201088, 'hidden_size': 2880, 'intermediate_size': 2880, 'num_hidden_layers': 36,
        'num_attention_heads': 64, 'num_key_value_heads': 8, 'head_dim': 64, 'sliding_window': 128,
        'max_position_embeddings': 131072, 'rms_norm_eps': 1e-5, 'num_local_experts': 128, 'num_experts_per_tok': 4,
        'swiglu_alpha': 1.702, 'swiglu_limit': 7.0, 'router_aux_loss_coef': 0.001, 'layer_types': None,
        'attention_bias': True, 'rope_theta': 150000.0,
    },
    'qwen3_next': _DELTA_NET | {
        'vocab_size': 151936, 'hidden_size': 2048, 'intermediate_size': 5632, 'num_hidden_layers': 48,
        'num_attention_heads': 16, 'num_key_value_heads': 2, 'head_dim': 256, 'hidden_act': 'silu',
        'max_position_embeddings': 32768, 'rms_norm_eps': 1e-6, 'tie_word_embeddings': False, 'rope_theta': 10000.0,
        'partial_rotary_factor': 0.25, 'decoder_sparse_step': 1,
        'moe_intermediate_size': 512, 'shared_expert_intermediate_size': 512, 'num_experts_per_tok': 10,
        'num_experts': 512, 'norm_topk_prob': True, 'router_aux_loss_coef': 0.001, 'mlp_only_layers': None,
    },
    'qwen3_5_text': _QWEN35 | {
        'hidden_size': 4096, 'intermediate_size': 12288, 'num_hidden_layers': 32, 'num_key_value_heads': 4,
    },
    'qwen3_5_moe_text': _QWEN35 | {
        'hidden_size': 2048, 'num_hidden_layers': 40, 'num_key_value_heads': 2, 'moe_intermediate_size': 512,
        'shared_expert_intermediate_size': 512, 'num_experts_per_tok': 8, 'num_experts': 256,
        'router_aux_loss_coef': 0.001,
    },
    'mamba2': {
        'vocab_size': 32768, 'hidden_size': 4096, 'num_hidden_layers': 64, 'num_heads': 128, 'head_dim': 64,
        'state_size': 128, 'n_groups': 8, 'conv_kernel': 4, 'expand': 2, 'layer_norm_epsilon': 1e-5,
        'use_conv_bias': True,
        'hidden_act': 'silu', 'tie_word_embeddings': False,
    },
    'llama4_text': _LLAMA | {
        'vocab_size': 202048, 'hidden_size': 5120, 'intermediate_size': 8192, 'intermediate_size_mlp': 16384,
        'num_hidden_layers': 48, 'num_attention_heads': 40, 'num_key_value_heads': 8, 'head_dim': 128,
        'max_position_embeddings': 131072, 'rms_norm_eps': 1e-5, 'rope_theta': 500000.0, 'num_experts_per_tok': 1,
        'num_local_experts': 16, 'moe_layers': None, 'interleave_moe_layer_step': 1, 'use_qk_norm': True,
        'router_aux_loss_coef': 0.001, 'no_rope_layers': None, 'no_rope_layer_interval': 4,
        'attention_chunk_size': 8192,
        'layer_types': None, 'attn_temperature_tuning': True, 'floor_scale': 8192, 'attn_scale': 0.1,
        'attention_bias': False,
    },
    'phi3': _LLAMA | {
        'vocab_size': 32064, 'hidden_size': 3072, 'intermediate_size': 8192, 'max_position_embeddings': 4096,
        'rms_norm_eps': 1e-5, 'sliding_window': None, 'original_max_position_embeddings': 4096,
        'partial_rotary_factor': 1.0,
    },
    'olmoe': _LLAMA | {
        'vocab_size': 50304, 'hidden_size': 2048, 'intermediate_size': 2048, 'num_hidden_layers': 16,
        'num_attention_heads': 16, 'max_position_embeddings': 4096, 'rms_norm_eps': 1e-5, 'num_experts': 64,
        'num_experts_per_tok': 8, 'norm_topk_prob': False, 'router_aux_loss_coef': 0.01,
    },
    'olmo3': _LLAMA | {
        'vocab_size': 50304, 'rms_norm_eps': 1e-5, 'rope_theta': 500000.0, 'rope_local_base_freq': 500000.0,
        'sliding_window': 4096, 'layer_types': None,
    },
    'gpt_neox': {
        'vocab_size': 50432, 'hidden_size': 6144, 'intermediate_size': 24576, 'num_hidden_layers': 44,
        'num_attention_heads': 64, 'max_position_embeddings': 2048, 'layer_norm_eps': 1e-5, 'hidden_act': 'gelu',
        'tie_word_embeddings': False, 'use_parallel_residual': True, 'attention_bias': True,
        'rotary_emb_base': 10000.0, 'rotary_pct': 0.25,
    },
    'phi': _LLAMA | {
        'vocab_size': 51200, 'hidden_size': 2048, 'intermediate_size': 8192, 'num_hidden_layers': 24,
        'hidden_act': 'gelu_new', 'layer_norm_eps': 1e-5, 'partial_rotary_factor': 0.5,
    },
    'stablelm': _LLAMA | {
        'vocab_size': 50304, 'hidden_size': 2560, 'intermediate_size': 6912, 'num_key_value_heads': 32,
        'max_position_embeddings': 4096, 'layer_norm_eps': 1e-5, 'partial_rotary_factor': 0.25,
        'use_qkv_bias': False, 'qk_layernorm': False, 'use_parallel_residual': False,
    },
    'granite': _LLAMA | {
        'embedding_multiplier': 1.0, 'logits_scaling': 1.0, 'residual_multiplier': 1.0, 'attention_multiplier': 1.0,
    },
    'cohere2': _LLAMA | {
        'vocab_size': 256000, 'hidden_size': 8192, 'intermediate_size': 22528, 'num_hidden_layers': 40,
        'num_attention_heads': 64, 'max_position_embeddings': 8192, 'layer_norm_eps': 1e-5, 'logit_scale': 0.0625,
        'tie_word_embeddings': True, 'sliding_window': 4096, 'layer_types': None, 'sliding_window_pattern': 4,
    },
    'nemotron': _LLAMA | {
        'vocab_size': 256000, 'hidden_size': 6144, 'intermediate_size': 24576, 'num_attention_heads': 48,
        'max_position_embeddings': 4096, 'hidden_act': 'relu2', 'norm_eps': 1e-5, 'partial_rotary_factor': 0.5,
    },
    'exaone4': _LLAMA | {
        'vocab_size': 102400, 'intermediate_size': 16384, 'num_key_value_heads': 32, 'rms_norm_eps': 1e-5,
        'sliding_window': 4096, 'sliding_window_pattern': 4, 'layer_types': None,
    },
}  # fmt: skip
