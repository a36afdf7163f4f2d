"""Model families as rows of options. No JAX here.

A family fixes the parts of the decoder. A preset (presets.yaml) is a family with published sizes. Every option can be
overridden: `model: {preset: gpt2-124m, n_layers: 6}`. docs/models.md has the table of families. Keys are those of the
section `model:`, dotted.
"""

import re
from pathlib import Path
from typing import Any

# A choice that a family leaves out is that of 'llama', or the default in options/.
_LLAMA = {
    'norm.kind': 'rmsnorm', 'norm.eps': 1e-5, 'positions': 'rope', 'feed_forward.activation': 'swiglu', 'bias': False,
    'embedding.tied': False,
}  # fmt: skip
_QWEN2 = _LLAMA | {'norm.eps': 1e-6, 'attention.qkv_bias': True, 'rope.base': 1e6}
_QWEN3 = _LLAMA | {'norm.eps': 1e-6, 'attention.qk_norm': 'head', 'rope.base': 1e6}
_PARALLEL = _LLAMA | {'norm.kind': 'layernorm', 'block.parallel': True}
_GEMMA = _LLAMA | {
    'norm.eps': 1e-6, 'norm.offset': 1.0, 'feed_forward.activation': 'geglu', 'embedding.tied': True,
    'embedding.scale': True,
}  # fmt: skip
_SIGMOID = {'experts.router.scores': 'sigmoid', 'experts.router.bias': True, 'experts.router.group_scores': 'top2'}
_QWEN3_NEXT = _QWEN3 | {
    'norm.offset': 1.0, 'layer_types': ('delta', 'delta', 'delta', 'full'), 'attention.gate': True, 'rope.base': 1e7,
    'rope.fraction': 0.25,
}  # fmt: skip
_DEEPSEEK = _LLAMA | {
    'norm.eps': 1e-6,
    'attention.d_head': 128,
    'attention.latent.kv_rank': 512,
    'attention.latent.d_rope': 64,
}

