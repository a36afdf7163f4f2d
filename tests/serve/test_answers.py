"""The text and the tokens of an answer do not depend on how they arrive."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from pretrax.data.tokenizers.tokenizer_files import bytes_tokenizer
from pretrax.infer.request import Request, Token, Update
from pretrax.serve.answers import Choice, Delta, token_name
from serve.calls import call
from serve.stub_engine import Running, stub_service
from tokenizer_families import byte_level, family

LETTERS = 'ab\u00e9\u6f22\U0001f389'
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=3)
NAMES = ['byte-level BPE', 'byte-level Unigram']


def cut(text, stops):
    """The text before the stop string that is complete first; of several that end there, the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def updates_of(ids, splits, finish):
    """The tokens in blocks that end at the splits."""
    ends = sorted({split % (len(ids) + 1) for split in splits} | {len(ids)})
    for start, end in zip([0, *ends], ends, strict=False):
        tokens = tuple(Token(token, -1.0 * at) for at, token in enumerate(ids[start:end], start))
        yield Update(number=1, tokens=tokens, finish=finish if end == len(ids) else None)


def test_nothing_is_added_after_a_stop_string():
    """A busy server takes several blocks at once. The engine may have written more of them after the stop."""
    choice = Choice(bytes_tokenizer(), Request(prompt=(1,), max_tokens=100), ['b'], 0)
    first, second = (Update(number=1, tokens=tuple(map(Token, text))) for text in (b'ab', b'cd'))
    assert choice.take(first).finish == 'stop'
    assert choice.take(second) == Delta()
    assert (choice.answer_tokens, choice.whole.text) == (2, 'a')


@hypothesis.given(st.data(), STOPS, st.lists(st.integers(0, 100), max_size=5), st.booleans())
def test_a_joined_stream_is_the_whole_answer(data, stops, splits, random_bytes):
    """Tokens of a text, or any tokens, whose bytes are often no text."""
    tokenizer = bytes_tokenizer() if random_bytes else family(data.draw(st.sampled_from(NAMES)))
    most = tokenizer.vocab_size - 1
    text = tokenizer.encode(data.draw(st.text(LETTERS + ' ', max_size=12)))
    ids = data.draw(st.lists(st.integers(0, most), max_size=12)) if random_bytes else text
    request = Request(prompt=tuple(tokenizer.encode('a b')), max_tokens=100)
    choice, joined = Choice(tokenizer, request, stops, 0), ''
    for update in updates_of(ids, splits, 'length'):
        delta = choice.take(update)
        joined += delta.text
        if delta.finish:
            break
    expected, stopped = cut(tokenizer.decode([*request.prompt, *ids])[len('a b') :], stops)
    assert joined == choice.whole.text == expected
    assert choice.whole.finish == ('stop' if stopped else 'length')
    assert [token.logprob for token in choice.whole.tokens] == [-1.0 * at for at in range(len(choice.whole.tokens))]
    assert choice.whole.offsets == sorted(choice.whole.offsets)
    assert choice.answer_tokens == len(choice.whole.tokens) == len(choice.whole.offsets)
    if not stopped:
        assert choice.answer_tokens == len(ids)


@pytest.mark.parametrize('splits', [[], [1], [1, 2, 3, 4, 5]])
def test_an_answer_counts_the_tokens_up_to_its_stop_string(splits):
    request = Request(prompt=(97,), max_tokens=100)
    choice = Choice(bytes_tokenizer(), request, ['cd'], 0)
    for update in updates_of(list(b'abcdef'), splits, 'length'):
        if choice.take(update).finish:
            break
    assert (choice.whole.text, choice.answer_tokens) == ('ab', 4)
    assert [token.id for token in choice.whole.tokens] == list(b'abcd')
    assert choice.whole.offsets == [0, 1, 2, 2]


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.binary(min_size=1, max_size=40), STOPS)
def test_a_joined_stream_over_http_is_the_whole_answer(scripted, script, stops):
    scripted.engine.script = list(script)
    asked = {'prompt': 'x', 'max_tokens': len(script), 'stop': stops}
    status, _, whole = call(scripted, '/v1/completions', asked)
    assert status == 200, whole
    stream = call(scripted, '/v1/completions', asked | {'stream': True})[2]
    assert ''.join(event['choices'][0]['text'] for event in events(stream)) == whole['choices'][0]['text']
    assert whole['choices'][0]['text'] == cut(script.decode(errors='replace'), stops)[0]


def events(stream):
    *lines, last = [line.removeprefix('data: ') for line in stream.splitlines() if line]
    assert last == '[DONE]'
    return [json.loads(line) for line in lines]


@pytest.fixture(scope='module')
def scripted():
    with Running(stub_service(block=3, chat=False)) as server:
        yield server


def test_tokens_without_whole_characters_have_names():
    tokenizer = byte_level()
    names = [token_name(tokenizer, token) for token in range(tokenizer.vocab_size)]
    assert len(set(names)) == len(names)
    assert {'a', ' ', 'bytes:\\xc3', '<|endoftext|>'} <= set(names)
