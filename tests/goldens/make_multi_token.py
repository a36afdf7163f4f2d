"""Writes what `transformers` computes with a module of multi-token prediction behind the golden glm4-moe.

Run by hand, in the environment of make_goldens.py, after that:

    ENV/bin/python tests/goldens/make_multi_token.py

`multi_token.safetensors` has the tensors of the module under the names of the released files, tokens i32[2, L+1], and
logits f32[2, L, V]: those at position i are for token i + 2, from the hidden states of i and the embedding of token i +
1.
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers.modeling_layers import MtpModel

HERE = Path(__file__).parent
LENGTH = 20


def released_names(module, n_layers):
    """The tensors of a module as files have them: one for each expert, and `shared_head.norm`."""
    found = {}
    for name, weight in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
        name = name.removeprefix('mtp_block.').replace('post_norm', 'shared_head.norm')
        if name.endswith('experts.gate_up_proj'):
            for e, both in enumerate(weight):
                gate, up = both.chunk(2)
                found |= {f'mlp.experts.{e}.gate_proj.weight': gate, f'mlp.experts.{e}.up_proj.weight': up}
        elif name.endswith('experts.down_proj'):
            found |= {f'mlp.experts.{e}.down_proj.weight': one for e, one in enumerate(weight)}
        else:
            found[name] = weight
    return {f'model.layers.{n_layers}.{name}': x.detach().clone().contiguous() for name, x in found.items()}


if __name__ == '__main__':
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    main = transformers.AutoModelForCausalLM.from_pretrained(
        HERE / 'glm4-moe', attn_implementation='eager', dtype=torch.float32
    ).eval()
    main.config.num_mtp_layers = 1
    modules = MtpModel(main, 1).eval()
    modules.set_attn_implementation('eager')
    (module,) = modules.layers
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(1 + 0.3 * torch.randn_like(weight) if weight.ndim == 1 else 0.25 * torch.randn_like(weight))
        for name, buffer in module.named_buffers():
            if name.endswith('e_score_correction_bias'):
                buffer.copy_(0.1 * torch.randn_like(buffer))
        tokens = torch.from_numpy(np.random.default_rng(0).integers(0, main.config.vocab_size, (2, LENGTH + 1)))
        hidden = main.model(tokens[:, :-1], use_cache=False).last_hidden_state
        positions = torch.arange(1, LENGTH + 1)[None]
        hidden = modules.forward_layer(0, hidden, positions, None, input_ids=tokens[:, 1:])
        logits = main.lm_head(hidden)
    tensors = released_names(module, main.config.num_hidden_layers)
    save_file(tensors | {'tokens': tokens.int(), 'logits': logits}, HERE / 'multi_token.safetensors')
    (HERE / 'multi_token.safetensors').chmod(0o644)
    print(f'{len(tensors)} tensors, logits up to {logits.abs().max():.2f}')
