"""The server as clients see it, on a stub engine: what it answers, and how it refuses."""

import functools
import threading

import pytest

from serve.calls import call, eventually
from serve.stub_engine import Running, stub_service

HELLO = [{'role': 'user', 'content': 'hello'}]


def test_models_are_listed(client):
    stub, chat = client.models.list().data
    assert (stub.id, stub.chat, stub.max_model_len, stub.step) == ('stub', False, 512, 100)
    assert chat.chat
    assert client.models.retrieve('stub') == stub


def test_a_seed_repeats_an_answer_and_without_one_answers_differ(client):
    def texts(**more):
        return {
            client.completions.create(model='stub', prompt='abc', max_tokens=30, **more).choices[0].text
            for _ in 'abcde'
        }

    assert len(texts(seed=-5)) == 1
    assert len(texts()) > 1


def test_an_answer_ends_before_a_stop_string_that_spans_tokens(client):
    asked = {'model': 'stub', 'prompt': 'x', 'temperature': 0, 'max_tokens': 60}
    whole = client.completions.create(**asked, stop=['on the m', 'never']).choices[0]
    assert (whole.text, whole.finish_reason) == ('the cat sat ', 'stop')
    events = list(client.completions.create(**asked, stop='on the m', stream=True))
    assert ''.join(event.choices[0].text for event in events) == 'the cat sat '
    assert events[-1].choices[0].finish_reason == 'stop'


def test_log_probabilities_belong_to_the_tokens_of_the_text(client):
    asked = {'model': 'stub', 'prompt': 'ab', 'temperature': 0, 'max_tokens': 30, 'echo': True, 'logprobs': 2}
    choice = client.completions.create(**asked).choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith('abthe cat sat on the mat, \u00e9')
    assert logprobs.tokens[:5] == ['a', 'b', 't', 'h', 'e']
    assert logprobs.token_logprobs[:3] == [None, -0.5, -0.5]
    assert logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[2] == {'t': -0.5, ' ': -1.32}
    assert logprobs.text_offset[:5] == [0, 1, 2, 3, 4]
    assert logprobs.tokens[26:28] == ['bytes:\\xc3', 'bytes:\\xa9']
    assert logprobs.text_offset[26:29] == [26, 26, 27]

    chat = client.chat.completions.create(
        model='stub-chat', messages=HELLO, temperature=0, max_tokens=27, logprobs=True, top_logprobs=3, stop='the m'
    ).choices[0]
    content = chat.logprobs.content
    assert bytes(byte for token in content for byte in token.bytes).decode() == chat.message.content + 'the m'
    assert [len(token.top_logprobs) for token in content] == [3] * len(content)
    assert content[0].top_logprobs[0].token == 't'


def test_an_answer_ends_at_the_end_of_text_token_unless_it_is_ignored(server, client):
    engine = server.engines['stub']
    engine.script = [104, 105, 256, 33]
    try:
        asked = {'model': 'stub', 'prompt': 'x', 'max_tokens': 8}
        ended = client.completions.create(**asked, logprobs=1)
        echoed = client.completions.create(**asked | {'max_tokens': 3}, echo=True, logprobs=1).choices[0]
        streamed = list(client.completions.create(**asked, logprobs=1, stream=True))
        ignored = client.completions.create(**asked, extra_body={'ignore_eos': True})
    finally:
        engine.script = None
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ('hi', 'stop')
    assert ended.choices[0].logprobs.tokens == ['h', 'i', '<|endoftext|>']
    assert ended.choices[0].logprobs.text_offset == [0, 1, 2]
    assert ended.usage.completion_tokens == 3
    assert (echoed.text, echoed.logprobs.tokens) == ('xhi', ['x', 'h', 'i', '<|endoftext|>'])
    assert [token for event in streamed for token in event.choices[0].logprobs.tokens] == ['h', 'i', '<|endoftext|>']
    assert (ignored.choices[0].text, ignored.choices[0].finish_reason) == ('hi<|endoftext|>!' * 2, 'length')


