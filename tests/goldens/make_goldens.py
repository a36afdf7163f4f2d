"""Writes what PyTorch and `transformers` compute with a tiny random model of each family, for tests that need neither.

Run by hand, in an environment of its own:

    python3.11 -m venv ENV && ENV/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors numpy
    ENV/bin/python tests/goldens/make_goldens.py [CASE ...]

Each case becomes a directory beside this file:

    config.json, model.safetensors    the model, as `save_pretrained` writes it
    golden.safetensors                tokens i32[2, L+1]; logits f32[2, L, V]; loss f32[] (of experts, the load-balance
                                      loss included); grad.NAME of every weight;
                                      packed_tokens i32[1, L] of three documents, packed_segments, packed_logits,
                                      packed_loss (each document in a forward pass of its own);
                                      prompt.N, continuation.N: greedy, by `generate`

`versions.json` records what wrote them. The sizes are the smallest at which every choice of a family can be seen: rows
are longer than windows and than the length that RoPE scaling starts from, and no weight has a special value.
"""

import json
import platform
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
LENGTH, NEW_TOKENS = 48, 12
DOCUMENTS = (13, 24, 11)  # of the packed row
PROMPTS = (5, 21)  # lengths; the longer one exceeds every window

SIZES = {
    'vocab_size': 96, 'hidden_size': 24, 'intermediate_size': 40, 'num_hidden_layers': 2, 'num_attention_heads': 4,
    'num_key_value_heads': 2, 'max_position_embeddings': 64, 'pad_token_id': None, 'bos_token_id': None,
    'eos_token_id': None,
}  # fmt: skip
WIDE_HEADS = {'head_dim': 8}  # not hidden_size / num_attention_heads, which is 6
LLAMA3_ROPE = {
    'rope_type': 'llama3', 'rope_theta': 500.0, 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
    'original_max_position_embeddings': 48,
}  # fmt: skip
# The ramp goes from the second pair of dimensions to the fourth, or begins and ends between pairs.
YARN_ROPE = {
    'rope_type': 'yarn', 'rope_theta': 100.0, 'factor': 8.0, 'beta_fast': 2.0, 'beta_slow': 0.5,
    'original_max_position_embeddings': 40,
}  # fmt: skip
MSCALE_ROPE = YARN_ROPE | {'truncate': False, 'mscale': 0.7, 'mscale_all_dim': 0.3}
EIGHT = SIZES | {'hidden_size': 32}  # heads of eight dimensions, so that a part of them can be rotated
DELTA_NET = {
    'linear_conv_kernel_dim': 3, 'linear_key_head_dim': 6, 'linear_value_head_dim': 8, 'linear_num_key_heads': 2,
    'linear_num_value_heads': 4,
}  # fmt: skip
NEOX = {name: size for name, size in EIGHT.items() if name != 'num_key_value_heads'}
BALANCED = {'router_aux_loss_coef': 0.3, 'output_router_logits': True}  # mixtures of experts: part of the loss
LONGROPE = SIZES | {
    'max_position_embeddings': 128, 'resid_pdrop': 0.0, 'embd_pdrop': 0.0, 'rope_parameters': {
        'rope_type': 'longrope', 'rope_theta': 100.0, 'short_factor': [1.0, 1.3, 1.7], 'long_factor': [1.5, 4.0, 9.0],
    },
}  # fmt: skip

# values are wider than the part of keys without positions; the latents' norms have an eps of their own
DEEPSEEK = SIZES | {
    'num_key_value_heads': 4, 'kv_lora_rank': 10, 'qk_nope_head_dim': 6, 'qk_rope_head_dim': 4, 'v_head_dim': 8,
    'first_k_dense_replace': 1, 'n_routed_experts': 8, 'num_experts_per_tok': 3, 'n_shared_experts': 1,
    'moe_intermediate_size': 12, 'rms_norm_eps': 1e-3,
}  # fmt: skip
GLM = EIGHT | {
    'head_dim': 8, 'n_routed_experts': 8, 'num_experts_per_tok': 3, 'n_shared_experts': 2, 'moe_intermediate_size': 12,
    'routed_scaling_factor': 2.5, 'num_mtp_layers': 0, 'rms_norm_eps': 1e-5,
}  # fmt: skip


