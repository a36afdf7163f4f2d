"""Log probabilities equal those of the reference decoder, on every mesh and in batches of any size."""

import functools

import jax
import numpy as np
import pytest

import reference
from bigram import Bigram
from goldens.golden import golden, model_of, options, ours, tensors
from pretrax.evaluate.scorer import Scorer
from small import GPT2, LLAMA, MIXTURE, VOCAB, mesh_of, random_weights, transformer

MODELS = {
    'llama': LLAMA,
    'capacity': MIXTURE | {'capacity': 1.0},  # of which scores make no use
    'learned': GPT2 | {'max_sequence_length': 40},
    'states': LLAMA | {
        'layer_types': ('mamba', 'delta', 'full'), 'n_layers': 3, 'linear_heads': 4, 'linear_key_heads': 2,
        'linear_d_head': 8, 'linear_d_key': 6,
    },
}  # fmt: skip
EIGHT = {'r': 2, 'd': 2, 't': 2}
LONGEST = 40


def placed(model, weights, mesh):
    with jax.set_mesh(mesh):
        return jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), weights, model.abstract())


@functools.cache
def texts():
    """Of 2 to 40 tokens, of which the last few are scored."""
    rng = np.random.default_rng(0)
    return [
        (tuple(rng.integers(0, VOCAB, size).tolist()), int(rng.integers(1, size))) for size in (2, 3, 9, 21, 33, 40, 12)
    ]


@functools.cache
def expected(name):
    """From the logits of each text alone, in numpy."""
    model = transformer(MODELS[name], length=LONGEST)
    arch = model.arch.replace({'experts.capacity': None})
    weights, found = random_weights(model), []
    tokens = np.zeros((len(texts()), LONGEST), np.int32)
    for row, (ids, _) in zip(tokens, texts(), strict=True):
        row[: len(ids)] = ids
    positions = np.broadcast_to(np.arange(LONGEST, dtype=np.int32), tokens.shape)
    logits = jax.jit(reference.logits, static_argnums=4)(weights, tokens, np.ones_like(tokens), positions, arch)
    logits = np.asarray(logits, np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for (ids, count), of_text in zip(texts(), logprobs, strict=True):
        places = range(len(ids) - 1 - count, len(ids) - 1)
        greedy = all(of_text[i].argmax() == ids[i + 1] for i in places)
        found.append((sum(of_text[i][ids[i + 1]] for i in places), greedy))
    return found


def check(found, name):
    np.testing.assert_allclose([logprob for logprob, _ in found], [logprob for logprob, _ in expected(name)], rtol=2e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected(name)]


@pytest.mark.parametrize(
    ('name', 'sizes'),
    [
        ('capacity', {}),
        *(
            pytest.param(name, sizes, marks=pytest.mark.slow)
            for name, sizes in (
                ('llama', {'c': 2, 'd': 2, 't': 2}),
                ('llama', {'p': 2, 'd': 2}),
                ('capacity', {'e': 2, 'd': 2}),
                ('learned', EIGHT),
                ('states', {'d': 2, 't': 2}),
            )
        ),
        *(
            pytest.param(name, sizes, marks=pytest.mark.nightly)
            for name, sizes in (('llama', EIGHT), ('llama', {}), ('capacity', EIGHT), ('learned', {}), ('states', {}))
        ),
    ],
)
def test_scores_are_those_of_each_text_alone(name, sizes, monkeypatch):
    """In chunks: the logits of 8 tokens exist at a time."""
    monkeypatch.setattr('pretrax.evaluate.scorer._AT_ONCE', 8)
    mesh = mesh_of(**sizes)
    model = transformer(MODELS[name], mesh, length=LONGEST, micro_batches=sizes.get('p', 1))
    weights = placed(model, random_weights(model), mesh)
    for batch_tokens in (1, 64) if name == 'llama' else (256,):
        scorer = Scorer(model, mesh, LONGEST, batch_tokens)
        check(scorer.score(scorer.prepare(weights), texts()), name)


def test_the_logits_of_a_batch_never_exist_together():
    """The scoring program needs less than half the memory of f32 logits [batch, length,
    vocabulary], besides the weights.
    """
    rows, length, vocab = 16, 256, 32768
    model, mesh = transformer(LLAMA, mesh_of(d=2, t=2), vocab_size=vocab, length=length), mesh_of(d=2, t=2)
    scorer, tokens = Scorer(model, mesh, length), jax.ShapeDtypeStruct((rows, length), np.int32)
    with jax.set_mesh(mesh):
        compiled = scorer.program.lower(model.abstract(), tokens, tokens).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < rows * length * vocab * 4 / mesh.size / 2


def test_a_text_has_the_frequencies_that_transformers_chooses_for_its_length():
    """longrope: those for short texts, though the model reads longer ones, and in one call with them."""
    case = 'phi3-longrope-short'
    known, mesh = options(case), mesh_of()
    model = transformer(known, vocab_size=known['vocab_size'], length=128)
    with jax.set_mesh(mesh):
        weights = placed(model, ours(case, model_of(case), tensors(case)), mesh)
    tokens, logits = golden(case)['tokens'], golden(case)['logits'].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    right = np.take_along_axis(logprobs, tokens[:, 1:, None], -1).sum((1, 2))
    scorer = Scorer(model, mesh, 128)
    asked = [(tokens[0].tolist(), 48), (np.tile(tokens[0], 2).tolist(), 3), (tokens[1].tolist(), 48)]
    [first, _, second] = scorer.score(scorer.prepare(weights), asked)
    np.testing.assert_allclose([first[0], second[0]], right, rtol=1e-4)


def test_a_token_is_greedy_if_no_other_is_likelier():
    """A model of one's own has no cache and no sizes: logits = table[token] + bias."""
    model, mesh = Bigram(), mesh_of(d=2, t=2)
    with jax.set_mesh(mesh):
        weights = jax.jit(model.init, out_shardings=model.shardings(None))(jax.random.key(0))
    scorer = Scorer(model, mesh, 8)
    logits = (np.asarray(weights.table, np.float64) + np.asarray(weights.bias, np.float64))[:, :VOCAB]
    likeliest = [5]
    for _ in range(3):
        likeliest.append(int(logits[likeliest[-1]].argmax()))
    unlikely = [*likeliest[:3], int(logits[likeliest[2]].argmin())]
    found = scorer.score(scorer.prepare(weights), [(likeliest, 3), (unlikely, 3), (unlikely, 1), ([7, *likeliest], 3)])
    assert [greedy for _, greedy in found] == [True, False, False, True]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(
        found[1][0], sum(logprobs[a, b] for a, b in zip(unlikely, unlikely[1:], strict=False)), rtol=1e-5
    )
    assert found[0][0] == pytest.approx(found[3][0], rel=1e-6)
