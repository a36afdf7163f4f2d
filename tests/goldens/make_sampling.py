"""Writes what the logits processors of `transformers` do to random logits, for a test that needs neither it nor
PyTorch.

Run by hand, in the environment that `make_goldens.py` describes:

    ENV/bin/python tests/goldens/make_sampling.py

`sampling.safetensors`, of R rows: logits f32[R, V]; tokens i32[R, L] so far; temperature, top_p, min_p and
repetition_penalty f32[R], top_k i32[R] (0: all); processed f32[R, V], -inf for tokens that are never chosen.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

ROWS, VOCAB, LENGTH = 48, 96, 24

rng = np.random.default_rng(17)
logits = torch.tensor(3 * rng.standard_normal((ROWS, VOCAB)), dtype=torch.float32)
tokens = torch.tensor(rng.integers(0, VOCAB, (ROWS, LENGTH)))
given = {
    'temperature': rng.choice([0.4, 1.0, 1.7], ROWS).astype(np.float32),
    'top_k': rng.choice([0, 1, 5, 40, 200], ROWS).astype(np.int32),
    'top_p': rng.choice([0.1, 0.5, 0.9, 0.99, 1.0], ROWS).astype(np.float32),
    'min_p': rng.choice([0.0, 0.02, 0.3], ROWS).astype(np.float32),
    'repetition_penalty': rng.choice([0.8, 1.0, 1.3, 2.0], ROWS).astype(np.float32),
}
processed = []
for row in range(ROWS):
    how = {name: values[row].item() for name, values in given.items()}
    # In the order of `GenerationMixin._get_logits_processor`.
    process = LogitsProcessorList([
        RepetitionPenaltyLogitsProcessor(how['repetition_penalty']),
        TemperatureLogitsWarper(how['temperature']),
        *([TopKLogitsWarper(how['top_k'])] if how['top_k'] else []),
        TopPLogitsWarper(how['top_p']),
        MinPLogitsWarper(how['min_p']),
    ])  # fmt: skip
    processed.append(process(tokens[row, None], logits[row, None])[0])
tensors = {'logits': logits, 'tokens': tokens.int(), 'processed': torch.stack(processed)}
tensors |= {name: torch.from_numpy(values) for name, values in given.items()}
save_file({name: x.contiguous() for name, x in tensors.items()}, Path(__file__).parent / 'sampling.safetensors')