# rows, documents and prompts have several chunks, and lengths at which the temperature changes
LLAMA4 = SIZES | WIDE_HEADS | {
    'hidden_size': 16, 'intermediate_size': 12, 'intermediate_size_mlp': 20, 'attention_chunk_size': 7,
    'num_local_experts': 4,
    'router_aux_loss_coef': 0.0, 'rms_norm_eps': 1e-3,
}  # fmt: skip


def rope(theta, **more):
    return {'rope_parameters': {'rope_type': 'default', 'rope_theta': theta, **more}}


def layer_types(count, every):
    return ['full_attention' if every and (i + 1) % every == 0 else 'sliding_attention' for i in range(count)]


GEMMA4 = SIZES | WIDE_HEADS | {
    'global_head_dim': 16, 'sliding_window': 7, 'final_logit_softcapping': 3.0, 'hidden_size_per_layer_input': 0,
    'rope_parameters': {
        'sliding_attention': {'rope_type': 'default', 'rope_theta': 100.0},
        'full_attention': {'rope_type': 'proportional', 'partial_rotary_factor': 0.25, 'rope_theta': 5000.0},
    },
}  # fmt: skip


# Case -> configuration class, its arguments. The model class is the one that AutoModelForCausalLM finds for it.
CASES = {
    'gpt2': ('GPT2Config', {
        'vocab_size': 96, 'n_positions': 64, 'n_embd': 24, 'n_layer': 2, 'n_head': 4, 'bos_token_id': None,
        'eos_token_id': None, 'resid_pdrop': 0.0, 'embd_pdrop': 0.0, 'attn_pdrop': 0.0,
    }),
    'llama2': ('LlamaConfig', SIZES | {'num_key_value_heads': 4, 'rms_norm_eps': 1e-5} | rope(10000.0)),
    'llama3': ('LlamaConfig', SIZES | WIDE_HEADS | {'rms_norm_eps': 1e-5, 'tie_word_embeddings': True,
                                                    'rope_parameters': LLAMA3_ROPE}),
    'llama-linear': ('LlamaConfig', SIZES | rope(10000.0, rope_type='linear', factor=4.0)),
    'llama-yarn': ('LlamaConfig', SIZES | WIDE_HEADS | {'max_position_embeddings': 320, 'rope_parameters': YARN_ROPE}),
    'qwen2-yarn': ('Qwen2Config', SIZES | WIDE_HEADS | {'max_position_embeddings': 320,
    'rope_parameters': MSCALE_ROPE}),
    'smollm2': ('LlamaConfig', SIZES | {'rms_norm_eps': 1e-5, 'tie_word_embeddings': True} | rope(100000.0)),
    'smollm3': ('SmolLM3Config', SIZES | {'num_hidden_layers': 3, 'no_rope_layer_interval': 2,
                                          'tie_word_embeddings': True, 'rms_norm_eps': 1e-6} | rope(50000.0)),
    'mistral': ('MistralConfig', SIZES | WIDE_HEADS | {'sliding_window': 7, 'rms_norm_eps': 1e-5} | rope(10000.0)),
    'qwen2': ('Qwen2Config', SIZES | {'tie_word_embeddings': True, 'rms_norm_eps': 1e-6} | rope(1000000.0)),
    'qwen3': ('Qwen3Config', SIZES | WIDE_HEADS | {'rms_norm_eps': 1e-6} | rope(1000000.0)),
    'gemma': ('GemmaConfig', SIZES | WIDE_HEADS | {'num_key_value_heads': 1} | rope(10000.0)),
    'gemma2': ('Gemma2Config', SIZES | WIDE_HEADS | {
        'num_hidden_layers': 3, 'sliding_window': 7, 'layer_types': layer_types(3, 2), 'query_pre_attn_scalar': 5,
        'attn_logit_softcapping': 2.0, 'final_logit_softcapping': 3.0,
    } | rope(10000.0)),
    'gemma3': ('Gemma3TextConfig', SIZES | WIDE_HEADS | {
        'num_hidden_layers': 4, 'sliding_window': 7, 'layer_types': layer_types(4, 3), 'query_pre_attn_scalar': 12,
        'rope_parameters': {
            'sliding_attention': {'rope_type': 'default', 'rope_theta': 100.0},
            'full_attention': {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 5000.0},
        },
    }),
    # the 31B: in layers without a window wider heads, fewer of keys, which are values too; a pair in four is rotated
    'gemma4': ('Gemma4TextConfig', GEMMA4 | {
        'num_hidden_layers': 4, 'layer_types': layer_types(4, 2), 'attention_k_eq_v': True,
        'num_global_key_value_heads': 1,
    }),
    'gemma4-values': ('Gemma4TextConfig', GEMMA4 | {'layer_types': layer_types(2, 2)}),
    'olmo2': ('Olmo2Config', SIZES | {'rms_norm_eps': 1e-6} | rope(500000.0)),
    'phi3': ('Phi3Config', SIZES | {
        'sliding_window': 9, 'resid_pdrop': 0.0, 'embd_pdrop': 0.0, 'original_max_position_embeddings': 64,
    } | rope(10000.0)),
    # rows, documents and prompts are longer than the original length of 4, or not longer than that of 64
    'phi3-longrope': ('Phi3Config', LONGROPE | {'original_max_position_embeddings': 4}),
    'phi3-longrope-short': ('Phi3Config', LONGROPE | {'original_max_position_embeddings': 64}),
    # Phi-4-mini: three quarters of each head are rotated, with LongRoPE
    'phi4-mini': ('Phi3Config', LONGROPE | {'hidden_size': 32, 'original_max_position_embeddings': 4,
    'tie_word_embeddings': True,
                                            'partial_rotary_factor': 0.75, 'sliding_window': 9}),
    'gpt-oss': ('GptOssConfig', SIZES | WIDE_HEADS | BALANCED | {
        'num_local_experts': 6, 'num_experts_per_tok': 2, 'sliding_window': 7, 'swiglu_limit': 1.0,
        'num_hidden_layers': 3,
        'hidden_size': 16, 'intermediate_size': 12, 'max_position_embeddings': 320,
        'rope_parameters': YARN_ROPE | {'truncate': False},
    }),
    'mixtral': ('MixtralConfig', SIZES | BALANCED | {
        'num_local_experts': 6, 'num_experts_per_tok': 2, 'rms_norm_eps': 1e-5,
    } | rope(1000000.0)),
    'qwen2-moe': ('Qwen2MoeConfig', SIZES | BALANCED | {
        'num_experts': 6, 'num_experts_per_tok': 3, 'moe_intermediate_size': 16, 'rms_norm_eps': 1e-6,
        'shared_expert_intermediate_size': 20, 'norm_topk_prob': False,
    } | rope(1000000.0)),
    'qwen2-moe-mixed': ('Qwen2MoeConfig', SIZES | BALANCED | {  # experts in layers 1 and 5 alone
        'num_hidden_layers': 6, 'decoder_sparse_step': 2, 'mlp_only_layers': [3], 'hidden_size': 16,
        'num_experts': 4, 'num_experts_per_tok': 2, 'moe_intermediate_size': 12, 'rms_norm_eps': 1e-6,
        'shared_expert_intermediate_size': 10, 'norm_topk_prob': False,
    } | rope(1000000.0)),
    'deepseek-v2': ('DeepseekV2Config', DEEPSEEK | {  # two of four groups by their best expert; weights not normalized
        'q_lora_rank': 12, 'topk_method': 'group_limited_greedy', 'n_group': 4, 'topk_group': 2, 'n_shared_experts': 2,
        'routed_scaling_factor': 1.7,
    } | rope(10000.0)),
    'deepseek-v2-lite': ('DeepseekV2Config', DEEPSEEK | {'q_lora_rank': None, 'topk_method': 'greedy'} | rope(
        100.0, rope_type='yarn', factor=4.0, original_max_position_embeddings=16, beta_fast=2.0, mscale=0.7,
        mscale_all_dim=1.1,
    )),
    'deepseek-v3': ('DeepseekV3Config', DEEPSEEK | {  # two of four groups by their two best experts
        'q_lora_rank': 12, 'n_group': 4, 'topk_group': 2, 'norm_topk_prob': True, 'routed_scaling_factor': 2.5,
        'num_mtp_layers': 0,
    } | rope(10000.0)),
    # Kimi K2: experts in one group, and yarn whose ramp has one bound
    'kimi-k2': ('DeepseekV3Config', DEEPSEEK | {
        'q_lora_rank': 12, 'n_group': 1, 'topk_group': 1, 'norm_topk_prob': True, 'routed_scaling_factor': 2.827,
        'num_mtp_layers': 0,
    } | rope(
        50000.0, rope_type='yarn', factor=32.0, original_max_position_embeddings=40, beta_fast=1.0, beta_slow=1.0,
        mscale=1.0, mscale_all_dim=1.0,
    )),
    'glm4-moe': ('Glm4MoeConfig', GLM | {'attention_bias': True, 'use_qk_norm': True, 'first_k_dense_replace': 1}
                 | rope(1000.0, partial_rotary_factor=0.5)),
    'glm4-moe-air': ('Glm4MoeConfig', GLM | {  # two of four groups, weights not normalized, all layers with experts
        'n_group': 4, 'topk_group': 2, 'norm_topk_prob': False, 'routed_scaling_factor': 1.0,
        'first_k_dense_replace': 0,
        'num_hidden_layers': 1,
    } | rope(1000.0, partial_rotary_factor=0.25)),
    'minimax-m2': ('MiniMaxM2Config', EIGHT | {
        'head_dim': 8, 'num_local_experts': 8, 'num_experts_per_tok': 3, 'intermediate_size': 12,
        'router_aux_loss_coef': 0.0,
    } | rope(1000.0, partial_rotary_factor=0.5)),
    'llama4': ('Llama4TextConfig', LLAMA4 | {  # experts in every other layer, no positions in the third
        'num_hidden_layers': 4, 'no_rope_layer_interval': 3, 'interleave_moe_layer_step': 2, 'num_experts_per_tok': 2,
        'floor_scale': 5, 'attn_scale': 0.4,
        'rope_parameters': LLAMA3_ROPE | {'low_freq_factor': 1.0, 'high_freq_factor': 1.0},
    }),
    'llama4-mixed': ('Llama4TextConfig', LLAMA4 | {  # neither norms of queries and keys nor a temperature
        'num_hidden_layers': 3, 'no_rope_layers': [1, 0, 1], 'moe_layers': [0], 'num_experts_per_tok': 1,
        'use_qk_norm': False,
        'attn_temperature_tuning': False, 'attention_bias': True, 'tie_word_embeddings': True,
        'layer_types': ['full_attention', 'full_attention', 'chunked_attention'],
    } | rope(100.0)),
    'qwen3-moe': ('Qwen3MoeConfig', SIZES | WIDE_HEADS | BALANCED | {
        'num_experts': 8, 'num_experts_per_tok': 3, 'moe_intermediate_size': 12, 'rms_norm_eps': 1e-6,
        'norm_topk_prob': True,
    } | rope(1000000.0)),
    'olmoe': ('OlmoeConfig', SIZES | BALANCED | {
        'num_experts': 6, 'num_experts_per_tok': 3, 'intermediate_size': 12, 'norm_topk_prob': False,
    } | rope(10000.0)),
    'olmo3': ('Olmo3Config', SIZES | {
        'num_hidden_layers': 3, 'sliding_window': 7, 'layer_types': ['sliding_attention'] + ['full_attention'] * 2,
        'rms_norm_eps': 1e-6, 'rope_parameters': {
            'sliding_attention': {'rope_type': 'default', 'rope_theta': 5000.0},
            'full_attention': YARN_ROPE | {'rope_theta': 5000.0},
        },
    }),
    'gpt-neox': ('GPTNeoXConfig', NEOX | rope(1000.0, partial_rotary_factor=0.5)),
    'gpt-neox-sequential': ('GPTNeoXConfig', NEOX | {
        'use_parallel_residual': False, 'attention_bias': False,
    } | rope(1000.0, partial_rotary_factor=0.25)),
    'phi': ('PhiConfig', EIGHT | rope(1000.0, partial_rotary_factor=0.5)),
    'stablelm': ('StableLmConfig', EIGHT | {'use_qkv_bias': True} | rope(1000.0, partial_rotary_factor=0.25)),
    'stablelm-parallel': ('StableLmConfig', EIGHT | {
        'use_parallel_residual': True, 'qk_layernorm': True,
    } | rope(1000.0, partial_rotary_factor=0.5)),
    'granite': ('GraniteConfig', SIZES | {
        'tie_word_embeddings': True, 'rms_norm_eps': 1e-5, 'attention_bias': True, 'mlp_bias': True,
        'embedding_multiplier': 3.0, 'attention_multiplier': 0.25, 'residual_multiplier': 0.3, 'logits_scaling': 2.5,
    } | rope(10000.0)),
    'cohere2': ('Cohere2Config', SIZES | {
        'num_hidden_layers': 3, 'sliding_window': 7, 'layer_types': layer_types(3, 2), 'logit_scale': 0.3,
    } | rope(1000.0)),
    'nemotron': ('NemotronConfig', EIGHT | {'head_dim': 8} | rope(1000.0, partial_rotary_factor=0.5)),
    'exaone4': ('Exaone4Config', SIZES | WIDE_HEADS | {
        'num_hidden_layers': 3, 'sliding_window': 7, 'layer_types': layer_types(3, 2),
    } | rope(1000.0)),
    'mamba2': ('Mamba2Config', {
        'vocab_size': 96, 'hidden_size': 24, 'num_hidden_layers': 2, 'num_heads': 6, 'head_dim': 8, 'state_size': 10,
        'n_groups': 2, 'conv_kernel': 3, 'pad_token_id': None, 'bos_token_id': None, 'eos_token_id': None,
    }),
    'qwen3-next': ('Qwen3NextConfig', SIZES | WIDE_HEADS | BALANCED | {
        'num_hidden_layers': 4, 'hidden_size': 16, 'num_experts': 4, 'num_experts_per_tok': 2,
        'moe_intermediate_size': 8,
        'shared_expert_intermediate_size': 12, 'linear_conv_kernel_dim': 3, 'linear_key_head_dim': 6,
        'linear_value_head_dim': 8, 'linear_num_key_heads': 2, 'linear_num_value_heads': 4,
        'partial_rotary_factor': 0.5,
    } | rope(10000.0, partial_rotary_factor=0.5)),
    # sections of positions, which are equal in a text
    'qwen3.5': ('Qwen3_5TextConfig', SIZES | WIDE_HEADS | DELTA_NET | {
        'num_hidden_layers': 4, 'hidden_size': 16, 'intermediate_size': 20, 'tie_word_embeddings': True,
    } | rope(10000.0, partial_rotary_factor=0.5, mrope_section=[1, 1, 0], mrope_interleaved=True)),
    'qwen3.5-moe': ('Qwen3_5MoeTextConfig', SIZES | WIDE_HEADS | BALANCED | DELTA_NET | {
        'hidden_size': 16, 'num_experts': 4, 'num_experts_per_tok': 2, 'moe_intermediate_size': 8,
        'shared_expert_intermediate_size': 12,
        'layer_types': ['full_attention', 'linear_attention'],
    } | rope(1000.0, partial_rotary_factor=0.25, mrope_section=[1, 0, 0], mrope_interleaved=True)),
}  # fmt: skip


