"""A text begins with the tokens of its tokenizer wherever a model reads it: three clients give the same scores.

The right values are those of lm_eval's `hf` backend, and a sum of log probabilities of transformers
(goldens/make_text_bounds.py).
"""

import json
import re
import subprocess
import sys
import types

import pytest
import tokenizers

from goldens.golden import HERE
from goldens.make_text_bounds import PAIRS, ROLLING, ask, write_model
from pretrax.weights.evaluated import Reading, models_at
from pretrax.weights.imported import import_checkpoint

GOLDEN = json.loads((HERE / 'text_bounds.json').read_text())
CLOSE = 1e-4  # relative


@pytest.fixture(scope='module', params=['begins', 'ends'])
def model(request, tmp_path_factory):
    """(directory of a Hugging Face model, what `hf` answers)."""
    directory = tmp_path_factory.mktemp(request.param) / 'model'
    write_model(directory, ends=request.param == 'ends')
    return directory, GOLDEN[request.param]


def same(logprobs):
    return [pytest.approx(logprob, rel=CLOSE) for logprob in logprobs]


def test_scores_of_an_import_are_those_of_the_hf_backend(model):
    from pretrax.evaluate.harness import HarnessModel

    directory, golden = model
    [(_, found)] = models_at(str(directory), Reading(batch_tokens=64), all_checkpoints=False)
    harness = HarnessModel(found)
    assert found.window == 64  # the model's own length
    pairs = harness.loglikelihood(ask(PAIRS))
    assert [logprob for logprob, _ in pairs] == same(logprob for logprob, _ in golden['pairs'])
    assert [greedy for _, greedy in pairs] == [greedy for _, greedy in golden['pairs']]
    rolling = harness.loglikelihood_rolling(ask([(text,) for text in ROLLING]))
    assert rolling == same(golden['rolling'])
    assert rolling[0] == pytest.approx(golden['sum_of_short'], rel=CLOSE)
    asked = {'until': ['\n'], 'max_gen_toks': 8}
    assert harness.generate_until(ask([('the cat', dict(asked)), ('a', dict(asked))])) == golden['written']


class TransformersTokenizer:
    """What the client uses of a tokenizer of transformers, which the project does not have."""

    bos_token_id, eos_token_id, eos_token = 1, 2, '</s>'

    def __init__(self, directory):
        self._backend = tokenizers.Tokenizer.from_file(str(directory / 'tokenizer.json'))

    def __call__(self, texts, *, add_special_tokens, **_):
        batch = self._backend.encode_batch(
            [texts] if isinstance(texts, str) else texts, add_special_tokens=add_special_tokens
        )
        ids = [one.ids for one in batch]
        return types.SimpleNamespace(input_ids=ids[0] if isinstance(texts, str) else ids)


@pytest.mark.slow
def test_scores_over_http_are_those_of_the_hf_backend(model, tmp_path):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    directory, golden = model
    import_checkpoint(str(directory), str(tmp_path / 'run'))
    command = [sys.executable, '-m', 'pretrax', 'serve', str(tmp_path / 'run'), '--port', '0']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(match[1] for line in server.stdout if (match := re.search(r'(http://\S+)/,', line)))
            client = LocalCompletionsAPI(
                base_url=f'{url}/v1/completions', model='run', tokenizer_backend=None, add_bos_token=True, max_length=66
            )
            client.tokenizer = TransformersTokenizer(directory)
            client.tokenizer_backend, client.tokenized_requests = 'huggingface', True
            pairs = client.loglikelihood(ask(PAIRS), disable_tqdm=True)
            assert [logprob for logprob, _ in pairs] == same(logprob for logprob, _ in golden['pairs'])
            assert [greedy for _, greedy in pairs] == [greedy for _, greedy in golden['pairs']]
            asked = {'until': ['\n'], 'max_gen_toks': 8}
            written = client.generate_until(ask([('the cat', dict(asked)), ('a', dict(asked))]), disable_tqdm=True)
            assert written == golden['written']
            client.add_bos_token = False  # the client itself begins a rolling text
            rolling = client.loglikelihood_rolling(ask([(ROLLING[0],)]), disable_tqdm=True)
            assert rolling == same(golden['rolling'][:1])
        finally:
            server.terminate()
