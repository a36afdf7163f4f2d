"""Published sizes as data: a preset is a family with the numbers of a released model, and names its source.

Every number can be overridden: `model: {preset: gpt2-124m, n_layers: 6}`. The sources are the papers, and the
`config.json` of the model of that name on the Hugging Face hub where a paper leaves something out.
"""

from typing import Any


def _sizes(
    family: str, vocab_size: int, n_layers: int, d_model: int, n_heads: int, n_kv_heads: int, d_ff: int, **more: Any
) -> dict[str, Any]:
    sizes = {'n_layers': n_layers, 'd_model': d_model, 'n_heads': n_heads, 'n_kv_heads': n_kv_heads, 'd_ff': d_ff}
    return {'family': family, 'vocab_size': vocab_size, **sizes, **more}


def _gpt2(n_layers: int, d_model: int, n_heads: int) -> dict[str, Any]:
    sizes = {'n_layers': n_layers, 'd_model': d_model, 'n_heads': n_heads, 'd_ff': 4 * d_model}
    return {'family': 'gpt2', 'vocab_size': 50257, 'max_sequence_length': 1024, **sizes}


def _seqax(d_model: int, n_heads: int, d_ff: int) -> dict[str, Any]:
    return _sizes('llama', 32768, 8, d_model, n_heads, n_heads, d_ff, d_head=128)


def _llama3(n_layers: int, d_model: int, n_heads: int, d_ff: int, scaled: float | None = None, **more: Any) -> Any:
    """Eight key-value heads; from 3.1 on with RoPE scaled from 8,192 positions by a factor."""
    if scaled:
        more['rope_scaling'] = {
            'kind': 'llama3', 'factor': scaled, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
            'original_length': 8192,
        }  # fmt: skip
    return _sizes('llama', 128256, n_layers, d_model, n_heads, 8, d_ff, rope_base=500000.0, **more)


def _gemma3(*sizes: int, window: int, **more: Any) -> dict[str, Any]:
    """From 4B on the global layers' positions are divided by 8."""
    scaling = {'rope_scaling': {'kind': 'linear', 'factor': 8.0}} if window == 1024 else {}
    return _sizes('gemma3', *sizes, window=window, **scaling, **more)


_QWEN, _QWEN_LARGE = 151936, 152064  # rows of the embedding; the same tokenizer