def random_model(kind, arguments, seed):
    """A model in which no weight is special: norms are not 1, biases are not 0."""
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**arguments)
    config.architectures = None  # `save_pretrained` fills it in
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager', dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(0.3 * torch.randn_like(weight))
                if name.endswith('A_log'):  # sums of fast decays have few digits left, in either implementation
                    weight.clamp_(max=1.0)
            else:
                weight.copy_(torch.randn_like(weight) * (0.6 if 'embed' in name or 'wte' in name else 0.25))
        for name, buffer in model.named_buffers():
            if name.endswith('e_score_correction_bias'):
                buffer.copy_(0.1 * torch.randn_like(buffer))
            if name.endswith('layer_scalar'):  # a parameter in the code that the models were trained with
                buffer.add_(0.3 * torch.randn_like(buffer)).requires_grad_()
    return model.eval()


def next_token_loss(logits, tokens):
    """Sum over the targets, and how many there are. logits [.., L, V], tokens [.., L+1]."""
    targets = tokens[..., 1:].reshape(-1)
    return torch.nn.functional.cross_entropy(logits.reshape(len(targets), -1), targets, reduction='sum'), len(targets)


def whole_rows(model, rng):
    tokens = torch.from_numpy(rng.integers(0, model.config.vocab_size, (2, LENGTH + 1)))
    out = model(tokens[:, :-1], use_cache=False)
    logits = out.logits
    total, count = next_token_loss(logits, tokens)
    loss = total / count
    if model.config.to_dict().get('output_router_logits'):  # as the model adds it where it computes the loss itself
        loss = loss + model.config.router_aux_loss_coef * out.aux_loss
    model.zero_grad()
    loss.backward()
    gradients = {f'grad.{name}': value for name, value in as_saved(model).items()}
    return {'tokens': tokens.int(), 'logits': logits.detach(), 'loss': loss.detach(), **gradients}


