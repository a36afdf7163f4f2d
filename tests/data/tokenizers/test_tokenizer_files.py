"""Files and directories of tokenizers."""

import json
import re

import pytest
import tiktoken

from pretrax.data.tokenizers.tokenizer import END_OF_TEXT
from pretrax.data.tokenizers.tokenizer_files import from_tiktoken, load_tokenizer
from pretrax.data.tokenizers.tokenizer_training import train_tokenizer
from pretrax.errors import UserError
from tokenizer_families import encoding, family

TEXTS = ['def encode(text):\n    return [ord(letter) for letter in text]\n', 'the cat and the other cat é漢 \n'] * 20
TRAINED = train_tokenizer(TEXTS, 300)


@pytest.mark.parametrize(
    'content', [b'', b'\xff', b'{}', b'[]', b'null', b'{"model": null}', b'{"model": {"type": "x"}}']
)
def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / 'tokenizer.json'
    path.write_bytes(content)
    with pytest.raises(UserError, match=r'tokenizer\.json: not a tokenizer'):
        load_tokenizer(path)


def test_a_missing_tokenizer_suggests_the_nearest(tmp_path):
    (tmp_path / 'tokenizer.json').write_bytes(TRAINED.content)
    with pytest.raises(UserError, match=r'did you mean .*tokenizer\.json'):
        load_tokenizer(tmp_path / 'tokeniser.json')


def write_directory(path, **files):
    path.mkdir()
    (path / 'tokenizer.json').write_bytes(TRAINED.content)
    for name, content in files.items():
        (path / f'{name}.json').write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    'files',
    [
        {'tokenizer_config': {'eos_token': 'a'}},
        {'tokenizer_config': {'eos_token': {'content': 'a', 'special': True}}},
        {'special_tokens_map': {'eos_token': 'a'}},
        {'tokenizer_config': {'eos_token': 'a'}, 'special_tokens_map': {'eos_token': 'b'}},
        {'tokenizer_config': {'eos_token': None}, 'special_tokens_map': {'eos_token': 'a'}},
    ],
)
def test_a_hugging_face_directory_names_its_end_of_text(tmp_path, files):
    tokenizer = load_tokenizer(str(write_directory(tmp_path / 'mine', **files)))
    assert tokenizer.end_of_text == TRAINED.token_id('a')
    assert tokenizer.sha256 == TRAINED.sha256


@pytest.mark.parametrize('config', [{'eos_token_id': -1}, ['x'], {'eos_token_id': 5}])
def test_a_config_that_is_no_models_names_no_end(tmp_path, config):
    assert load_tokenizer(write_directory(tmp_path / 'mine', config=config)).end_of_text == 0


def test_a_directory_without_eos_token_uses_the_usual_names(tmp_path):
    assert load_tokenizer(write_directory(tmp_path / 'a')).end_of_text == 0
    of_model = load_tokenizer(write_directory(tmp_path / 'c', config={'model_type': 'llama', 'eos_token_id': 5}))
    assert (of_model.end_of_text, of_model.end_from) == (5, 'config.json')
    assert load_tokenizer(write_directory(tmp_path / 'b', tokenizer_config={'model_max_length': 8})).end_of_text == 0


@pytest.mark.parametrize(
    ('files', 'expected'),
    [
        ({'tokenizer_config': {'eos_token': '<none>'}}, "tokenizer_config.json: eos_token '<none>' is not a token of"),
        ({'tokenizer_config': {'eos_token': 3}}, 'eos_token is 3\n  expected the name of a token'),
        ({'special_tokens_map': ['x']}, 'special_tokens_map.json: expected a JSON object, not list'),
    ],
)
def test_a_directory_with_a_wrong_eos_token_is_refused(tmp_path, files, expected):
    with pytest.raises(UserError, match=re.escape(expected)):
        load_tokenizer(write_directory(tmp_path / 'mine', **files))


def test_the_error_for_a_directory_without_tokenizer_json_has_the_fix(tmp_path):
    (tmp_path / 'vocab.json').write_text('{}')
    with pytest.raises(UserError, match=r'no tokenizer\.json in this directory\n.*vocab\.json\n.*save_pretrained'):
        load_tokenizer(tmp_path)


def test_a_tiktoken_name_is_loaded(monkeypatch):
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, 'mine', encoding('cl100k'))
    assert load_tokenizer('tiktoken:mine').sha256 == family('cl100k').sha256
    with pytest.raises(UserError, match=r'tiktoken:mime: Unknown encoding mime(.|\n)*expected one of .*cl100k_base'):
        load_tokenizer('tiktoken:mime')


def test_the_error_for_a_failed_tiktoken_download_names_the_cache(monkeypatch):
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', '')
    monkeypatch.setenv('HTTPS_PROXY', 'http://127.0.0.1:9')  # nothing listens there
    with pytest.raises(UserError, match=r'tiktoken:p50k_base: tiktoken cannot download it(.|\n)*TIKTOKEN_CACHE_DIR'):
        load_tokenizer('tiktoken:p50k_base')


def test_a_pattern_with_other_ids_is_refused():
    """tiktoken drops text that the pattern does not match."""
    ranks = encoding('r50k')._mergeable_ranks
    lossy = tiktoken.Encoding('odd', pat_str='.', mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)})
    with pytest.raises(UserError, match=r'tiktoken:odd: its rules cannot be converted to a tokenizer\.json'):
        from_tiktoken(lossy)
