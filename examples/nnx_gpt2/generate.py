"""Generate text with the module that examples/nnx_gpt2 trained. Each token costs a forward pass over the whole row.

PYTHONPATH=examples/nnx_gpt2 python examples/nnx_gpt2/generate.py runs/nnx-gpt2 'def '
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp

from pretrax.model.loss import Batch
from pretrax.model.nnx import NnxModel
from pretrax.run.trained import open_trained


def generate(run: str, prompt: str, tokens: int = 64, temperature: float = 0.8) -> str:
    trained = open_trained(run)
    model, tokenizer, weights = trained.run.recipe.model, trained.run.source.tokenizer, trained.weights()
    assert isinstance(model, NnxModel)
    length = trained.run.config.batch.sequence_length

    @jax.jit
    def choose(row, last, key):
        ones: Any = jnp.ones_like(row)
        order: Any = jnp.arange(length)[None]
        batch = Batch(tokens=row, targets=row, segments=ones, positions=order, mask=ones)
        return jax.random.categorical(key, model.logits(weights, batch)[0, last].astype(jnp.float32) / temperature)

    ids = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    with jax.set_mesh(trained.run.mesh):
        for number in range(min(tokens, length - len(ids))):
            row = jnp.zeros((1, length), jnp.int32).at[0, : len(ids)].set(jnp.array(ids))
            ids.append(int(choose(row, len(ids) - 1, jax.random.key(number))))
    return tokenizer.decode(ids)


if __name__ == '__main__':
    print(generate(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ''))
