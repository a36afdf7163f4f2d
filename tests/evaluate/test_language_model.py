"""Scores equal those of the `hf` backend of lm-evaluation-harness, on one device and on eight
(goldens/make_harness.py).
"""

import json

import jax
import numpy as np
import pytest

from goldens.golden import HERE, model_of, options, ours, tensors
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.evaluate.language_model import LanguageModel
from pretrax.evaluate.task import Likelihood, Rolling
from small import mesh_of, transformer

GOLDEN = json.loads((HERE / 'harness.json').read_text())


@pytest.mark.parametrize(
    'sizes', [{'r': 2, 'd': 2, 't': 2}, pytest.param({}, marks=pytest.mark.slow)], ids=['eight devices', 'one device']
)
def test_scores_are_those_of_lm_evaluation_harness(sizes):
    case, window, mesh = GOLDEN['case'], GOLDEN['window'], mesh_of(**sizes)
    known = options(case)
    model = transformer(known, mesh, vocab_size=known['vocab_size'], length=64)
    with jax.set_mesh(mesh_of()):
        weights = ours(case, model_of(case), tensors(case))
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), weights, model.abstract())
    tokenizer = Tokenizer(GOLDEN['tokenizer'].encode(), 'golden')
    evaluated = LanguageModel(model, placed, tokenizer, length=window, batch_tokens=64)
    pairs = evaluated.answer([Likelihood(context, continuation) for context, continuation, *_ in GOLDEN['pairs']])
    rolling = evaluated.answer([Rolling(text) for text, _ in GOLDEN['rolling']])
    np.testing.assert_allclose([one.logprob for one in pairs], [pair[2] for pair in GOLDEN['pairs']], rtol=1e-4)
    assert [one.is_greedy for one in pairs] == [pair[3] for pair in GOLDEN['pairs']]
    np.testing.assert_allclose([one.logprob for one in rolling], [one[1] for one in GOLDEN['rolling']], rtol=1e-4)
