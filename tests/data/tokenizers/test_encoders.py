"""Every encoder gives the ids of `tokenizers`, and the choice is reported with its reason."""

import itertools
import json

import fastokens
import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pretrax.data.tokenizers import encoders
from pretrax.data.tokenizers.encoders import choose_encoder, make_encoder
from pretrax.data.tokenizers.tokenizer import END_OF_TEXT, PROBES, Tokenizer
from tokenizer_families import FAMILIES, PATTERNS, TEXTS, byte_level, encoding, family

SPECIAL = st.sampled_from([END_OF_TEXT, '</s>', '<s>', '<unk>', '<0x41>', "'ll", ' 12345', '\r\n \n', '  ', '▁'])
TEXT = st.lists(SPECIAL | st.text(st.characters(exclude_categories=['Cs']), max_size=12), max_size=8).map(''.join)


@pytest.mark.parametrize('name', FAMILIES)
def test_every_encoder_gives_the_ids_of_tokenizers(name):
    tokenizer = family(name)
    choice = choose_encoder(tokenizer, TEXTS)
    encode = make_encoder(tokenizer, choice.name)
    reference = tokenizers.Tokenizer.from_buffer(tokenizer.content)
    reference.encode_special_tokens = True

    @settings(max_examples=150)
    @given(st.lists(TEXT, max_size=5))
    @example(list(PROBES))
    def same(texts):
        encoded = encode(texts)
        assert encoded.ids.dtype == np.uint32
        expected = [reference.encode(text, add_special_tokens=False).ids for text in texts]
        assert [encoded.ids[a:b].tolist() for a, b in itertools.pairwise(encoded.offsets)] == expected
        assert encoded.offsets[-1] == len(encoded.ids)
        assert tokenizer.end_of_text not in encoded.ids

    same()


@pytest.mark.parametrize('name', PATTERNS)
def test_a_tiktoken_encoding_keeps_its_ids(name):
    theirs, ours = encoding(name), family(name)
    assert ours.vocab_size == theirs.n_vocab
    assert ours.end_of_text == theirs.eot_token

    @settings(max_examples=300)
    @given(TEXT)
    def same(text):
        assert ours.encode(text) == theirs.encode_ordinary(text)
        assert ours.decode(ours.encode(text)) == text

    same()


def test_fastokens_is_chosen_for_byte_level_bpe_with_a_reason():
    assert choose_encoder(byte_level(), TEXTS).name == 'fastokens'
    assert choose_encoder(family('bytes'), TEXTS).name == 'bytes'
    choice = choose_encoder(family('byte-level Unigram'), TEXTS)
    assert choice.name == 'tokenizers'
    assert 'slower, since fastokens does not support this tokenizer' in choice.reason
    assert 'Unigram' in choice.reason


def test_an_encoder_with_other_ids_is_not_chosen(monkeypatch):
    """A fastokens with another vocabulary stands for a broken one."""
    settings = json.loads(byte_level().content)
    settings['model']['merges'] = [merge for merge in settings['model']['merges'] if merge != ['c', 'at']]
    other = Tokenizer(json.dumps(settings).encode(), 'other')
    assert other.encode('the cat') != byte_level().encode('the cat')
    real = encoders._fastokens
    monkeypatch.setattr(encoders, '_fastokens', lambda _: real(other))
    assert choose_encoder(byte_level(), ['nothing of the kind']).name == 'fastokens', 'PROBES do not tell'
    choice = choose_encoder(byte_level(), ['nothing of the kind', 'the cat'])
    assert choice == ('tokenizers', "slower, since fastokens gives other ids for 'the cat'")


def test_both_libraries_parse_special_tokens_in_text_by_default():
    """Shows that the test above depends on our settings."""
    unwary = tokenizers.Tokenizer.from_buffer(byte_level().content)
    assert unwary.encode(END_OF_TEXT).ids == [0]
    assert fastokens.Tokenizer.from_json_str(byte_level().content.decode()).encode(END_OF_TEXT).ids == [0]