def test_a_message_ends_where_the_template_ends_a_turn(server, client):
    engine = server.engines['stub-chat']
    engine.script = [104, 105, 1, 33]
    try:
        answer = client.chat.completions.create(model='stub-chat', messages=HELLO, max_tokens=8).choices[0]
    finally:
        engine.script = None
    assert (answer.message.content, answer.finish_reason) == ('hi', 'stop')


@pytest.mark.parametrize(
    ('path', 'body'),
    [
        ('/v1/completions', {'prompt': 'x' * 4_000_000}),
        ('/v1/chat/completions', {'model': 'stub-chat', 'messages': [{'role': 'user', 'content': 'x' * 4_000_000}]}),
        ('/v1/embeddings', {'input': ['x', 'x' * 4_000_000]}),
    ],
)
def test_a_text_that_is_too_long_whatever_it_says_is_not_tokenized(server, monkeypatch, path, body):
    tokenizer = server.service.models[body.get('model', 'stub')].tokenizer
    encode, encoded = tokenizer._parsing.encode, []
    monkeypatch.setattr(tokenizer, 'encode_with_names', lambda text: encoded.append(text) or encode(text).ids)
    monkeypatch.setattr(tokenizer, 'encode_with_special_tokens', lambda parts: 1 / 0)
    status, _, answer = call(server, path, body)
    assert (status, answer['error']['code']) == (400, 'context_length_exceeded')
    assert ' bytes, which are at least 307,69' in answer['error']['message']  # of <|endoftext|>, 13 bytes
    assert 'x' * 4_000_000 not in encoded


def test_long_texts_leave_threads_to_others(monkeypatch):
    """40 of them, more than a pool has threads."""
    with Running(stub_service()) as server:
        tokenizer, release = server.service.models['stub'].tokenizer, threading.Event()
        encode = tokenizer.encode_with_names
        monkeypatch.setattr(tokenizer, 'encode_with_names', lambda text: release.wait(60) and encode(text))
        answers = []
        ask = functools.partial(call, server, '/tokenize', {'prompt': 'x' * 3000})
        threads = [threading.Thread(target=lambda: answers.append(ask()[0])) for _ in range(40)]
        for thread in threads:
            thread.start()
        eventually(lambda: server.service.running == 40)
        assert call(server, '/v1/chat/completions', CHAT)[0] == 200
        assert not answers
        release.set()
        for thread in threads:
            thread.join()
        assert answers == [200] * 40


def test_an_answer_of_no_tokens_is_empty(client):
    answer = client.completions.create(model='stub', prompt='abc', max_tokens=0)
    assert (answer.choices[0].text, answer.usage.prompt_tokens, answer.usage.completion_tokens) == ('', 3, 0)


def test_text_becomes_tokens_and_text_again(server):
    made = call(server, '/tokenize', {'text': 'h\u00e9'})[2]
    assert made['tokens'] == [104, 195, 169]
    assert made['count'] == 3
    assert call(server, '/detokenize', {'tokens': made['tokens']})[2]['text'] == 'h\u00e9'
    chat = call(server, '/tokenize', {'model': 'stub-chat', 'messages': HELLO})[2]
    assert bytes(chat['tokens']).decode() == 'user: hello\nassistant: '
    assert (chat['count'], chat['max_model_len']) == (len(chat['tokens']), 512)


CHAT = {'model': 'stub-chat', 'messages': HELLO, 'max_tokens': 1}


def test_the_client_library_raises_its_own_errors(client):
    import openai

    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model='gpt-4', prompt='x')
    assert missing.value.code == 'model_not_found'
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model='stub', prompt='x' * 600)
    assert (long.value.code, long.value.param) == ('context_length_exceeded', 'prompt')


def test_the_page_is_json_free_of_other_servers(server):
    status, headers, text = call(server, '/')
    if status == 404:
        pytest.skip('no page')
    assert "default-src 'self'" in headers['content-security-policy']
    assert '<html' in text