FAMILIES: dict[str, dict[str, Any]] = {
    # Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; the released code's choices
    'gpt2': {
        'norm.kind': 'layernorm', 'norm.eps': 1e-5, 'positions': 'learned', 'feed_forward.activation': 'gelu',
        'bias': True, 'embedding.tied': True,
    },
    # Touvron et al. 2023, arXiv:2302.13971, section 2.2. SmolLM belongs to this family too.
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
        'block.norms': 'sandwich', 'attention.window': 4096, 'attention.global_every': 2, 'attention.softcap': 50.0,
        'head.softcap': 30.0,
        'attention.query_pre_attn_scalar': 256.0,
    },
    # Gemma Team 2025, arXiv:2503.19786, section 2.1
    'gemma3': _GEMMA | {
        'block.norms': 'sandwich', 'attention.qk_norm': 'head', 'attention.window': 1024, 'attention.global_every': 6,
        'rope.base': 1e6,
        'rope.local_base': 1e4, 'attention.query_pre_attn_scalar': 256.0,
    },
    # Gemma Team 2026, google/gemma-4-31B: its configuration and the released code (the text model)
    'gemma4': _GEMMA | {
        'norm.offset': 0.0, 'block.norms': 'sandwich', 'block.layer_scale': True, 'attention.qk_norm': 'head',
        'attention.v_norm': True, 'attention.query_pre_attn_scalar': 1.0, 'attention.window': 1024,
        'attention.global_every': 6, 'attention.global_d_head': 512, 'attention.global_k_as_v': True,
        'rope.base': 1e6, 'rope.scaling': {'kind': 'proportional', 'fraction': 0.25}, 'rope.local_base': 1e4,
        'head.softcap': 30.0,
    },
    # OLMo Team 2025, arXiv:2501.00656, section 3
    'olmo2': _LLAMA | {
        'norm.eps': 1e-6, 'block.norms': 'post', 'attention.qk_norm': 'full', 'rope.base': 500000.0,
        'init.kind': 'normal',
    },
    # HuggingFaceTB/SmolLM3-3B: every fourth layer without positions (Yang et al. 2025, arXiv:2501.18795)
    'smollm3': _LLAMA | {'norm.eps': 1e-6, 'embedding.tied': True, 'rope.nope_every': 4, 'rope.base': 5e6},
    # Jiang et al. 2024, arXiv:2401.04088, section 2
    'mixtral': _LLAMA | {'rope.base': 1e6, 'experts.n_experts': 8, 'experts.experts_per_token': 2},
    # Yang et al. 2024, arXiv:2407.10671, section 2.2.2, and the released code
    'qwen2-moe': _QWEN2 | {
        'experts.n_experts': 64, 'experts.experts_per_token': 8, 'experts.shared_gate': True,
        'experts.router.normalize': False,
    },
    # Qwen Team 2025, arXiv:2505.09388, section 2
    'qwen3-moe': _QWEN3 | {'experts.n_experts': 128, 'experts.experts_per_token': 8},
    # DeepSeek-AI 2024, arXiv:2405.04434, section 2, and the released configurations
    'deepseek-v2': _DEEPSEEK | {
        'experts.n_experts': 160, 'experts.experts_per_token': 6, 'experts.router.normalize': False,
        'experts.router.balance_loss': 0.001,
    },
    # DeepSeek-AI 2024, arXiv:2412.19437, section 2.1 (without multi-token prediction). Kimi K2 and Moonlight belong to
    # it too.
    'deepseek-v3': _DEEPSEEK | {
        **_SIGMOID, 'experts.n_experts': 256, 'experts.experts_per_token': 8, 'experts.router.balance_loss': 0.0001,
    },
    # GLM-4.5 Team 2025, arXiv:2508.06471, section 2.1, and the released configurations
    'glm4-moe': _LLAMA | _SIGMOID | {
        'attention.qkv_bias': True, 'rope.fraction': 0.5, 'rope.base': 1e6, 'experts.n_experts': 128,
        'experts.experts_per_token': 8,
        'experts.router.balance_loss': 0.0001,
    },
    # MiniMax 2025, MiniMaxAI/MiniMax-M2: its configuration and code
    'minimax-m2': _LLAMA | _SIGMOID | {
        'norm.eps': 1e-6, 'attention.qk_norm': 'full', 'rope.fraction': 0.5, 'rope.base': 5e6, 'experts.n_experts': 256,
        'experts.experts_per_token': 8, 'experts.router.balance_loss': 0.001,
    },
    # Meta 2025, "The Llama 4 herd", and the released code
    'llama4': _LLAMA | {
        'rope.base': 500000.0, 'rope.nope_every': 4, 'attention.window': 8192, 'attention.window_type': 'chunked',
        'attention.global_every': 4, 'attention.qk_norm': 'l2',
        'attention.temperature': 0.1, 'experts.n_experts': 16, 'experts.experts_per_token': 1,
        'experts.router.scores': 'sigmoid',
        'experts.router.normalize': False, 'experts.router.weigh_inputs': True,
    },
    # OpenAI 2025, arXiv:2508.10925, section 2, and the released code
    'gpt-oss': _LLAMA | {
        'attention.sinks': True, 'attention.window': 128, 'attention.global_every': 2, 'attention.qkv_bias': True,
        'attention.o_bias': True, 'feed_forward.bias': True,
        'feed_forward.activation': 'swiglu_oai', 'experts.n_experts': 32, 'experts.experts_per_token': 4,
        'rope.base': 150000.0, 'rope.scaling': {
            'kind': 'yarn', 'factor': 32.0, 'original_length': 4096, 'truncate': False,
        },
    },
    # Abdin et al. 2024, arXiv:2404.14219, section 2: Llama's block. Phi-4 belongs to this family too.
    'phi3': _LLAMA,
    # Muennighoff et al. 2024, arXiv:2409.02060, section 2
    'olmoe': _LLAMA | {'attention.qk_norm': 'full', 'experts.n_experts': 64, 'experts.experts_per_token': 8,
    'experts.router.normalize': False},
    # OLMo Team 2025, arXiv:2512.13961, section 3.1, and the released code
    'olmo3': _LLAMA | {
        'norm.eps': 1e-6, 'block.norms': 'post', 'attention.qk_norm': 'full', 'rope.base': 500000.0,
        'rope.local_base': 500000.0, 'attention.window': 4096,
        'attention.global_every': 4,
    },
    # Black et al. 2022, arXiv:2204.06745, section 2.1; Biderman et al. 2023, arXiv:2304.01373, section 2.2 (Pythia)
    'gpt-neox': _PARALLEL | {'feed_forward.activation': 'gelu_erf', 'bias': True, 'rope.fraction': 0.25},
    # Li et al. 2023, arXiv:2309.05463, section 2, and the released code of Phi-1, 1.5 and 2
    'phi': _PARALLEL | {
        'feed_forward.activation': 'gelu', 'bias': True, 'rope.fraction': 0.5, 'block.shared_norm': True,
        'head.bias': True,
    },
    # Bellagente et al. 2024, arXiv:2402.17834, section 3.2
    'stablelm': _LLAMA | {'norm.kind': 'layernorm', 'norm.bias': True, 'rope.fraction': 0.25},
    # Granite Team 2024, "Granite 3.0 Language Models", section 3
    'granite': _LLAMA,
    # Cohere 2025, arXiv:2504.00698, section 2.1, and the released code
    'cohere2': _PARALLEL | {
        'feed_forward.activation': 'swiglu', 'block.shared_norm': True, 'embedding.tied': True, 'rope.base': 50000.0,
        'attention.window': 4096,
        'attention.global_every': 4, 'rope.nope_global': True,
    },
    # Parmar et al. 2024, arXiv:2402.16819, section 2; Muralidharan et al. 2024, arXiv:2407.14679 (Minitron)
    'nemotron': _LLAMA | {
        'norm.kind': 'layernorm', 'norm.offset': 1.0, 'norm.bias': True, 'feed_forward.activation': 'relu2',
        'rope.fraction': 0.5,
    },
    # LG AI Research 2025, arXiv:2507.11407, section 2.1
    'exaone4': _LLAMA | {'block.norms': 'post', 'attention.qk_norm': 'head', 'rope.base': 1e6,
    'rope.nope_global': True},
    # Qwen Team 2025, "Qwen3-Next", and the released code; gated delta nets: Yang et al. 2024, arXiv:2412.06464
    'qwen3-next': _QWEN3_NEXT | {'experts.n_experts': 512, 'experts.experts_per_token': 10,
    'experts.shared_gate': True},
    # Qwen Team 2026, Qwen/Qwen3.5-*: the released configurations and code (the text models)
    'qwen3.5': _QWEN3_NEXT,
    'qwen3.5-moe': _QWEN3_NEXT | {'experts.n_experts': 256, 'experts.experts_per_token': 8,
    'experts.shared_gate': True},
    # Dao and Gu 2024, arXiv:2405.21060, section 7.1, and the released code: no attention and no feed-forward
    'mamba2': _LLAMA | {
        'layer_types': ('mamba',), 'feed_forward.d_ff': 0, 'recurrent.d_head': 64, 'recurrent.d_key': 128,
        'recurrent.n_key_heads': 1,
        'recurrent.conv_bias': True,
    },
}  # fmt: skip

FAMILY_NAMES = tuple(FAMILIES)


PRESETS = Path(__file__).with_name('presets.yaml')
PRESET_NAMES = tuple(re.findall(r'^([\w.-]+):', PRESETS.read_text(), re.MULTILINE))


# Named activations of a layer, in the order in which they are computed. All of them can be recomputed from 'input',
# which is always kept, on the device or in host memory.
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
