"""The streamed text of an answer is the text of its tokens as `tokenizers` decodes them,
cut at the first stop string.
"""

import functools
import itertools
import tracemalloc

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokenizers.tokenizer_files import bytes_tokenizer, character_tokenizer
from pretrax.infer.text import Piece, TextStream
from tokenizer_families import byte_level

WORDS = [
    '▁',
    '▁▁',
    '▁the',
    'the',
    'e\u0301',
    'é',
    '\u0301',
    '🎉',
    '👩\u200d👩',
    'STOP',
    'ST',
    'OP',
    ' ',
    'a',
    'ab',
    '.',
    '▁.',
    "n't",
]
BYTES = [f'<0x{byte:02X}>' for byte in (0x0A, 0x41, 0x80, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x8E, 0x89, 0xFF)]


def of_words(words, decoder, model=models.WordLevel):
    backend = tokenizers.Tokenizer(model({word: token for token, word in enumerate(words)}, unk_token=words[0]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(['<|end|>', '</s>', 'two words'])
    return Tokenizer(backend.to_str().encode(), 'words', needs_end=False)


def sentencepiece(*more):
    steps = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), *more]
    return of_words(WORDS + BYTES, decoders.Sequence(steps))


KINDS = {
    'byte-level BPE': byte_level,
    'bytes': bytes_tokenizer,
    'characters': lambda: character_tokenizer('STOP abé🎉\u0301', 'characters'),
    'metaspace': lambda: of_words(WORDS, decoders.Metaspace()),
    'metaspace without a first space': lambda: of_words(WORDS, decoders.Metaspace(prepend_scheme='never')),
    'llama': lambda: sentencepiece(decoders.Strip(' ', 1, 0)),
    'gemma': lambda: sentencepiece(),
    'two spaces': lambda: sentencepiece(decoders.Strip(' ', 2, 0)),
    'byte fallback alone': lambda: of_words(WORDS + BYTES, decoders.ByteFallback()),
    'wordpiece': lambda: of_words([*WORDS, '##a', '##STOP', '##', '##.'], decoders.WordPiece()),
    'wordpiece without cleaning': lambda: of_words([*WORDS, '##a', '##STOP'], decoders.WordPiece(cleanup=False)),
    'end of word': lambda: of_words([*WORDS, 'a</w>', 'STOP</w>', '</w>'], decoders.BPEDecoder()),
    'stripped tokens': lambda: of_words([*WORDS, ' a ', '  '], decoders.Strip(' ', 1, 0)),
    'no decoder': lambda: of_words(WORDS, None),
    'looks at the whole text': lambda: of_words(WORDS, decoders.Sequence([decoders.Fuse(), decoders.Replace('ST',
    'x')])),
    'ctc': lambda: of_words([*WORDS, '<pad>', '|'], decoders.CTC()),
}  # fmt: skip


@functools.cache
def kind(name):
    return KINDS[name]()


def whole_text(tokenizer, prompt, ids):
    """The text of prompt and answer, less what it has in common with the text of the prompt."""
    text, before = tokenizer.decode(prompt + ids), tokenizer.decode(prompt)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, before, strict=False))
    return text[sum(1 for _ in same) :]


