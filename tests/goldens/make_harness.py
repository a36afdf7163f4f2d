"""Writes harness.json: what the `hf` backend of lm-evaluation-harness answers with the model of a golden.

python tests/goldens/make_harness.py      # needs lm-eval, torch and transformers
"""

import json
from pathlib import Path
from types import SimpleNamespace

from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
CASE = 'llama3'
LETTERS = ' abcdefghijklmnopqrstuvwxyz.\n'
WINDOW = 24
PAIRS = [
    ('the cat sat on', ' the mat'),
    ('the cat ', 'sat'),
    ('', 'alone'),
    ('a', '.'),
    ('one two\n', ' three four five'),
]
ROLLING = [
    'short',
    'a text that is longer than one window of the model, so it is read in several parts'.replace(',', ''),
]


def main() -> None:
    """Makes the file."""
    vocabulary = {'<|endoftext|>': 0} | {letter: number for number, letter in enumerate(LETTERS, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(['<|endoftext|>'])
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token='<|endoftext|>', pad_token='<|endoftext|>')
    model = AutoModelForCausalLM.from_pretrained(HERE / CASE, dtype='float32')
    harness = HFLM(pretrained=model, tokenizer=fast, max_length=WINDOW, batch_size=2, device='cpu')
    ask = lambda values: [SimpleNamespace(args=value, arguments=value) for value in values]  # noqa: E731
    found = {
        'case': CASE,
        'window': WINDOW,
        'tokenizer': tokenizer.to_str(),
        'pairs': [[*pair, *answer] for pair, answer in zip(PAIRS, harness.loglikelihood(ask(PAIRS)), strict=True)],
        'rolling': [
            [text, answer]
            for text, answer in zip(ROLLING, harness.loglikelihood_rolling(ask([(t,) for t in ROLLING])), strict=True)
        ],
    }
    (HERE / 'harness.json').write_text(json.dumps(found, indent=1) + '\n')


main()
