"""Text from a model that has logits and no cache: the greedy text is the likeliest token, again and again."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigram import Bigram
from pretrax.errors import UserError
from pretrax.infer.generate import generate
from pretrax.model.base import Model, check_model
from pretrax.model.nnx import NnxModel
from pretrax.model.nnx_options import NnxOptions
from pretrax.model.request import ModelRequest
from pretrax.shardlib import make_shardings
from small import LENGTH, VOCAB, mesh_of

PROMPTS = [[5], [1, 2, 3], [99, 0, 50, 7]]


@pytest.mark.parametrize('sizes', [{}, {'d': 2, 't': 2, 'c': 2}])
def test_a_plugin_model_generates_the_likeliest_tokens(sizes):
    model, mesh = Bigram(), mesh_of(**sizes)
    with jax.set_mesh(mesh):
        weights = jax.jit(model.init, out_shardings=make_shardings(model.Weights))(jax.random.key(0))
    logits = np.asarray(weights.table)[:, :VOCAB] + np.asarray(weights.bias)[:VOCAB]
    expected = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(6):
            text.append(int(logits[text[-1]].argmax()))
        expected.append(text[len(prompt) :])
    assert generate(model, weights, PROMPTS, tokens=6, temperature=0) == expected


def test_an_nnx_module_generates_the_likeliest_tokens(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / 'examples' / 'nnx_gpt2')
    mesh = mesh_of(d=2, t=2)
    request = ModelRequest(VOCAB, LENGTH, None, jnp.float32, 'cpu', dict(mesh.shape))
    sizes = {'d_model': 32, 'n_heads': 4, 'n_layers': 1, 'max_length': LENGTH}
    model = NnxModel(request, options=NnxOptions(target='gpt2:GPT2', arguments=sizes))
    sys.modules.pop('gpt2')
    with jax.set_mesh(mesh):
        weights = jax.jit(model.init, out_shardings=model.shardings(None))(jax.random.key(3))
        text = [4, 8, 15]
        for _ in range(5):
            padded = jnp.zeros((1, LENGTH), jnp.int32).at[0, : len(text)].set(jnp.array(text))
            text.append(int(jnp.argmax(model.logits(weights, padded)[0, len(text) - 1])))
    assert generate(model, weights, [[4, 8, 15]], tokens=5, temperature=0) == [text[3:]]
    with pytest.raises(UserError, match='at most 13 new tokens'):
        generate(model, weights, [[4, 8, 15]], tokens=14)


def test_a_class_that_does_not_derive_from_model_is_refused():
    class Duck:
        Weights = Bigram.Weights
        init, loss = Bigram.init, Bigram.loss

    with pytest.raises(UserError, match=r'model.name=duck: Duck is not a model[^$]*class Duck\(Model\)'):
        check_model(Duck(), 'duck')
    assert isinstance(check_model(Bigram(), 'bigram'), Model)
