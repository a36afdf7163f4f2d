import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from pretrax.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer
from pretrax.data.tokenizers.tokenizer_files import load_tokenizer
from pretrax.data.tokenizers.tokenizer_training import train_tokenizer
from pretrax.errors import UserError
from tokenizer_families import FAMILIES, family

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
    assert sum(TRAINED.byte_lengths[token] for token in TRAINED.encode(text)) == len(text.encode())


def test_end_of_text_is_0_and_its_name_in_a_document_is_text():
    assert TRAINED.end_of_text == 0
    assert TRAINED.decode([0]) == END_OF_TEXT
    ids = TRAINED.encode(f'a{END_OF_TEXT}b')
    assert 0 not in ids
    assert TRAINED.decode(ids) == f'a{END_OF_TEXT}b'


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
    assert sum(tokenizer.byte_lengths[token] for token in ids[-2:]) == 2
    assert tokenizer.byte_lengths[tokenizer.end_of_text] == len('</s>')


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
