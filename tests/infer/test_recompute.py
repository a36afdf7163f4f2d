"""Text from a model that has logits and no cache: the greedy text is the likeliest token, again and again."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigram import Bigram
from pretrax.errors import UserError
from pretrax.infer.engine import Engine
from pretrax.infer.generate import generate
from pretrax.infer.programs import EngineOptions, Programs
from pretrax.infer.request import Request
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


@pytest.mark.slow
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


def test_a_module_that_reads_texts_of_one_length_only_generates():
    """Its table of positions has 40 rows; a cache for 20 tokens would have 32."""
    mesh = mesh_of()
    request = ModelRequest(VOCAB, 40, None, jnp.float32, 'cpu', dict(mesh.shape))
    model = NnxModel(request, options=NnxOptions(target='nnx_modules:FixedLength'))
    with jax.set_mesh(mesh):
        weights = jax.jit(model.init, out_shardings=model.shardings(None))(jax.random.key(3))
    text = [4, 8, 15]
    for _ in range(3):
        x = weights['embed']['embedding'][text[-1]] + weights['positions'][len(text) - 1]
        text.append(int(jnp.argmax(x @ weights['unembed']['kernel'] + weights['unembed']['bias'])))
    assert generate(model, weights, [[4, 8, 15]], tokens=3, temperature=0) == [text[3:]]


@pytest.mark.parametrize(
    ('option', 'message'), [({'weights': 'int8'}, '--weights int8'), ({'cache': 'fp8'}, '--cache fp8')]
)
def test_what_a_model_without_a_cache_cannot_do_is_refused(option, message):
    with pytest.raises(UserError, match=f'{message}: Bigram computes its own matrix products'):
        Programs(Bigram(), mesh_of(), EngineOptions(max_length=LENGTH, slots=1, **option))
    engine = Engine(Programs(Bigram(), mesh_of(), EngineOptions(max_length=LENGTH, slots=1)), None, warm_up=False)
    with pytest.raises(UserError, match='this model has no embeddings: it gives logits and no hidden states'):
        engine.check(Request(prompt=(1,), max_tokens=0, embedding='mean'))
