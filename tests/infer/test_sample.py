"""Text in, text out: prompts are encoded, continuations decoded up to the end of the text."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from pretrax.errors import UserError
from pretrax.infer.sample import check_can_sample, sample
from pretrax.model.base import Model
from small import LLAMA, mesh_of, random_weights, transformer

END = 26


class Letters:
    """Token ids are letters of the alphabet; 26 ends a text."""

    end_of_text = END

    def encode(self, text):
        return [ord(letter) - ord('a') for letter in text]

    def decode(self, ids):
        return ''.join(chr(ord('a') + i) for i in ids)


def reciting():
    """A decoder that knows the alphabet: attention and feed-forward add nothing,
    and each letter unembeds to the next.
    """
    model = transformer(LLAMA, vocab_size=END + 1)
    weights = jax.tree.map(np.zeros_like, random_weights(model))
    identity = np.eye(*weights.embed.shape, dtype=np.float32)
    following = np.roll(identity[: END + 1], 1, axis=0)
    weights = dataclasses.replace(weights, embed=identity, norm=np.ones_like(weights.norm))
    weights = dataclasses.replace(weights, unembed=np.concatenate([following, identity[END + 1 :]]))
    with jax.set_mesh(mesh_of()):
        return model, jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), weights, model.abstract())


def test_a_text_begins_with_its_prompt_and_stops_at_the_end_token():
    choices = types.SimpleNamespace(prompts=('ab', 'x', ''), tokens=5, temperature=0, top_k=None, top_p=None)
    # x is followed by yz and the end; a text that has not begun comes after the end of another one.
    assert sample(*reciting(), Letters(), choices) == ['abcdefg', 'xyz', 'abcde']


def test_a_model_or_data_that_cannot_generate_is_refused():
    choices = types.SimpleNamespace(prompts=('a',))
    for model, tokenizer, message, fix in (
        (Model(), Letters(), 'Model cannot generate text', 'define logits'),
        (transformer(LLAMA), None, 'the data has no tokenizer', 'put tokenizer.json into the directory'),
    ):
        with pytest.raises(UserError, match=rf'^{message}(.|\n)*{fix}') as trained:
            check_can_sample(model, types.SimpleNamespace(tokenizer=tokenizer))
        assert 'sample' not in str(trained.value), 'no run begins: its keys are no fix'
        with pytest.raises(UserError, match=rf'^sample: {message}.*\nset sample.every=0$'):
            check_can_sample(model, types.SimpleNamespace(tokenizer=tokenizer), choices)
    check_can_sample(transformer(LLAMA), types.SimpleNamespace(tokenizer=Letters()))