PRESETS: dict[str, dict[str, Any]] = {
    # Radford et al. 2019, table 2 (layers, width), with the head counts of the released models
    'gpt2-124m': _gpt2(12, 768, 12),
    'gpt2-355m': _gpt2(24, 1024, 16),
    'gpt2-774m': _gpt2(36, 1280, 20),
    'gpt2-1.5b': _gpt2(48, 1600, 25),
    # Touvron et al. 2023, arXiv:2307.09288, and meta-llama/Llama-2-*-hf
    'llama2-7b': _sizes('llama', 32000, 32, 4096, 32, 32, 11008),
    'llama2-13b': _sizes('llama', 32000, 40, 5120, 40, 40, 13824),
    'llama2-70b': _sizes('llama', 32000, 80, 8192, 64, 8, 28672),
    # Grattafiori et al. 2024, arXiv:2407.21783, table 3, and meta-llama/Meta-Llama-3-*
    'llama3-8b': _llama3(32, 4096, 32, 14336),
    'llama3-70b': _llama3(80, 8192, 64, 28672),
    'llama3-405b': _llama3(126, 16384, 128, 53248),
    # meta-llama/Llama-3.1-*, Llama-3.2-*, Llama-3.3-70B-Instruct
    'llama3.1-8b': _llama3(32, 4096, 32, 14336, 8.0),
    'llama3.1-70b': _llama3(80, 8192, 64, 28672, 8.0),
    'llama3.1-405b': _llama3(126, 16384, 128, 53248, 8.0),
    'llama3.2-1b': _llama3(16, 2048, 32, 8192, 32.0, tied=True),
    'llama3.2-3b': _llama3(28, 3072, 24, 8192, 32.0, tied=True),
    'llama3.3-70b': _llama3(80, 8192, 64, 28672, 8.0),
    # Jiang et al. 2023, arXiv:2310.06825, table 1; mistralai/Mistral-7B-v0.3, Mistral-Nemo-Base-2407,
    # Mistral-Small-24B-Base-2501
    'mistral-7b-v0.1': _sizes('mistral', 32000, 32, 4096, 32, 8, 14336, window=4096),
    'mistral-7b-v0.3': _sizes('mistral', 32768, 32, 4096, 32, 8, 14336, rope_base=1e6),
    'mistral-nemo-12b': _sizes('mistral', 131072, 40, 5120, 32, 8, 14336, d_head=128, rope_base=1e6),
    'mistral-small-24b': _sizes('mistral', 131072, 40, 5120, 32, 8, 32768, d_head=128, rope_base=1e8),
    # Yang et al. 2024, arXiv:2407.10671, table 1, and Qwen/Qwen2-*
    'qwen2-0.5b': _sizes('qwen2', _QWEN, 24, 896, 14, 2, 4864, tied=True),
    'qwen2-1.5b': _sizes('qwen2', _QWEN, 28, 1536, 12, 2, 8960, tied=True),
    'qwen2-7b': _sizes('qwen2', _QWEN_LARGE, 28, 3584, 28, 4, 18944),
    'qwen2-72b': _sizes('qwen2', _QWEN_LARGE, 80, 8192, 64, 8, 29568, norm_eps=1e-5),
    # Qwen Team 2024, arXiv:2412.15115, table 1, and Qwen/Qwen2.5-*
    'qwen2.5-0.5b': _sizes('qwen2', _QWEN, 24, 896, 14, 2, 4864, tied=True),
    'qwen2.5-1.5b': _sizes('qwen2', _QWEN, 28, 1536, 12, 2, 8960, tied=True),
    'qwen2.5-3b': _sizes('qwen2', _QWEN, 36, 2048, 16, 2, 11008, tied=True),
    'qwen2.5-7b': _sizes('qwen2', _QWEN_LARGE, 28, 3584, 28, 4, 18944),
    'qwen2.5-14b': _sizes('qwen2', _QWEN_LARGE, 48, 5120, 40, 8, 13824, norm_eps=1e-5),
    'qwen2.5-32b': _sizes('qwen2', _QWEN_LARGE, 64, 5120, 40, 8, 27648, norm_eps=1e-5),
    'qwen2.5-72b': _sizes('qwen2', _QWEN_LARGE, 80, 8192, 64, 8, 29568, norm_eps=1e-5),
    # Qwen Team 2025, arXiv:2505.09388, table 1, and Qwen/Qwen3-*
    'qwen3-0.6b': _sizes('qwen3', _QWEN, 28, 1024, 16, 8, 3072, d_head=128, tied=True),
    'qwen3-1.7b': _sizes('qwen3', _QWEN, 28, 2048, 16, 8, 6144, d_head=128, tied=True),
    'qwen3-4b': _sizes('qwen3', _QWEN, 36, 2560, 32, 8, 9728, d_head=128, tied=True),
    'qwen3-8b': _sizes('qwen3', _QWEN, 36, 4096, 32, 8, 12288, d_head=128),
    'qwen3-14b': _sizes('qwen3', _QWEN, 40, 5120, 40, 8, 17408, d_head=128),
    'qwen3-32b': _sizes('qwen3', _QWEN, 64, 5120, 64, 8, 25600, d_head=128),
    # Qwen Team 2025, arXiv:2505.09388, table 2, and Qwen/Qwen3-30B-A3B, Qwen3-235B-A22B
    'qwen3-30b-a3b': _sizes('qwen3-moe', _QWEN, 48, 2048, 32, 4, 768, d_head=128),
    'qwen3-235b-a22b': _sizes('qwen3-moe', _QWEN, 94, 4096, 64, 4, 1536, d_head=128),
    # Qwen Team 2024, qwenlm.github.io/blog/qwen-moe, and Qwen/Qwen1.5-MoE-A2.7B;
    # Yang et al. 2024, arXiv:2407.10671, table 1, and Qwen/Qwen2-57B-A14B
    'qwen1.5-moe-a2.7b': _sizes(
        'qwen2-moe', _QWEN, 24, 2048, 16, 16, 1408, n_experts=60, experts_per_token=4, d_shared=5632
    ),
    'qwen2-57b-a14b': _sizes('qwen2-moe', _QWEN, 28, 3584, 28, 4, 2560, d_shared=20480),
    # Jiang et al. 2024, arXiv:2401.04088, table 1; mistralai/Mixtral-8x22B-v0.1
    'mixtral-8x7b': _sizes('mixtral', 32000, 32, 4096, 32, 8, 14336),
    'mixtral-8x22b': _sizes('mixtral', 32000, 56, 6144, 48, 8, 16384),
    # Gemma Team 2024, arXiv:2403.08295, table 1
    'gemma-2b': _sizes('gemma', 256000, 18, 2048, 8, 1, 16384, d_head=256),
    'gemma-7b': _sizes('gemma', 256000, 28, 3072, 16, 16, 24576, d_head=256),
    # Gemma Team 2024, arXiv:2408.00118, table 1, and google/gemma-2-*
    'gemma2-2b': _sizes('gemma2', 256000, 26, 2304, 8, 4, 9216, d_head=256),
    'gemma2-9b': _sizes('gemma2', 256000, 42, 3584, 16, 8, 14336, d_head=256),
    'gemma2-27b': _sizes('gemma2', 256000, 46, 4608, 32, 16, 36864, d_head=128, query_pre_attn_scalar=144.0),
    # Gemma Team 2025, arXiv:2503.19786, table 1, and google/gemma-3-*-pt (of the larger ones, the text model)
    'gemma3-270m': _gemma3(262144, 18, 640, 4, 1, 2048, window=512, d_head=256),
    'gemma3-1b': _gemma3(262144, 26, 1152, 4, 1, 6912, window=512, d_head=256),
    'gemma3-4b': _gemma3(262208, 34, 2560, 8, 4, 10240, window=1024, d_head=256),
    'gemma3-12b': _gemma3(262208, 48, 3840, 16, 8, 15360, window=1024, d_head=256),
    'gemma3-27b': _gemma3(262208, 62, 5376, 32, 16, 21504, window=1024, d_head=128, query_pre_attn_scalar=168.0),
    # OLMo Team 2025, arXiv:2501.00656, table 1, and allenai/OLMo-2-0425-1B, -1124-7B, -1124-13B, -0325-32B
    'olmo2-1b': _sizes('olmo2', 100352, 16, 2048, 16, 16, 8192),
    'olmo2-7b': _sizes('olmo2', 100352, 32, 4096, 32, 32, 11008),
    'olmo2-13b': _sizes('olmo2', 100352, 40, 5120, 40, 40, 13824),
    'olmo2-32b': _sizes('olmo2', 100352, 64, 5120, 40, 8, 27648),
    # HuggingFaceTB/SmolLM-*; Ben Allal et al. 2025, arXiv:2502.02737, and SmolLM2-*; SmolLM3-3B
    'smollm-135m': _sizes('llama', 49152, 30, 576, 9, 3, 1536, tied=True),
    'smollm-360m': _sizes('llama', 49152, 32, 960, 15, 5, 2560, tied=True),
    'smollm-1.7b': _sizes('llama', 49152, 24, 2048, 32, 32, 8192, tied=True),
    'smollm2-135m': _sizes('llama', 49152, 30, 576, 9, 3, 1536, tied=True, rope_base=1e5),
    'smollm2-360m': _sizes('llama', 49152, 32, 960, 15, 5, 2560, tied=True, rope_base=1e5),
    'smollm2-1.7b': _sizes('llama', 49152, 24, 2048, 32, 32, 8192, tied=True, rope_base=130000.0),
    'smollm3-3b': _sizes('smollm3', 128256, 36, 2048, 16, 4, 11008),
    # Abdin et al. 2024, arXiv:2404.14219, section 2, and microsoft/Phi-3-{mini,medium}-4k-instruct;
    # Abdin et al. 2024, arXiv:2412.08905, section 3, and microsoft/phi-4
    'phi3-mini-4k': _sizes('phi3', 32064, 32, 3072, 32, 32, 8192, window=2047),
    'phi3-medium-4k': _sizes('phi3', 32064, 40, 5120, 40, 10, 17920, window=2047),
    'phi4-14b': _sizes('phi3', 100352, 40, 5120, 40, 10, 17920, rope_base=250000.0),
    # The C4 configurations of seqax (MatX-inc/seqax, configs/c4_a100x8_*.yaml)
    'seqax-84m': _seqax(512, 8, 4096),
    'seqax-270m': _seqax(1024, 16, 8192),
    'seqax-540m': _seqax(2048, 16, 8192),
    'seqax-1b': _seqax(2048, 16, 16384),
    'seqax-2b': _seqax(4096, 16, 16384),
}
