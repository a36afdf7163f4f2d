"""Writes embeddings as `transformers` users compute them: a pooling of `last_hidden_state`, with the models of the
goldens.

Run by hand, in the environment of make_goldens.py:

    ENV/bin/python tests/goldens/make_embeddings.py

embeddings.safetensors, for each CASE and text N: CASE.tokens.N i32[L], and f32[M] CASE.mean.N (weighted by the
attention mask of a padded batch, as sentence encoders do it), CASE.last.N, CASE.cls.N, CASE.min.N, CASE.max.N.
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
LENGTHS = (1, 7, 23)

if __name__ == '__main__':
    found = {}
    for case in ('llama3', 'gpt2'):
        model = transformers.AutoModel.from_pretrained(HERE / case, dtype=torch.float32, attn_implementation='eager')
        rng = np.random.default_rng(0)
        tokens = torch.zeros((len(LENGTHS), max(LENGTHS)), dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, length in enumerate(LENGTHS):
            tokens[row, :length] = torch.from_numpy(rng.integers(0, model.config.vocab_size, length))
            mask[row, :length] = 1
        with torch.no_grad():
            states = model.eval()(input_ids=tokens, attention_mask=mask).last_hidden_state
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        for row, length in enumerate(LENGTHS):
            own = states[row, :length]
            vectors = {'mean': mean[row], 'last': own[-1], 'cls': own[0], 'min': own.amin(0), 'max': own.amax(0)}
            found[f'{case}.tokens.{row}'] = tokens[row, :length].int()
            found |= {f'{case}.{name}.{row}': vector for name, vector in vectors.items()}
    save_file({name: value.clone().contiguous() for name, value in found.items()}, HERE / 'embeddings.safetensors')
    (HERE / 'embeddings.safetensors').chmod(0o644)
