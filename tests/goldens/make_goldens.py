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
BALANCED = {'router_aux_loss_coef': 0.3, 'output_router_logits': True}  # mixtures of experts: part of the loss


def rope(theta, **more):
    return {'rope_parameters': {'rope_type': 'default', 'rope_theta': theta, **more}}


def layer_types(count, every):
    return ['full_attention' if every and (i + 1) % every == 0 else 'sliding_attention' for i in range(count)]


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
    'olmo2': ('Olmo2Config', SIZES | {'rms_norm_eps': 1e-6} | rope(500000.0)),
    'phi3': ('Phi3Config', SIZES | {
        'sliding_window': 9, 'resid_pdrop': 0.0, 'embd_pdrop': 0.0, 'original_max_position_embeddings': 64,
    } | rope(10000.0)),
    'mixtral': ('MixtralConfig', SIZES | BALANCED | {
        'num_local_experts': 6, 'num_experts_per_tok': 2, 'rms_norm_eps': 1e-5,
    } | rope(1000000.0)),
    'qwen2-moe': ('Qwen2MoeConfig', SIZES | BALANCED | {
        'num_experts': 6, 'num_experts_per_tok': 3, 'moe_intermediate_size': 16, 'rms_norm_eps': 1e-6,
        'shared_expert_intermediate_size': 20, 'norm_topk_prob': False,
    } | rope(1000000.0)),
    'qwen3-moe': ('Qwen3MoeConfig', SIZES | WIDE_HEADS | BALANCED | {
        'num_experts': 8, 'num_experts_per_tok': 3, 'moe_intermediate_size': 12, 'rms_norm_eps': 1e-6,
        'norm_topk_prob': True,
    } | rope(1000000.0)),
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
            else:
                weight.copy_(torch.randn_like(weight) * (0.6 if 'embed' in name or 'wte' in name else 0.25))
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
    if not any('experts' in name for name in gradients):
        return gradients
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
