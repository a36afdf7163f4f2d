"""No text has more bytes than its tokens can have, so a text can be refused before it is encoded."""

import json
import sys
import unicodedata
from collections import defaultdict
from fractions import Fraction

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from pretrax.data.tokenizers.text_bounds import _shrinkage, most_bytes_per_token
from pretrax.data.tokenizers.tokenizer_files import bytes_tokenizer

BYTES = {f'<0x{byte:02X}>': byte for byte in range(256)}
LETTERS = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
WORDS = {'\u00e9': 1000, 'k': 1001, 'the': 1002, '\u2581the': 1003, 'a' * 40: 1004, '\uac01': 1005, '\u1f82': 1006}
PIECES = ['e\u0301', '\u212a', 'the ', 'a' * 40, '\u1100\u1161\u11a8', '\u03b1\u0313\u0300\u0345', '\U0001d41a',
'\uff41', '\u1e9b\u0323', 'x', ' ', '\U0001f389', 'K', '\u0130', '\ufb03']  # fmt: skip


def made(model, normalizer=None, pre_tokenizer=None):
    backend = tokenizers.Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    return backend


def bpe(words, **options):
    return models.BPE(vocab=words, merges=[], ignore_merges=True, **options)


SPACES = normalizers.Sequence([normalizers.Prepend('\u2581'), normalizers.Replace(' ', '\u2581')])
BOUNDED = {
    'byte level': made(bpe(LETTERS | WORDS), None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    'byte level, NFC': made(bpe(LETTERS | WORDS), normalizers.NFC(), pre_tokenizers.ByteLevel()),
    'byte fallback': made(bpe(BYTES | WORDS, byte_fallback=True, unk_token='<0x00>'), SPACES),
    'byte fallback, NFKC': made(bpe(BYTES | WORDS, byte_fallback=True, unk_token='<0x00>'), normalizers.NFKC()),
    'byte fallback, NFKD, lower': made(
        bpe(BYTES | WORDS, byte_fallback=True, unk_token='<0x00>'),
        normalizers.Sequence([normalizers.Lowercase(), normalizers.NFKD()]),
    ),
    'unknown characters': made(bpe({'<unk>': 0} | WORDS, unk_token='<unk>'), normalizers.Replace('the', 'k')),
}
UNBOUNDED = {
    'fused unknown characters': made(bpe({'<unk>': 0}, unk_token='<unk>', fuse_unk=True)),
    'dropped characters': made(bpe(WORDS)),
    'words': made(models.WordLevel({'<unk>': 0}, unk_token='<unk>'), None, pre_tokenizers.Whitespace()),
    'dropped spaces': made(bpe(LETTERS), None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(),
    pre_tokenizers.ByteLevel()])),
    'removed': made(bpe(LETTERS), None, pre_tokenizers.Sequence([pre_tokenizers.Split('x', 'removed'),
    pre_tokenizers.ByteLevel()])),
    'stripped': made(bpe(LETTERS), normalizers.Strip(), pre_tokenizers.ByteLevel()),
    'replaced by nothing': made(bpe(LETTERS), normalizers.Replace('x', ''), pre_tokenizers.ByteLevel()),
}  # fmt: skip


def bound(backend):
    return most_bytes_per_token(json.loads(backend.to_str()))


@pytest.mark.parametrize('name', BOUNDED)
@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(PIECES) | st.characters(exclude_categories=['Cs'])).map(''.join))
def test_tokens_have_at_most_so_many_bytes_each(name, text):
    ids = BOUNDED[name].encode(text, add_special_tokens=False).ids
    assert len(text.encode()) <= bound(BOUNDED[name]) * len(ids)


def test_the_bound_is_reached():
    assert bound(BOUNDED['byte level']) == 40
    assert bound(made(bpe(LETTERS), None, pre_tokenizers.ByteLevel())) == 1
    assert bound(BOUNDED['unknown characters']) == 3 * 40
    assert bytes_tokenizer().max_bytes_per_token == len('<|endoftext|>')


@pytest.mark.parametrize('name', UNBOUNDED)
def test_a_text_that_may_become_one_token_has_no_bound(name):
    backend = UNBOUNDED[name]
    assert bound(backend) is None
    letter = ' ' if name in ('dropped spaces', 'stripped') else 'x'
    assert len(backend.encode(letter * 900).ids) <= 1


def test_a_token_that_takes_the_spaces_beside_it_has_no_bound():
    backend = made(bpe(LETTERS), None, pre_tokenizers.ByteLevel())
    backend.add_tokens([tokenizers.AddedToken('<a>', rstrip=True)])
    assert bound(backend) is None
    assert len(backend.encode('<a>' + ' ' * 1000).ids) == 1


def size(text):
    return len(text.encode())


def test_lower_case_and_each_normal_form_shorten_a_text_at_most_so_much():
    """Each character of a normal form is made of its own decomposition. A character x of the text is decomposed too,
    and each part of it has an equal share of the bytes of x.
    """
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    lower = max(Fraction(size(x), size(x.lower())) for x in characters if x != x.lower())
    assert _shrinkage({'type': 'Lowercase'}) == lower
    # Hangul is decomposed by a formula.
    change = [x for x in characters if unicodedata.decomposition(x) or '\uac00' <= x <= '\ud7a3']
    for form, decomposed in (('NFC', 'NFD'), ('NFD', 'NFD'), ('NFKC', 'NFKD'), ('NFKD', 'NFKD')):
        share = defaultdict(Fraction)
        for x in change:
            parts = unicodedata.normalize(decomposed, x)
            for part in parts:
                share[part] = max(share[part], Fraction(size(x), len(parts)))
        most = Fraction(1)
        for x in {*change, *share}:
            made_of = unicodedata.normalize('NFD', x) if form in ('NFC', 'NFKC') else x
            if unicodedata.normalize(form, x) == x:
                most = max(most, sum(max(share[part], Fraction(size(part))) for part in made_of) / size(x))
        assert _shrinkage({'type': form}) == most, form
