"""The engine writes what the whole forward pass, done again for each token, writes."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import reference
from pretrax.errors import UserError
from pretrax.infer import programs
from pretrax.infer.generate import generate, open_engine
from pretrax.infer.programs import serving_mesh
from small import GPT2, LATENT, LLAMA, MIXTURE, VOCAB, mesh_of, random_weights, transformer

MODELS = {
    'llama': LLAMA,
    'gpt2': GPT2 | {'max_sequence_length': 48},
    'latent': LATENT,
    'experts': MIXTURE | {'n_experts': 6, 'capacity': 64.0},  # of which decoding makes no use
}
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], [99, 0, 50] * 13]
TOKENS = 9


def write(family, prompts, mesh=None, seed_of_weights=0, **choices):
    mesh = mesh or mesh_of()
    model = transformer(MODELS[family], mesh)
    weights = random_weights(model, seed_of_weights)
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), weights, model.abstract())
    return generate(model, placed, prompts, **({'tokens': TOKENS, 'temperature': 0} | choices))


@functools.cache
def greedy(family):
    """The likeliest token, again and again, from the reference's logits of the whole text so far."""
    model = transformer(MODELS[family])
    weights = random_weights(model)
    logits = jax.jit(lambda *batch: reference.logits(weights, *batch, model.arch))
    texts = [list(prompt) for prompt in PROMPTS]
    for _ in range(TOKENS):
        tokens = np.zeros((len(texts), 48), np.int32)  # what comes later does not matter, so one shape serves
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        found = logits(tokens, np.ones_like(tokens), np.broadcast_to(np.arange(48, dtype=np.int32), tokens.shape))
        for text, of_row in zip(texts, found, strict=True):
            text.append(int(np.argmax(of_row[len(text) - 1])))
    return [text[-TOKENS:] for text in texts]


@pytest.mark.parametrize(
    ('family', 'mesh'),
    [
        ('llama', (2, 2, 2)),
        *(pytest.param(family, (2, 2, 2), marks=pytest.mark.slow) for family in ('latent', 'gpt2', 'experts')),
        *(
            pytest.param(family, (1, 1, 1), marks=pytest.mark.nightly)
            for family in ('llama', 'latent', 'gpt2', 'experts')
        ),
        pytest.param('latent', (1, 1, 2), marks=pytest.mark.nightly),
    ],
)
def test_greedy_text_equals_recomputing_the_whole_sequence(family, mesh):
    """Prompts of 1, 7 and 39 tokens in one call. For gpt2 the last one ends at the last learned position."""
    assert len({tuple(text) for text in greedy(family)}) == 3
    assert write(family, PROMPTS, mesh_of(*mesh)) == greedy(family)


@pytest.mark.slow
def test_sampling_from_one_candidate_is_greedy():
    assert write('llama', PROMPTS, temperature=1.5, top_k=1) == greedy('llama')
    assert write('llama', PROMPTS, temperature=1.5, top_p=1e-6) == greedy('llama')


@pytest.mark.slow
def test_a_seed_gives_the_same_text_on_any_mesh_and_beside_any_prompts():
    hot = {'temperature': 2.0, 'seed': 3}
    alone = write('llama', [[7, 8], [7, 8]], **hot)
    assert alone[0] != alone[1]  # each row has its own randomness
    assert write('llama', [[7, 8], [7, 8]], mesh_of(2, 2, 2), **hot) == alone
    assert write('llama', [[7, 8], [7, 8], [1] * 20], **hot)[:2] == alone
    assert write('llama', [[7, 8], [7, 8]], temperature=2.0, seed=4) != alone


def test_padding_tokens_are_never_generated():
    """The vocabulary is padded from 100 to 128 rows; at a high temperature all of the 100 come up, none of the rest."""
    texts = write('llama', [[token] for token in range(VOCAB)], temperature=1e4, tokens=20)
    assert set(np.ravel(texts)) == set(range(VOCAB))


@pytest.mark.parametrize(
    ('prompts', 'tokens', 'message'),
    [
        ([[1] * 40], 9, r'40 tokens and 9 new ones exceed the 48 positions.*\n?.*at most 8 new tokens'),
        ([[1], []], 9, 'a prompt is empty'),
        ([], 9, 'a prompt is empty'),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(prompts, tokens, message):
    with pytest.raises(UserError, match=message):
        write('gpt2', prompts, tokens=tokens)


@pytest.mark.parametrize(
    ('trained_on', 'width', 'serves'),
    [
        ({'d': 2, 't': 2, 'p': 2}, 32, {'d': 4, 't': 2}),
        ({'r': 2, 'p': 3}, 32, {'r': 6}),
        ({'d': 2, 'p': 3}, 32, {'r': 3, 'd': 2}),
        ({'e': 2, 'c': 2, 't': 2}, 32, {'d': 2, 'e': 2, 't': 2}),
    ],
)
def test_the_serving_mesh_has_all_devices_and_divides_the_width(trained_on, width, serves):
    """Three stages divide the layers, but not the width, over which each weight lies here."""
    mesh = mesh_of(**trained_on)
    assert dict(serving_mesh(mesh, width).shape) == dict.fromkeys(mesh.shape, 1) | serves
    assert set(serving_mesh(mesh, width).devices.flat) == set(mesh.devices.flat)


def test_samples_of_one_run_share_their_programs(monkeypatch):
    """Otherwise each sample during training would compile them again."""
    made = []
    of_class = programs.Programs
    monkeypatch.setattr(programs, 'Programs', lambda *args: made.append(args) or of_class(*args))
    model = transformer(LLAMA)
    with jax.set_mesh(mesh_of()):
        for seed in range(2):
            weights = jax.device_put(random_weights(model, seed), NamedSharding(mesh_of(), PartitionSpec()))
            open_engine(model, weights, max_length=32, slots=1)
    assert len(made) == 1
