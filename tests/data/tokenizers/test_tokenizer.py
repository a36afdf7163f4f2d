import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tiktoken
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from pretrax.data.tokenizers.tokenizer import END_OF_TEXT, PROBES, Tokenizer
from pretrax.data.tokenizers.tokenizer_files import from_tiktoken, load_tokenizer
from pretrax.data.tokenizers.tokenizer_training import MODELS, train_tokenizer
from pretrax.errors import UserError
from tokenizer_families import FAMILIES, encoding, family

TEXTS = ['def encode(text):\n    return [ord(letter) for letter in text]\n', 'the cat and the other cat é漢 \n'] * 20
TRAINED = train_tokenizer(TEXTS, 300)


@given(st.text(st.characters(exclude_categories=['Cs'])))
def test_decode_inverts_encode(text):
    assert TRAINED.decode(TRAINED.encode(text)) == text


@given(st.lists(st.text(st.characters(exclude_categories=['Cs']))))
def test_a_batch_encodes_like_its_texts(texts):
    assert TRAINED.encode_batch(texts) == [TRAINED.encode(text) for text in texts]


@given(st.text(st.characters(exclude_categories=['Cs'])))
def test_byte_lengths_add_up_to_the_bytes_of_the_text(text):
    assert sum(TRAINED.byte_length(token) for token in TRAINED.encode(text)) == len(text.encode())


def test_end_of_text_is_0_and_its_name_in_a_document_is_text():
    assert TRAINED.end_of_text == 0
    assert TRAINED.decode([0]) == END_OF_TEXT
    ids = TRAINED.encode(f'a{END_OF_TEXT}b')
    assert 0 not in ids
    assert TRAINED.decode(ids) == f'a{END_OF_TEXT}b'


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


def test_a_saved_tokenizer_loads_in_the_tokenizers_library(tmp_path):
    path = tmp_path / 'tokenizer.json'
    path.write_bytes(TRAINED.content)
    assert tokenizers.Tokenizer.from_file(str(path)).encode('the cat').ids == TRAINED.encode('the cat')
    assert load_tokenizer(path).sha256 == TRAINED.sha256


def test_settings_that_would_change_the_text_are_disabled(tmp_path):
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


def test_other_names_of_end_of_text_are_found():
    content = TRAINED.content.replace(END_OF_TEXT.encode(), b'</s>')
    assert Tokenizer(content, 'mine').end_of_text == 0


def test_a_tokenizer_without_end_of_text_is_refused():
    with pytest.raises(UserError, match='mine: no end-of-text token\n  expected one of'):
        Tokenizer(TRAINED.content.replace(END_OF_TEXT.encode(), b'[PAD]'), 'mine')


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


@pytest.mark.parametrize('name', FAMILIES)
def test_token_starts_equal_the_offsets_of_tokenizers(name):
    tokenizer = family(name)
    reference = tokenizers.Tokenizer.from_buffer(tokenizer.content)
    reference.encode_special_tokens = True
    reference.post_processor = None  # a byte-level post-processor trims spaces from the offsets

    @given(st.text(st.characters(exclude_categories=['Cs'])))
    def same(text):
        encoding = reference.encode(text, add_special_tokens=False)
        starts = tokenizer.token_starts(text, np.array(encoding.ids, np.uint32))
        assert len(starts) == len(encoding.ids) + 1
        assert starts[-1] == len(text.encode())
        assert (np.diff(starts) >= 0).all()
        before = [len(text[:n].encode()) for n in range(len(text) + 1)]
        # If tokens share a character, tokenizers gives the start of the character, and we give the byte.
        found = [max(n for n, at in enumerate(before[:-1]) if at <= start) for start in starts[:-1] if text]
        expected = [start for start, _ in encoding.offsets]
        assert found[1:] == np.maximum.accumulate(expected).tolist()[1:]

    same()


def test_a_byte_token_has_length_1():
    tokenizer = family('SentencePiece BPE')
    ids = tokenizer.encode('ж')
    assert len(ids) > 1
    assert sum(tokenizer.byte_length(token) for token in ids[-2:]) == 2
    assert tokenizer.byte_length(tokenizer.end_of_text) == len('</s>')


@pytest.mark.parametrize('model', MODELS)
def test_every_trainable_model_keeps_all_text(model):
    tokenizer = train_tokenizer(TEXTS, 300, model)
    assert 258 < tokenizer.vocab_size <= 300
    for text in PROBES:
        assert tokenizer.decode(tokenizer.encode(text)) == text


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


@pytest.mark.parametrize('scheme', [None, 'always', 'first', 'never'])
def test_special_tokens_are_encoded_as_the_library_does_and_their_names_in_a_text_are_text(scheme):
    """`<|a|>` takes the spaces on its right; `<b>` is no special token, so that a text with its name has it too."""
    if scheme is None:
        backend = tokenizers.Tokenizer.from_buffer(TRAINED.content)
    else:
        letters = {letter: id_ for id_, letter in enumerate('▁abc|<>')}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(letters | {'▁▁': 7, '▁▁a': 8}, [('▁', '▁'), ('▁▁', 'a')]))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens([tokenizers.AddedToken('<|a|>', rstrip=True, special=True), '<|c|>'])
    backend.add_tokens(['<b>'])
    tokenizer = Tokenizer(backend.to_str().encode(), 'with special tokens', needs_end=False)
    a, c = tokenizer.special_tokens['<|a|>'], tokenizer.special_tokens['<|c|>']
    for parts in [[a, '  a b', c, 'a ', a, a], ['a  a', c, ' b<b>'], [c], [], ['  a']]:
        names = {a: '<|a|>', c: '<|c|>'}
        text = ''.join(names.get(part, part) for part in parts)
        assert tokenizer.encode_with_special_tokens(parts) == backend.encode(text, add_special_tokens=False).ids
    ids = tokenizer.encode_with_special_tokens(['a<|a|> b<|c', '|>', c, '<|c|><b>'])
    assert [token for token in ids if token in (a, c)] == [c]
    if scheme is None:
        assert tokenizer.decode(ids) == 'a<|a|> b<|c|><|c|><|c|><b>'
    else:
        assert ids[-1] == tokenizer.token_id('<b>')
