import json
import os
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from pretrax.data.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer, train_tokenizer
from pretrax.errors import UserError

TEXTS = ['def encode(text):\n    return [ord(letter) for letter in text]\n', 'the cat and the other cat é漢 \n'] * 20
TRAINED = train_tokenizer(TEXTS, 300)


@given(st.text(st.characters(exclude_categories=['Cs'])))
def test_decode_undoes_encode(text):
    assert TRAINED.decode(TRAINED.encode(text)) == text


@given(st.lists(st.text(st.characters(exclude_categories=['Cs']))))
def test_a_batch_encodes_like_each_text(texts):
    assert TRAINED.encode_batch(texts) == [TRAINED.encode(text) for text in texts]


@given(st.text(st.characters(exclude_categories=['Cs'])))
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(text):
    assert sum(TRAINED.byte_length(token) for token in TRAINED.encode(text)) == len(text.encode())


def test_end_of_text_is_zero_and_cannot_be_written_in_a_document():
    assert TRAINED.end_of_text == 0
    assert TRAINED.decode([0]) == END_OF_TEXT
    ids = TRAINED.encode(f'a{END_OF_TEXT}b')
    assert 0 not in ids
    assert TRAINED.decode(ids) == f'a{END_OF_TEXT}b'


def test_size_is_what_was_asked_for_or_less():
    assert TRAINED.vocab_size == 300
    assert train_tokenizer(['ab'], 4096).vocab_size == 258, 'end of text, 256 bytes and the one pair there is'


@pytest.mark.parametrize('threads', ['1', '3'])
def test_training_gives_the_same_on_any_number_of_cores_and_in_any_order(threads):
    program = (
        'import sys, json; from pretrax.data.tokenizer import train_tokenizer;'
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


def test_a_saved_tokenizer_loads_in_the_tokenizers_library(tmp_path):
    path = tmp_path / 'tokenizer.json'
    path.write_bytes(TRAINED.content)
    assert tokenizers.Tokenizer.from_file(str(path)).encode('the cat').ids == TRAINED.encode('the cat')
    assert load_tokenizer(path).sha256 == TRAINED.sha256


def test_settings_that_would_change_the_text_are_switched_off(tmp_path):
    backend = tokenizers.Tokenizer.from_buffer(TRAINED.content)
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f'{END_OF_TEXT} $A', special_tokens=[(END_OF_TEXT, 0)]
    )
    settings = json.loads(backend.to_str())
    settings['model']['dropout'] = 0.9
    path = tmp_path / 'tokenizer.json'
    path.write_text(json.dumps(settings))
    given_one = load_tokenizer(path)
    assert given_one.encode('the cat and the other') == TRAINED.encode('the cat and the other')
    assert given_one.encode_batch(['the cat and the other']) == [TRAINED.encode('the cat and the other')]


def test_other_names_of_end_of_text_are_known():
    content = TRAINED.content.replace(END_OF_TEXT.encode(), b'</s>')
    assert Tokenizer(content, 'mine').end_of_text == 0


def test_a_tokenizer_that_cannot_end_a_document_is_refused():
    with pytest.raises(UserError, match='mine: no token that ends a document\n  expected one of'):
        Tokenizer(TRAINED.content.replace(END_OF_TEXT.encode(), b'[PAD]'), 'mine')


@pytest.mark.parametrize(
    'content', [b'', b'\xff', b'{}', b'[]', b'null', b'{"model": null}', b'{"model": {"type": "x"}}']
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / 'tokenizer.json'
    path.write_bytes(content)
    with pytest.raises(UserError, match=r'tokenizer\.json: not a tokenizer'):
        load_tokenizer(path)


def test_a_missing_tokenizer_names_the_nearest(tmp_path):
    (tmp_path / 'tokenizer.json').write_bytes(TRAINED.content)
    with pytest.raises(UserError, match=r'did you mean .*tokenizer\.json'):
        load_tokenizer(tmp_path / 'tokeniser.json')