def cut(text, stops):
    """The text before the stop that ends first, the longest of those that end together; and the stop."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, length, stop = min(found)
    return text[: end + length], stop


def in_pieces(ids, cuts):
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize('name', KINDS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_the_stream_is_the_whole_text_up_to_the_first_stop(name, data):
    tokenizer = kind(name)
    token = st.integers(0, tokenizer.vocab_size - 1)
    prompt, ids = data.draw(st.lists(token, max_size=6)), data.draw(st.lists(token, max_size=30))
    whole = whole_text(tokenizer, prompt, ids)
    spans = st.tuples(st.integers(0, len(whole)), st.integers(1, 4)).map(lambda span: whole[span[0] : sum(span)])
    stops = [stop for stop in data.draw(st.lists(spans | st.text('STOPa ', max_size=4), max_size=3)) if stop]
    include = data.draw(st.booleans())
    stream = TextStream(tokenizer, prompt, stops, include_stop=include)
    texts, tokens = [], data.draw(st.lists(st.integers(0, 30), max_size=8))
    for pushed in in_pieces(ids, tokens):
        texts.append(stream.push(pushed))
        assert (
            ''.join(piece.text for piece in stream.pieces) == ''.join(texts)[: sum(len(p.text) for p in stream.pieces)]
        )
    texts.append(stream.flush())
    expected, stop = cut(whole, stops)
    assert ''.join(texts) == expected + (stop or '' if include else '')
    assert stream.finished == stop
    assert ''.join(piece.text for piece in stream.pieces) == ''.join(texts)
    assert [piece.offset for piece in stream.pieces] == [
        sum(len(before.text) for before in stream.pieces[:n]) for n in range(len(stream.pieces))
    ]
    if stop is None:
        assert len(stream.pieces) == len(ids)
    assert stream.push(ids) == '' or stop is None


@settings(deadline=None, max_examples=300)
@given(text=st.text('ab', max_size=20), stops=st.lists(st.text('ab', min_size=1, max_size=6), max_size=3))
def test_a_stop_that_repeats_itself_is_found(text, stops):
    """Such as aab in aaab: its beginning was seen twice."""
    stream = TextStream(kind('bytes'), stop=stops)
    found = ''.join(stream.push([byte]) for byte in text.encode()) + stream.flush()
    assert (found, stream.finished) == cut(text, stops)


@pytest.mark.parametrize('text', ['naïve 🎉👩\u200d👩\u200d👧 e\u0301 🇩🇪', 'a\n\n  b', '漢字'])
@pytest.mark.parametrize('name', ['byte-level BPE', 'bytes'])
def test_a_character_is_sent_when_it_is_complete(name, text):
    tokenizer = kind(name)
    stream, sent = TextStream(tokenizer), ''
    ids = tokenizer.encode(text)
    for number, token in enumerate(ids, 1):
        sent += stream.push([token])
        assert sent == tokenizer.decode(ids[:number]).rstrip('\ufffd')
    assert stream.flush() == ''
    assert sent == text


def test_an_incomplete_character_ends_as_the_replacement_character():
    stream = TextStream(kind('bytes'))
    assert stream.push(list('a🎉'.encode()[:-1])) == 'a'
    assert [piece.text for piece in stream.pieces] == ['a']
    assert stream.flush() == '\ufffd'
    assert [piece.text for piece in stream.pieces] == ['a', '', '', '\ufffd']


def test_only_what_may_begin_a_stop_is_held_back():
    stream = TextStream(kind('bytes'), stop=['STOP', 'TOY'])
    assert [stream.push([byte]) for byte in b'a STSTOR'] == ['a', ' ', '', '', 'ST', '', '', 'STOR']
    assert [stream.push([byte]) for byte in b'STOxTOYz'] == ['', '', '', 'STOx', '', '', '', '']
    assert stream.finished == 'TOY'
    assert stream.flush() == ''


def test_tokens_after_a_stop_are_no_pieces():
    tokenizer = character_tokenizer(['x', 'aST', 'OPb', 'c'], 'words')
    stream = TextStream(tokenizer, stop=['STOP'])
    assert (stream.push([0, 1]), stream.pieces) == ('xa', [Piece('x', 0)])
    assert stream.push([2, 3]) == ''
    assert stream.pieces == [Piece('x', 0), Piece('a', 1)]


def test_the_first_word_after_a_prompt_keeps_its_space():
    """Alone, the answer would lose it: a SentencePiece text has a space before its first word, which is not shown."""
    tokenizer = kind('llama')
    the = tokenizer.token_id('▁the')
    assert tokenizer.decode([the]) == 'the'
    assert TextStream(tokenizer, [the]).push([the]) == ' the'
    assert TextStream(tokenizer).push([the]) == 'the'


def test_bytes_of_tokens_join_to_characters():
    for name in ('llama', 'byte-level BPE'):
        tokenizer = kind(name)
        ids = [tokenizer.token_id(f'<0x{b:02X}>') for b in '€'.encode()] if name == 'llama' else tokenizer.encode('€')
        assert len(ids) == 3
        assert b''.join(map(tokenizer.token_bytes, ids)).decode() == '€'
    assert kind('llama').token_bytes(kind('llama').token_id('▁the')) == b' the'
    assert kind('wordpiece').token_bytes(kind('wordpiece').token_id('a')) == b' a'


def test_a_token_late_in_a_long_answer_makes_no_long_text():
    """Text decoded from all tokens so far, for each token, would be as long as the answer."""
    tokenizer = kind('byte-level BPE')
    ids = tokenizer.encode('the cat 🎉 ' * 5000)
    half = len(ids) // 2
    stream = TextStream(tokenizer, stop=['the dog', 'x' * 1000])
    stream.push(ids[:half])
    large = 0
    tracemalloc.start()
    try:
        for token in ids[half:]:
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            stream.push([token])
            large += tracemalloc.get_traced_memory()[1] - before > 10_000  # bytes; half of the text is 50,000
    finally:
        tracemalloc.stop()
    assert large < (len(ids) - half) / 4  # lists that grow, and what other threads allocate


def test_two_rare_decoders_alone_give_their_text_at_the_end():
    at_the_end = {name for name in KINDS if TextStream(kind(name)).push([1, 2, 3, 4, 5]) == ''}
    assert at_the_end == {'looks at the whole text', 'ctc'}
