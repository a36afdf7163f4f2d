"""Training a tokenizer."""

import json
import os
import subprocess
import sys

import pytest

from pretrax.data.tokenizers import tokenizer_training
from pretrax.data.tokenizers.tokenizer import PROBES
from pretrax.data.tokenizers.tokenizer_training import MODELS, train_and_report, train_tokenizer

TEXTS = ['def encode(text):\n    return [ord(letter) for letter in text]\n', 'the cat and the other cat é漢 \n'] * 20


TRAINED = train_tokenizer(TEXTS, 300)


def test_the_vocabulary_has_at_most_the_requested_size():
    assert TRAINED.vocab_size == 300
    assert train_tokenizer(['ab'], 4096).vocab_size == 258, 'end of text, 256 bytes and the one pair there is'


@pytest.mark.parametrize('threads', ['1', '3'])
def test_training_does_not_depend_on_cores_or_order(threads):
    program = (
        'import sys, json; from pretrax.data.tokenizers.tokenizer_training import train_tokenizer;'
        'print(train_tokenizer(json.load(sys.stdin), 300).sha256)'
    )
    result = subprocess.run(
        [sys.executable, '-c', program],
        input=json.dumps(TEXTS[::-1]),
        env=os.environ | {'RAYON_NUM_THREADS': threads},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == TRAINED.sha256


@pytest.mark.parametrize('model', MODELS)
def test_every_trainable_model_keeps_all_text(model):
    tokenizer = train_tokenizer(TEXTS, 300, model)
    assert 258 < tokenizer.vocab_size <= 300
    for text in PROBES:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_tokenizer_is_trained_once_for_the_same_texts(tmp_path, monkeypatch):
    trained, said = [], []
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(tokenizer_training, '_MOST_KEPT', 3)
    monkeypatch.setattr(
        tokenizer_training, 'train_tokenizer', lambda *how: (trained.append(how[1:]), train_tokenizer(*how))[1]
    )
    assert train_and_report(TEXTS, 300, said.append).sha256 == TRAINED.sha256
    assert train_and_report(TEXTS, 300, said.append).sha256 == TRAINED.sha256
    assert trained == [(300, 'bpe')]
    assert 'by an earlier run' not in said[0]
    assert f'by an earlier run ({tmp_path}' in said[1]

    [file] = (tmp_path / 'pretrax' / 'trained_tokenizers').iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    train_and_report(TEXTS, 300, said.append)
    train_and_report(TEXTS, 299, said.append)
    train_and_report(TEXTS, 300, said.append, 'unigram')
    train_and_report([*TEXTS[:-2], TEXTS[-2] + TEXTS[-1]], 300, said.append)
    assert len(trained) == 5
    assert len(list(file.parent.iterdir())) == 3