def as_saved(model):
    """The gradients by the names under which the weights are saved: in memory those of all experts are one array."""
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    gradients |= {
        name: torch.zeros_like(x) if x.grad is None else x.grad
        for name, x in model.named_buffers()
        if name.endswith(('e_score_correction_bias', 'layer_scalar'))
    }
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, state_dict=gradients)
        return load_file(Path(directory) / 'model.safetensors')


def packed_documents(model, rng):
    """Three documents, each alone; as they stand in one row."""
    tokens, segments, logits, total, count = [], [], [], 0.0, 0
    for number, length in enumerate(DOCUMENTS, start=1):
        document = torch.from_numpy(rng.integers(0, model.config.vocab_size, (length,)))
        with torch.no_grad():
            alone = model(document[None], use_cache=False).logits[0]
        some, n = next_token_loss(alone[:-1], document)
        tokens, segments, logits = [*tokens, document], [*segments, *[number] * length], [*logits, alone]
        total, count = total + some, count + n
    return {
        'packed_tokens': torch.cat(tokens)[None].int(), 'packed_segments': torch.tensor([segments]).int(),
        'packed_logits': torch.cat(logits)[None], 'packed_loss': total / count,
    }  # fmt: skip


def greedy(model, rng):
    """Continuations, in which no choice is so close that rounding could make it."""
    out = {}
    for number, length in enumerate(PROMPTS):
        prompt = torch.from_numpy(rng.integers(0, model.config.vocab_size, (1, length)))
        whole = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS, use_cache=True
        )
        with torch.no_grad():
            logits = model(whole, use_cache=False).logits[0, length - 1 : -1]
        best = torch.topk(logits, 2).values
        assert torch.equal(logits.argmax(-1), whole[0, length:]), 'generate and the forward pass differ'
        assert (best[:, 0] - best[:, 1]).min() > 2e-3, 'a close choice: take another seed'
        out |= {f'prompt.{number}': prompt[0].int(), f'continuation.{number}': whole[0, length:].int()}
    return out


def make(case):
    kind, arguments = CASES[case]
    for seed in range(100):
        model = random_model(kind, arguments, seed)
        rng = np.random.default_rng(seed)
        try:
            golden = {**whole_rows(model, rng), **packed_documents(model, rng), **greedy(model, rng)}
            break
        except AssertionError as close:
            print(case, 'seed', seed, close)
    directory = HERE / case
    model.save_pretrained(directory)
    (directory / 'generation_config.json').unlink(missing_ok=True)
    (directory / 'model.safetensors').chmod(0o644)
    save_file({name: value.contiguous() for name, value in golden.items()}, directory / 'golden.safetensors')
    (directory / 'golden.safetensors').chmod(0o644)
    print(case, type(model).__name__, f'{model.num_parameters():,} parameters, loss {golden["loss"]:.4f}, seed {seed}')


if __name__ == '__main__':
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for case in sys.argv[1:] or CASES:
        make(case)
    versions = {'python': platform.python_version(), 'torch': torch.__version__, 'numpy': np.__version__,
                'transformers': transformers.__version__}  # fmt: skip
    (HERE / 'versions.json').write_text(json.dumps(versions, indent=2) + '\n')
