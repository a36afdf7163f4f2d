"""Every way to encode gives the ids of `tokenizers`, and whichever way is taken is said."""

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


def test_the_fast_one_is_taken_for_byte_level_bpe_and_the_reason_is_told():
    assert choose_encoder(byte_level(), TEXTS).name == 'fastokens'
    assert choose_encoder(family('bytes'), TEXTS).name == 'bytes'
    choice = choose_encoder(family('byte-level Unigram'), TEXTS)
    assert choice.name == 'tokenizers'
    assert 'slower, since fastokens does not know this tokenizer' in choice.reason
    assert 'Unigram' in choice.reason


def test_an_encoder_that_differs_on_the_text_is_not_taken(monkeypatch):
    """A fastokens that has another vocabulary than the tokenizer stands for one with a defect."""
    settings = json.loads(byte_level().content)
    settings['model']['merges'] = [merge for merge in settings['model']['merges'] if merge != ['c', 'at']]
    other = Tokenizer(json.dumps(settings).encode(), 'other')
    assert other.encode('the cat') != byte_level().encode('the cat')
    real = encoders._fastokens
    monkeypatch.setattr(encoders, '_fastokens', lambda _: real(other))
    assert choose_encoder(byte_level(), ['nothing of the kind']).name == 'fastokens', 'PROBES do not tell'
    choice = choose_encoder(byte_level(), ['nothing of the kind', 'the cat'])
    assert choice == ('tokenizers', "slower, since fastokens gives other ids for 'the cat'")


def test_a_special_token_in_a_document_would_be_taken_for_one_without_care():
    """What the test above relies on: both libraries do read it as one unless they are told."""
    unwary = tokenizers.Tokenizer.from_buffer(byte_level().content)
    assert unwary.encode(END_OF_TEXT).ids == [0]
    assert fastokens.Tokenizer.from_json_str(byte_level().content.decode()).encode(END_OF_TEXT).ids == [0]
