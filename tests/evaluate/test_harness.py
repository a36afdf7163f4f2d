"""The adapter to lm-evaluation-harness answers what its `hf` backend answers (goldens/make_harness.py)."""

import json
import types

import jax
import pytest

from goldens.golden import HERE, model_of, options, ours, tensors
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.errors import UserError
from pretrax.evaluate.language_model import LanguageModel
from pretrax.evaluate.task import Generate
from small import mesh_of, transformer

GOLDEN = json.loads((HERE / 'harness.json').read_text())


def asked(*values):
    return [types.SimpleNamespace(args=value) for value in values]


@pytest.fixture(scope='module')
def harness():
    from pretrax.evaluate.harness import HarnessModel

    case = GOLDEN['case']
    known = options(case)
    with jax.set_mesh(mesh_of()):
        weights = jax.device_put(ours(case, model_of(case), tensors(case)))
        weights = jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), weights, model_of(case).abstract())
    model = transformer(known, vocab_size=known['vocab_size'], length=64)
    tokenizer = Tokenizer(GOLDEN['tokenizer'].encode(), 'golden')
    return HarnessModel(LanguageModel(model, weights, tokenizer, length=GOLDEN['window'], batch_tokens=64))


def test_scores_are_those_of_the_hf_backend(harness):
    pairs, rolling = GOLDEN['pairs'], GOLDEN['rolling']
    found = harness.loglikelihood(asked(*[(context, continuation) for context, continuation, *_ in pairs]))
    assert found == [(pytest.approx(logprob, rel=1e-4), is_greedy) for *_, logprob, is_greedy in pairs]
    assert harness.loglikelihood_rolling(asked(*[(text,) for text, _ in rolling])) == [
        pytest.approx(logprob, rel=1e-4) for _, logprob in rolling
    ]


def test_answers_end_at_their_length_or_before_a_stop(harness):
    short, long = harness.generate_until(asked(('the cat', {'max_gen_toks': 3}), ('the cat', {'max_gen_toks': 12})))
    assert 0 < len(short) < len(long) <= 12  # a token is a letter, or nothing: the model has more ids than letters
    assert long.startswith(short)
    stop = long[-1]
    found = harness.generate_until(asked(('the cat', {'max_gen_toks': 12, 'until': [stop]})))
    assert found == [long[: long.index(stop)]]


def test_random_answers_are_refused(harness):
    with pytest.raises(UserError, match='the task samples its answers'):
        harness.generate_until(asked(('the cat', {'do_sample': True, 'temperature': 0.7})))


def test_an_answer_without_a_length_has_that_of_the_hf_backend(harness, monkeypatch):
    made = []
    monkeypatch.setattr(harness._model, 'answer', lambda requests: made.extend(requests) or [''])
    harness.generate_until(asked(('a', {'until': '\n'})))
    assert made == [Generate('a', 256, ('\n',))]
