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


# microsoft/Phi-3.5-mini-instruct
_PHI35_ROPE = {
    'kind': 'longrope', 'factor': 32.0, 'original_length': 4096,
    'short_factor': (
        1.0, 1.0199999809265137, 1.0299999713897705, 1.0299999713897705, 1.0499999523162842, 1.0499999523162842,
        1.0499999523162842, 1.0499999523162842, 1.0499999523162842, 1.0699999332427979, 1.0999999046325684,
        1.1099998950958252, 1.1599998474121094, 1.1599998474121094, 1.1699998378753662, 1.2899998426437378,
        1.339999794960022, 1.679999828338623, 1.7899998426437378, 1.8199998140335083, 1.8499997854232788,
        1.8799997568130493, 1.9099997282028198, 1.9399996995925903, 1.9899996519088745, 2.0199997425079346,
        2.0199997425079346, 2.0199997425079346, 2.0199997425079346, 2.0199997425079346, 2.0199997425079346,
        2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914,
        2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0799996852874756,
        2.0899996757507324, 2.189999580383301, 2.2199995517730713, 2.5899994373321533, 2.729999542236328,
        2.749999523162842, 2.8399994373321533,
    ),
    'long_factor': (
        1.0800000429153442, 1.1100000143051147, 1.1399999856948853, 1.340000033378601, 1.5899999141693115,
        1.600000023841858, 1.6200000047683716, 2.620000123977661, 3.2300000190734863, 3.2300000190734863,
        4.789999961853027, 7.400000095367432, 7.700000286102295, 9.09000015258789, 12.199999809265137,
        17.670000076293945, 24.46000099182129, 28.57000160217285, 30.420001983642578, 30.840002059936523,
        32.590003967285156, 32.93000411987305, 42.320003509521484, 44.96000289916992, 50.340003967285156,
        50.45000457763672, 57.55000305175781, 57.93000411987305, 58.21000289916992, 60.1400032043457,
        62.61000442504883, 62.62000274658203, 62.71000289916992, 63.1400032043457, 63.1400032043457,
        63.77000427246094, 63.93000411987305, 63.96000289916992, 63.970001220703125, 64.02999877929688,
        64.06999969482422, 64.08000183105469, 64.12000274658203, 64.41000366210938, 64.4800033569336,
        64.51000213623047, 64.52999877929688, 64.83999633789062,
    ),
}  # fmt: skip


def _glm(n_layers: int, d_model: int, d_ff_dense: int, d_ff: int, **more: Any) -> dict[str, Any]:
    sizes = {'d_head': 128, 'd_shared': d_ff, 'd_ff_dense': d_ff_dense}
    return _sizes('glm4-moe', 151552, n_layers, d_model, 96, 8, d_ff, **sizes, **more)


def _qwen35(
    n_layers: int, d_model: int, n_heads: int, n_kv_heads: int, d_ff: int, linear_heads: int, **more: Any
) -> Any:
    sizes = {'d_head': 256, 'linear_heads': linear_heads, 'linear_key_heads': 16}
    return _sizes('qwen3.5', 248320, n_layers, d_model, n_heads, n_kv_heads, d_ff, **sizes | more)


def _qwen35_moe(n_layers: int, d_model: int, n_heads: int, d_ff: int, linear_heads: int, **more: Any) -> Any:
    return _qwen35(n_layers, d_model, n_heads, 2, d_ff, linear_heads, d_shared=d_ff, **more) | {'family': 'qwen3.5-moe'}


def _mamba2(n_layers: int, d_model: int, **more: Any) -> dict[str, Any]:
    sizes = {'n_layers': n_layers, 'd_model': d_model, 'vocab_size': 50288, 'tied': True}
    return {'family': 'mamba2', **sizes, **more}


# microsoft/Phi-4-mini-instruct
_PHI4_MINI_ROPE = {
    'kind': 'longrope', 'factor': 32.0, 'original_length': 4096, 'short_factor': (1.0,) * 48,
    'long_factor': (
        1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
        2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
        6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
        16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6,
        32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
    ),
}  # fmt: skip


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


def _llama4(n_experts: int, **more: Any) -> dict[str, Any]:
    return _sizes('llama4', 202048, 48, 5120, 40, 8, 8192, d_head=128, n_experts=n_experts, d_shared=8192, **more)


def _yarn(factor: float, mscale: float, beta_fast: float = 32.0) -> dict[str, Any]:
    more = {'beta_fast': beta_fast, 'mscale': mscale, 'mscale_all_dim': mscale}
    return {'kind': 'yarn', 'factor': factor, 'original_length': 4096, **more}


