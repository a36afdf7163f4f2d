"""Writes text_bounds.json: what the `hf` backend of lm-evaluation-harness answers with models whose texts begin with
<s>.

python tests/goldens/make_text_bounds.py      # needs lm-eval, torch and transformers

`hf` begins a rolling text twice, as <s> <s> text, and scores the second <s>, unless it is told add_bos_token=False:
that is the sum over each token of the text once, after <s>, which this file computes with transformers too.
"""

import json
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, processors

HERE = Path(__file__).parent
CASE = 'llama2'
LETTERS = ' abcdefghijklmnopqrstuvwxyz.\n'
BEGIN, END = '<s>', '</s>'
PAIRS = [
    ('the cat sat on', ' the mat'),
    ('the cat ', 'sat'),
    ('', 'alone'),
    ('a', '.'),
    ('one two\n', ' three four five'),
]
ROLLING = [
    'short',
    'a text that is longer than the model has positions so it is read in several parts one after another',
]


def write_model(directory: Path, ends: bool, **settings) -> None:
    """Writes a model with 64 positions, whose tokenizer begins texts with <s>.

    Args:
        directory: a new one.
        ends: whether the likeliest token after any text is </s>, which ends an answer.
        settings: more of tokenizer_config.json.
    """
    directory.mkdir(parents=True)
    config = json.loads((HERE / CASE / 'config.json').read_text()) | {'bos_token_id': 1, 'eos_token_id': 2}
    (directory / 'config.json').write_text(json.dumps(config))
    weights = load_file(HERE / CASE / 'model.safetensors')
    if ends:  # every hidden state points where the row of </s> does
        weights['model.embed_tokens.weight'] = weights['model.embed_tokens.weight'] + np.float32(3)
        norm = weights['model.norm.weight']
        weights['lm_head.weight'][2] = np.sign(norm).astype(np.float32) * 2
    save_file(weights, directory / 'model.safetensors', {'format': 'pt'})
    vocabulary = {'<unk>': 0, BEGIN: 1, END: 2} | {letter: number for number, letter in enumerate(LETTERS, 3)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(['<unk>', BEGIN, END])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f'{BEGIN} $A', pair=f'{BEGIN} $A {BEGIN}:1 $B:1', special_tokens=[(BEGIN, 1)]
    )
    tokenizer.save(str(directory / 'tokenizer.json'))
    named = {'bos_token': BEGIN, 'eos_token': END, 'pad_token': END, 'tokenizer_class': 'PreTrainedTokenizerFast'}
    (directory / 'tokenizer_config.json').write_text(json.dumps(named | settings))


def ask(values):
    """Requests of lm-evaluation-harness."""
    return [SimpleNamespace(args=value, arguments=value) for value in values]


def answers(directory: Path) -> dict:
    """What the `hf` backend answers."""
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    harness = HFLM(pretrained=str(directory), batch_size=1, device='cpu', dtype='float32')
    alone = HFLM(pretrained=str(directory), batch_size=1, device='cpu', dtype='float32', add_bos_token=False)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype='float32')
    ids = torch.tensor([tokenizer(ROLLING[0])['input_ids']])
    assert ids[0, 0] == 1, 'a text begins with <s>'
    log_probs = model(ids).logits[0].log_softmax(-1)
    own = sum(float(log_probs[at, token]) for at, token in enumerate(ids[0, 1:]))
    texts = ask([(text,) for text in ROLLING])
    asked = {'until': ['\n'], 'max_gen_toks': 8}
    return {
        'pairs': harness.loglikelihood(ask(PAIRS)),
        'rolling': alone.loglikelihood_rolling(texts),
        'rolling_begun_twice': harness.loglikelihood_rolling(texts),
        'sum_of_short': own,
        'written': harness.generate_until(ask([('the cat', dict(asked)), ('a', dict(asked))])),
    }


def main() -> None:
    """Makes the file."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for name in ('begins', 'ends'):
            directory = Path(place) / name
            write_model(directory, ends=name == 'ends')
            found[name] = answers(directory)
            shutil.rmtree(directory)
    (HERE / 'text_bounds.json').write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
    main()
