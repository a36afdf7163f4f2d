"""Embeddings of the engine: pooled hidden states, as transformers computes them and as plain jax.numpy does."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from goldens.golden import model_of, ours, tensors
from pretrax.infer.engine import Engine
from pretrax.infer.programs import EngineOptions, Programs
from pretrax.infer.request import POOLINGS, Request
from small import mesh_of

GOLDEN = load_file(Path(__file__).parents[1] / 'goldens' / 'embeddings.safetensors')


@pytest.mark.parametrize('case', ['llama3', 'gpt2'])
def test_poolings_are_those_of_transformers(case):
    """Texts of 1, 7 and 23 tokens, read in parts of 16, each with every pooling."""
    mesh = mesh_of()
    model = model_of(case)
    with jax.set_mesh(mesh):
        like = model.abstract()
        weights = jax.tree.map(lambda w, x: jax.device_put(w, x.sharding), ours(case, model, tensors(case)), like)
    engine = Engine(Programs(model, mesh, EngineOptions(max_length=32, slots=4, chunk=16)), weights, warm_up=False)
    names = {}
    for text in range(3):
        prompt = tuple(GOLDEN[f'{case}.tokens.{text}'].tolist())
        for pooling in POOLINGS:
            names[engine.add(Request(prompt=prompt, max_tokens=0, embedding=pooling))] = f'{case}.{pooling}.{text}'
    while not engine.idle:
        for update in engine.step():
            np.testing.assert_allclose(update.embedding, GOLDEN[names.pop(update.number)], rtol=1e-4, atol=1e-5)
    assert not names


def test_poolings_are_those_of_plain_numpy():
    states = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32))
    expected = {
        'mean': jnp.sum(states, axis=0) / 5, 'last': states[4], 'cls': states[0], 'min': -jnp.max(-states, axis=0),
        'max': jnp.sort(states, axis=0)[-1],
    }  # fmt: skip
    assert POOLINGS.keys() == expected.keys()
    for name, pool in POOLINGS.items():
        np.testing.assert_allclose(pool(np.asarray(states)), expected[name], rtol=1e-6)