def _gemma3(*sizes: int, window: int, **more: Any) -> dict[str, Any]:
    """From 4B on the global layers' positions are divided by 8."""
    scaling = {'rope_scaling': {'kind': 'linear', 'factor': 8.0}} if window == 1024 else {}
    return _sizes('gemma3', *sizes, window=window, **scaling, **more)


def _pythia(n_layers: int, d_model: int, n_heads: int, vocab_size: int = 50304) -> dict[str, Any]:
    return _sizes('gpt-neox', vocab_size, n_layers, d_model, n_heads, n_heads, 4 * d_model)


def _olmo3(*sizes: int) -> dict[str, Any]:
    """Extended from 8,192 positions by YaRN, in the layers without a window."""
    scaling = {'kind': 'yarn', 'factor': 8.0, 'original_length': 8192, 'attention_factor': 1.2079441541679836}
    return _sizes('olmo3', *sizes, rope_scaling=scaling)


def _granite(d_model: int, d_ff: int, vocab_size: int, rope_base: float) -> dict[str, Any]:
    scores, logits = (64.0**2, 1 / 8) if d_model == 2048 else (128.0**2, 1 / 16)
    return _sizes(
        'granite', vocab_size, 40, d_model, 32, 8, d_ff, tied=True, rope_base=rope_base, query_pre_attn_scalar=scores,
        embedding_multiplier=12.0, residual_multiplier=0.22, logit_multiplier=logits,
    )  # fmt: skip


