"""Writes what `transformers` computes where only some layers have a window, and for the language model of Gemma 3 with
vision.

Run by hand, in the environment of make_goldens.py:

    ENV/bin/python tests/goldens/make_windows.py

Each case becomes `windows/CASE`: config.json and model.safetensors, as `save_pretrained` writes them, and
golden.safetensors with tokens i32[1, L] and logits f32[1, L, V].
"""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent / 'windows'
LENGTH = 20
SIZES = {
    'vocab_size': 32, 'hidden_size': 16, 'intermediate_size': 24, 'num_hidden_layers': 5, 'num_attention_heads': 4,
    'num_key_value_heads': 2, 'max_position_embeddings': 64, 'pad_token_id': None, 'bos_token_id': None,
    'eos_token_id': None,
}  # fmt: skip
EXPERTS = {'num_experts': 4, 'num_experts_per_tok': 2, 'moe_intermediate_size': 8}
SHARED = EXPERTS | {'shared_expert_intermediate_size': 8}
WINDOW = {'use_sliding_window': True, 'sliding_window': 5}
FULL, SLIDING = 'full_attention', 'sliding_attention'
IRREGULAR = {'layer_types': [SLIDING, FULL, FULL, SLIDING, FULL]}
VISION = {
    'hidden_size': 8, 'intermediate_size': 8, 'num_hidden_layers': 1, 'num_attention_heads': 2, 'image_size': 8,
    'patch_size': 4, 'model_type': 'siglip_vision_model', 'vision_use_head': False,
}  # fmt: skip
CASES = {
    # without layer_types: each class has a rule of its own
    'qwen2': ('Qwen2Config', SIZES | WINDOW | {'max_window_layers': 3}),
    'qwen2-moe': ('Qwen2MoeConfig', SIZES | SHARED | WINDOW | {'max_window_layers': 3}),
    'qwen3-moe': ('Qwen3MoeConfig', SIZES | EXPERTS | WINDOW | {'head_dim': 4, 'max_window_layers': 3}),
    'smollm3': ('SmolLM3Config', SIZES | WINDOW | {'no_rope_layer_interval': 2}),
    'qwen2-moe-types': ('Qwen2MoeConfig', SIZES | SHARED | WINDOW | IRREGULAR),
    'smollm3-types': ('SmolLM3Config', SIZES | WINDOW | IRREGULAR | {'no_rope_layer_interval': 3}),
    'gemma2-types': ('Gemma2Config', SIZES | IRREGULAR | {'head_dim': 4, 'sliding_window': 5}),
    'gemma3-vision': ('Gemma3Config', {
        'text_config': SIZES | {'head_dim': 4, 'sliding_window': 5, 'num_hidden_layers': 7}, 'vision_config': VISION,
        'mm_tokens_per_image': 4,
    }),
}  # fmt: skip
# Of these the fields of the rule are taken out of config.json again, in which `save_pretrained` writes what follows
# from it
RULES = ('qwen2', 'qwen2-moe', 'qwen3-moe', 'smollm3')


def make(case):
    kind, arguments = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**json.loads(json.dumps(arguments)))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation='eager', dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * (0.3 if weight.ndim == 1 else 0.4))
        tokens = torch.randint(0, 32, (1, LENGTH))
        logits = model(tokens, use_cache=False).logits
    directory = HERE / case
    model.save_pretrained(directory)
    (directory / 'generation_config.json').unlink(missing_ok=True)
    if case in RULES:
        written = json.loads((directory / 'config.json').read_text())
        written = {name: value for name, value in written.items() if name not in ('layer_types', 'no_rope_layers')}
        (directory / 'config.json').write_text(json.dumps(written, indent=2) + '\n')
    save_file({'tokens': tokens.int(), 'logits': logits}, directory / 'golden.safetensors')
    for path in directory.glob('*.safetensors'):
        path.chmod(0o644)
    print(case, type(model).__name__, f'{sum(path.stat().st_size for path in directory.iterdir()):,} bytes')


if __name__ == '__main__':
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for case in CASES:
        make(case)