def _exaone4(*sizes: int, **more: Any) -> dict[str, Any]:
    scaling = {
        'kind': 'llama3', 'factor': 16.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_length': 8192,
    }  # fmt: skip
    return _sizes('exaone4', 102400, *sizes, rope_scaling=scaling, **more)


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
    # Meta 2025, "The Llama 4 herd", and meta-llama/Llama-4-Scout-17B-16E, Llama-4-Maverick-17B-128E (the text models)
    'llama4-scout-17b-16e': _llama4(
        16,
        rope_scaling={
            'kind': 'llama3',
            'factor': 16.0,
            'low_freq_factor': 1.0,
            'high_freq_factor': 1.0,
            'original_length': 8192,
        },
    ),
    'llama4-maverick-17b-128e': _llama4(128, qk_norm='none', expert_every=2, d_ff_dense=16384),
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
    # Qwen/Qwen3-Next-80B-A3B-Instruct
    'qwen3-next-80b-a3b': _sizes(
        'qwen3-next', _QWEN, 48, 2048, 16, 2, 512, d_head=256, d_shared=512, linear_heads=32, linear_key_heads=16
    ),
    # Qwen/Qwen3.5-0.8B, 2B, 4B, 9B, 27B, and Qwen/Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B (the text models)
    'qwen3.5-0.8b': _qwen35(24, 1024, 8, 2, 3584, 16, tied=True),
    'qwen3.5-2b': _qwen35(24, 2048, 8, 2, 6144, 16, tied=True),
    'qwen3.5-4b': _qwen35(32, 2560, 16, 4, 9216, 32, tied=True),
    'qwen3.5-9b': _qwen35(32, 4096, 16, 4, 12288, 32),
    'qwen3.5-27b': _qwen35(64, 5120, 24, 4, 17408, 48),
    'qwen3.5-35b-a3b': _qwen35_moe(40, 2048, 16, 512, 32),
    'qwen3.5-122b-a10b': _qwen35_moe(48, 3072, 32, 1024, 64),
    'qwen3.5-397b-a17b': _qwen35_moe(60, 4096, 32, 1024, 64, n_experts=512, experts_per_token=10),
    # Qwen Team 2024, qwenlm.github.io/blog/qwen-moe, and Qwen/Qwen1.5-MoE-A2.7B;
    # Yang et al. 2024, arXiv:2407.10671, table 1, and Qwen/Qwen2-57B-A14B
    'qwen1.5-moe-a2.7b': _sizes(
        'qwen2-moe', _QWEN, 24, 2048, 16, 16, 1408, n_experts=60, experts_per_token=4, d_shared=5632
    ),
    'qwen2-57b-a14b': _sizes('qwen2-moe', _QWEN, 28, 3584, 28, 4, 2560, d_shared=20480),
    # Jiang et al. 2024, arXiv:2401.04088, table 1; mistralai/Mixtral-8x22B-v0.1
    'mixtral-8x7b': _sizes('mixtral', 32000, 32, 4096, 32, 8, 14336),
    'mixtral-8x22b': _sizes('mixtral', 32000, 56, 6144, 48, 8, 16384),
    # GLM-4.5 Team 2025, arXiv:2508.06471, table 1, and zai-org/GLM-4.5-Air, GLM-4.5, GLM-4.6; MiniMaxAI/MiniMax-M2
    'glm4.5-air': _glm(46, 4096, 10944, 1408, n_experts=128, dense_layers=1),
    'glm4.5': _glm(92, 5120, 12288, 1536, n_experts=160, dense_layers=3, qk_norm='head', router_scale=2.5),
    'glm4.6': _glm(92, 5120, 12288, 1536, n_experts=160, dense_layers=3, qk_norm='head', router_scale=2.5),
    'minimax-m2': _sizes('minimax-m2', 200064, 62, 3072, 48, 8, 1536, d_head=128),
    # DeepSeek-AI 2024, arXiv:2405.04434, section 3.1.2 and appendix B, and deepseek-ai/DeepSeek-V2-Lite, DeepSeek-V2
    'deepseek-v2-lite': _sizes(
        'deepseek-v2',
        102400,
        27,
        2048,
        16,
        16,
        1408,
        n_experts=64,
        d_shared=2816,
        dense_layers=1,
        d_ff_dense=10944,
        rope_scaling=_yarn(40.0, 0.707),
    ),
    'deepseek-v2': _sizes(
        'deepseek-v2',
        102400,
        60,
        5120,
        128,
        128,
        1536,
        q_rank=1536,
        d_shared=3072,
        dense_layers=1,
        d_ff_dense=12288,
        n_expert_groups=8,
        groups_per_token=3,
        router_scale=16.0,
        rope_scaling=_yarn(40.0, 0.707),
    ),
    # DeepSeek-AI 2024, arXiv:2412.19437, section 4.2, and deepseek-ai/DeepSeek-V3; Kimi Team 2025, arXiv:2507.20534,
    # table 2, and moonshotai/Kimi-K2-Instruct
    'deepseek-v3': _sizes(
        'deepseek-v3',
        129280,
        61,
        7168,
        128,
        128,
        2048,
        q_rank=1536,
        d_shared=2048,
        dense_layers=3,
        d_ff_dense=18432,
        n_expert_groups=8,
        groups_per_token=4,
        router_scale=2.5,
        rope_scaling=_yarn(40.0, 1.0),
    ),
    'kimi-k2': _sizes(
        'deepseek-v3',
        163840,
        61,
        7168,
        64,
        64,
        2048,
        q_rank=1536,
        n_experts=384,
        d_shared=2048,
        dense_layers=1,
        d_ff_dense=18432,
        router_scale=2.827,
        rope_base=50000.0,
        rope_scaling=_yarn(32.0, 1.0, beta_fast=1.0),
    ),
    # Liu et al. 2025, arXiv:2502.16982, section 3.3, and moonshotai/Moonlight-16B-A3B
    'moonlight-16b-a3b': _sizes(
        'deepseek-v3',
        163840,
        27,
        2048,
        16,
        16,
        1408,
        n_experts=64,
        experts_per_token=6,
        d_shared=2816,
        dense_layers=1,
        d_ff_dense=11264,
        router_scale=2.446,
        norm_eps=1e-5,
        rope_base=50000.0,
    ),
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
    # Abdin et al. 2024, arXiv:2412.08905, section 3, and microsoft/phi-4; Abouelenin et al. 2025, arXiv:2503.01743, section 2
    'phi3-mini-4k': _sizes('phi3', 32064, 32, 3072, 32, 32, 8192, window=2047),
    'phi3.5-mini': _sizes('phi3', 32064, 32, 3072, 32, 32, 8192, window=262144, rope_scaling=_PHI35_ROPE),
    'phi3-medium-4k': _sizes('phi3', 32064, 40, 5120, 40, 10, 17920, window=2047),
    'phi4-mini': _sizes(
        'phi3',
        200064,
        32,
        3072,
        24,
        8,
        8192,
        tied=True,
        rotary_fraction=0.75,
        window=262144,
        rope_scaling=_PHI4_MINI_ROPE,
    ),
    'phi4-14b': _sizes('phi3', 100352, 40, 5120, 40, 10, 17920, rope_base=250000.0),
    # OpenAI 2025, arXiv:2508.10925, table 1 and section 2, and openai/gpt-oss-*
    'gpt-oss-20b': _sizes('gpt-oss', 201088, 24, 2880, 64, 8, 2880, d_head=64),
    'gpt-oss-120b': _sizes('gpt-oss', 201088, 36, 2880, 64, 8, 2880, d_head=64, n_experts=128),
    # OLMo Team 2025, arXiv:2512.13961, table 1, and allenai/Olmo-3-1025-7B, Olmo-3-1125-32B
    'olmo3-7b': _olmo3(100278, 32, 4096, 32, 32, 11008),
    'olmo3-32b': _olmo3(100278, 64, 5120, 40, 8, 27648),
    # Muennighoff et al. 2024, arXiv:2409.02060, table 10, and allenai/OLMoE-1B-7B-0924
    'olmoe-1b-7b': _sizes('olmoe', 50304, 16, 2048, 16, 16, 1024),
    # Biderman et al. 2023, arXiv:2304.01373, table 1, and EleutherAI/pythia-*; Black et al. 2022, arXiv:2204.06745
    'pythia-14m': _pythia(6, 128, 4),
    'pythia-31m': _pythia(6, 256, 8),
    'pythia-70m': _pythia(6, 512, 8),
    'pythia-160m': _pythia(12, 768, 12),
    'pythia-410m': _pythia(24, 1024, 16),
    'pythia-1b': _pythia(16, 2048, 8),
    'pythia-1.4b': _pythia(24, 2048, 16),
    'pythia-2.8b': _pythia(32, 2560, 32),
    'pythia-6.9b': _pythia(32, 4096, 32, 50432),
    'pythia-12b': _pythia(36, 5120, 40, 50688),
    'gpt-neox-20b': _pythia(44, 6144, 64, 50432) | {'activation': 'gelu'},
    # Li et al. 2023, arXiv:2309.05463, section 2, and microsoft/phi-1_5, phi-2
    'phi1.5-1.3b': _sizes('phi', 51200, 24, 2048, 32, 32, 8192),
    'phi2-2.7b': _sizes('phi', 51200, 32, 2560, 32, 32, 10240, rotary_fraction=0.4),
    # stabilityai/stablelm-3b-4e1t; Bellagente et al. 2024, arXiv:2402.17834, table 2, and stablelm-2-1_6b
    'stablelm-3b': _sizes('stablelm', 50304, 32, 2560, 32, 32, 6912),
    'stablelm2-1.6b': _sizes('stablelm', 100352, 24, 2048, 32, 32, 5632, qkv_bias=True),
    # Granite Team 2024, "Granite 3.0 Language Models", table 2, and ibm-granite/granite-3.*-*b-base
    'granite3.0-2b': _granite(2048, 8192, 49152, 1e4),
    'granite3.0-8b': _granite(4096, 12800, 49152, 1e4),
    'granite3.3-2b': _granite(2048, 8192, 49159, 1e7),
    'granite3.3-8b': _granite(4096, 12800, 49159, 1e7),
    # CohereLabs/c4ai-command-r7b-12-2024, and Cohere 2025, arXiv:2504.00698, with c4ai-command-a-03-2025
    'command-r7b': _sizes('cohere2', 256000, 32, 4096, 32, 8, 14336, logit_multiplier=0.25),
    'command-a-111b': _sizes('cohere2', 256000, 64, 12288, 96, 8, 36864, logit_multiplier=0.25),
    # Muralidharan et al. 2024, arXiv:2407.14679, table 1, and nvidia/Minitron-4B-Base, Minitron-8B-Base
    'minitron-4b': _sizes('nemotron', 256000, 32, 3072, 24, 8, 9216),
    'minitron-8b': _sizes('nemotron', 256000, 32, 4096, 48, 8, 16384, d_head=128),
    # LG AI Research 2025, arXiv:2507.11407, table 2, and LGAI-EXAONE/EXAONE-4.0-1.2B, -32B
    'exaone4-1.2b': _exaone4(30, 2048, 32, 8, 4096, tied=True),
    'exaone4-32b': _exaone4(64, 5120, 40, 8, 27392, window=4096, global_every=4),
    # Dao and Gu 2024, arXiv:2405.21060, section 9.2, and state-spaces/mamba2-*; mistralai/Mamba-Codestral-7B-v0.1
    'mamba2-130m': _mamba2(24, 768),
    'mamba2-370m': _mamba2(48, 1024),
    'mamba2-780m': _mamba2(48, 1536),
    'mamba2-1.3b': _mamba2(48, 2048),
    'mamba2-2.7b': _mamba2(64, 2560),
    'codestral-mamba-7b': _mamba2(64, 4096, vocab_size=32768, linear_key_heads=8, tied=False),
    # The C4 configurations of seqax (MatX-inc/seqax, configs/c4_a100x8_*.yaml)
    'seqax-84m': _seqax(512, 8, 4096),
    'seqax-270m': _seqax(1024, 16, 8192),
    'seqax-540m': _seqax(2048, 16, 8192),
    'seqax-1b': _seqax(2048, 16, 16384),
    'seqax-2b': _seqax(4096, 16, 16384),
}
