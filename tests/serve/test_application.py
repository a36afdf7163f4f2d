"""The server as clients see it, on a stub engine: what it answers, and how it refuses."""

import base64
import functools
import json
import socket
import threading

import numpy as np
import pytest

from pretrax.serve.access import Keys
from pretrax.serve.limits import Limits
from serve.calls import call, eventually, metric
from serve.stub_engine import Running, stub_service

HELLO = [{'role': 'user', 'content': 'hello'}]


def test_models_are_listed(client):
    stub, chat = client.models.list().data
    assert (stub.id, stub.chat, stub.max_model_len, stub.step) == ('stub', False, 512, 100)
    assert chat.chat
    assert client.models.retrieve('stub') == stub


def test_a_completion_and_its_stream_are_the_same_text(client):
    asked = {'model': 'stub', 'prompt': 'abc', 'max_tokens': 50, 'seed': 3}
    whole = client.completions.create(**asked)
    assert len(whole.choices[0].text.encode()) == 50
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 50)
    assert whole.system_fingerprint == 'step-100'
    *events, last = client.completions.create(**asked, stream=True, stream_options={'include_usage': True})
    assert ''.join(event.choices[0].text for event in events) == whole.choices[0].text
    assert len(events) > 3
    assert {event.system_fingerprint for event in events} == {'step-100'}
    assert last.choices == []
    assert last.usage == whole.usage


def test_a_chat_and_its_stream_are_the_same_text(client):
    asked = {'model': 'stub-chat', 'messages': HELLO, 'max_completion_tokens': 50, 'seed': 3}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == 'assistant'
    first, *events = client.chat.completions.create(**asked, stream=True)
    assert first.choices[0].delta.role == 'assistant'
    text = ''.join(event.choices[0].delta.content or '' for event in events)
    assert text == whole.choices[0].message.content
    assert events[-1].choices[0].finish_reason == 'length'


def test_the_answers_to_several_prompts_are_in_order(client):
    whole = client.completions.create(model='stub', prompt=['ab', 'cde'], n=2, max_tokens=9, seed=2)
    alone = [
        client.completions.create(model='stub', prompt=prompt, n=2, max_tokens=9, seed=2).choices
        for prompt in ('ab', [ord(letter) for letter in 'cde'])
    ]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == [choice.text for pair in alone for choice in pair]
    assert len({choice.text for choice in whole.choices}) == 4
    assert whole.usage.prompt_tokens == 5


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


def test_a_prompt_is_scored_without_an_answer(client):
    """As lm_eval asks."""
    choice = client.completions.create(model='stub', prompt=[97, 98, 99], max_tokens=0, echo=True, logprobs=1).choices[
        0
    ]
    assert choice.text == 'abc'
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5]


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


UNITS = np.arange(1.0, 9.0)  # a hidden state of the stub is its token times this


def vector(server, **body):
    made = call(server, '/v1/embeddings', {'input': 'abc', 'encoding_format': 'float'} | body)[2]
    return np.array(made['data'][0]['embedding'])


def test_embeddings(client):
    """By default the mean, of length 1; the client asks for base64."""
    made = client.embeddings.create(model='stub', input=['ab', 'cde'])
    for one in made.data:
        assert one.embedding == pytest.approx(UNITS / np.linalg.norm(UNITS))
    raw = client.embeddings.create(model='stub', input=[[97, 98], [1, 6]], extra_body={'normalize': False})
    assert [one.embedding for one in raw.data] == [pytest.approx(97.5 * UNITS), pytest.approx(3.5 * UNITS)]


def test_many_texts_are_one_request(client):
    """As many as OpenAI takes; the server has 8 slots and a queue of 64."""
    texts = [[token % 256] for token in range(2048)]
    made = client.embeddings.create(model='stub', input=texts, extra_body={'normalize': False})
    assert [one.embedding[0] for one in made.data] == [token % 256 for token in range(2048)]
    choices = client.completions.create(
        model='stub', prompt=[f'{n:03}' for n in range(200)], max_tokens=3, seed=1
    ).choices
    alone = [
        client.completions.create(model='stub', prompt=f'{n:03}', max_tokens=3, seed=1).choices[0] for n in (0, 9, 199)
    ]
    assert [choices[n].text for n in (0, 9, 199)] == [choice.text for choice in alone]


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


@pytest.mark.parametrize(('pooling', 'token'), [('mean', 98), ('last', 99), ('cls', 97), ('min', 97), ('max', 99)])
def test_a_request_chooses_the_pooling(server, pooling, token):
    assert vector(server, pooling=pooling, normalize=False) == pytest.approx(token * UNITS)


def test_dimensions_are_the_first_ones_and_then_normalized(server):
    first = UNITS[:3]
    assert vector(server, dimensions=3, normalize=False) == pytest.approx(98 * first)
    assert vector(server, dimensions=3) == pytest.approx(first / np.linalg.norm(first))
    assert vector(server, dimensions=8, pooling=None, normalize=None) == pytest.approx(UNITS / np.linalg.norm(UNITS))
    assert vector(server, input=[0]).tolist() == [0] * 8  # a vector of length 0 has no direction


def test_the_server_has_a_default_for_embeddings(server):
    model = server.service.models['stub']
    model.pooling, model.normalize = 'last', False
    try:
        assert vector(server) == pytest.approx(99 * UNITS)
        assert vector(server, pooling='cls', normalize=True) == pytest.approx(UNITS / np.linalg.norm(UNITS))
    finally:
        model.pooling, model.normalize = 'mean', True


def test_base64_is_little_endian_f32(server):
    body = {'input': 'ab', 'encoding_format': 'base64', 'normalize': False}
    content = base64.b64decode(call(server, '/v1/embeddings', body)[2]['data'][0]['embedding'])
    assert np.frombuffer(content, '<f4').tolist() == (97.5 * UNITS).tolist()


def test_text_becomes_tokens_and_text_again(server):
    made = call(server, '/tokenize', {'text': 'h\u00e9'})[2]
    assert made['tokens'] == [104, 195, 169]
    assert made['count'] == 3
    assert call(server, '/detokenize', {'tokens': made['tokens']})[2]['text'] == 'h\u00e9'


def test_an_empty_prompt_begins_a_text(client):
    assert client.completions.create(model='stub', prompt='', max_tokens=3).usage.prompt_tokens == 1


def test_max_tokens_is_16_or_what_is_left(client):
    long = 'x' * 505
    assert client.completions.create(model='stub', prompt='x').usage.completion_tokens == 16
    assert client.completions.create(model='stub', prompt=long).usage.completion_tokens == 7
    assert client.chat.completions.create(model='stub-chat', messages=HELLO).usage.total_tokens == 512


COMPLETION = {'prompt': 'x', 'max_tokens': 1}
CHAT = {'model': 'stub-chat', 'messages': HELLO, 'max_tokens': 1}
EMBEDDING = {'input': 'x'}
REFUSED = [
    (COMPLETION, {'promt': 'y'}, 'promt', 'promt: unknown field; did you mean prompt?'),
    (COMPLETION, {'prompt': None}, 'prompt', 'prompt: missing'),
    (COMPLETION, {'prompt': {}}, 'prompt', 'prompt: expected a string, a list of strings, a list of token ids'),
    (COMPLETION, {'prompt': []}, 'prompt', 'prompt: the list is empty'),
    (COMPLETION, {'prompt': [[]]}, 'prompt', 'prompt: the list of tokens is empty'),
    (COMPLETION, {'prompt': ['x', 3]}, 'prompt', 'prompt: expected a string'),
    (COMPLETION, {'prompt': [True]}, 'prompt', 'prompt: expected a string'),
    (COMPLETION, {'prompt': [300]}, 'prompt', 'prompt: token 300 is outside the vocabulary of 257 tokens'),
    (COMPLETION, {'prompt': [-1]}, 'prompt', 'prompt: token -1 is outside the vocabulary of 257 tokens'),
    (COMPLETION, {'prompt': 'x' * 600}, 'prompt', 'the prompt has 600 tokens, and max_tokens is 1: 601 together'),
    (COMPLETION, {'prompt': 'x' * 600, 'max_tokens': None}, 'prompt',
    'the prompt has 600 tokens; this model reads at most 512'),
    (COMPLETION, {'max_tokens': 600}, 'prompt', 'the prompt has 1 tokens, and max_tokens is 600: 601 together'),
    (COMPLETION, {'max_tokens': -1}, 'max_tokens', 'greater than or equal to 0'),
    (COMPLETION, {'max_tokens': 1.5}, 'max_tokens', 'integer'),
    (COMPLETION, {'suffix': 'y'}, 'suffix', 'suffix: this server only continues text'),
    (COMPLETION, {'temperature': '1'}, 'temperature', 'number'),
    (COMPLETION, {'temperature': float('nan')}, 'temperature', 'finite'),
    (COMPLETION, {'temperature': -1}, 'temperature', 'greater than or equal to 0'),
    (COMPLETION, {'top_p': -0.1}, 'top_p', 'greater than or equal to 0'),
    (COMPLETION, {'top_k': -2}, 'top_k', 'greater than or equal to 1'),
    (COMPLETION, {'min_p': 2}, 'min_p', 'less than or equal to 1'),
    (COMPLETION, {'presence_penalty': 3}, 'presence_penalty', 'less than or equal to 2'),
    (COMPLETION, {'repetition_penalty': 0}, 'repetition_penalty', 'greater than 0'),
    (COMPLETION, {'logit_bias': {'x': 1}}, 'logit_bias', "logit_bias: 'x' is not a token id"),
    (COMPLETION, {'logit_bias': {'9' * 5000: 1}}, 'logit_bias', 'is not a token id'),
    (COMPLETION, {'logit_bias': {'257': 1}}, 'logit_bias', 'token 257 is outside the vocabulary'),
    (COMPLETION, {'logit_bias': {str(i): 1 for i in range(301)}}, 'logit_bias', '301 tokens; expected at most 300'),
    (COMPLETION, {'logit_bias': {'3': 101}}, 'logit_bias.3', 'less than or equal to 100'),
    (COMPLETION, {'logprobs': 21}, 'logprobs', 'less than or equal to 20'),
    (COMPLETION, {'n': 0}, 'n', 'greater than or equal to 1'),
    (COMPLETION, {'n': 2049}, 'n', '2,049 answers; this server takes at most 2,048 in one request'),
    (COMPLETION, {'stop': ['x'] * 17}, 'stop', '17 strings; expected at most 16'),
    (COMPLETION, {'seed': 2**63}, 'seed', 'seed'),
    (CHAT, {'messages': []}, 'messages', 'at least 1 item'),
    (CHAT, {'messages': [{'role': 'robot', 'content': 'x'}]}, 'messages.0.role',
    "'system', 'developer', 'user' or 'assistant'"),
    (CHAT, {'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]}, 'messages.0.content',
    'expected a string, or a list of parts of text'),
    (CHAT, {'messages': [{'role': 'user', 'content': 'x' * 600}]}, 'messages', 'this model reads at most 512 tokens'),
    (CHAT, {'messages': [{'role': 'user', 'content': ''}]}, 'messages', 'the template refuses an empty message'),
    (CHAT, {'top_logprobs': 3}, None, 'top_logprobs needs "logprobs": true'),
    (CHAT, {'max_completion_tokens': 2}, None, 'max_tokens and max_completion_tokens differ'),
    (CHAT, {'model': 'stub'}, 'messages', 'stub is a base model: it has no chat template; use /v1/completions'),
    (EMBEDDING, {'dimensions': 9}, 'dimensions', 'dimensions: 9, but the hidden states of this model have 8'),
    (EMBEDDING, {'dimensions': 0}, 'dimensions', 'greater than or equal to 1'),
    (EMBEDDING, {'normalize': 'yes'}, 'normalize', 'boolean'),
    (EMBEDDING, {'encoding_format': 'int8'}, 'encoding_format', "'float' or 'base64'"),
    (EMBEDDING, {'input': ['x'] * 2049}, 'input', '2,049 texts; this server takes at most 2,048 in one request'),
    (EMBEDDING, {'pooling': 'median'}, 'pooling', "'mean', 'last', 'cls', 'min' or 'max'"),
    (EMBEDDING, {'input': 'x' * 600}, 'input', 'the prompt has 600 tokens; this model reads at most 512 tokens'),
]  # fmt: skip
PATHS = {'prompt': '/v1/completions', 'messages': '/v1/chat/completions', 'input': '/v1/embeddings'}


@pytest.mark.parametrize(('body', 'change', 'param', 'message'), REFUSED)
def test_a_field_that_is_wrong_is_named(server, body, change, param, message):
    status, _, answer = call(server, PATHS[next(iter(PATHS.keys() & body))], body | change)
    error = answer['error']
    assert (status, error['param'], error['type']) == (400, param, 'invalid_request_error'), error
    assert message in error['message']


@pytest.mark.parametrize('path', PATHS.values())
@pytest.mark.parametrize(
    'body', [b'', b'{', b'[1]', b'"x"', b'\xff', b'{"prompt": "\\ud800"}', b'{"a": 1} 2', b'[' * 100_000]
)
def test_a_body_that_is_no_json_object_is_refused(server, path, body):
    status, _, answer = call(server, path, body, method='POST')
    assert status == 400
    assert answer['error']['type'] == 'invalid_request_error'


@pytest.mark.parametrize(
    ('method', 'path', 'status', 'message'),
    [
        ('GET', '/v1/completions', 405, '/v1/completions does not take GET'),
        ('DELETE', '/v1/models', 405, '/v1/models does not take DELETE'),
        ('POST', '/health', 405, '/health does not take POST'),
        ('GET', '/v1/engines', 404, '/v1/engines: there is no such page'),
        ('GET', '/../pyproject.toml', 404, 'there is no such page'),
        ('GET', '/v1/models/gpt-4', 404, "model: there is no 'gpt-4'; this server has stub, stub-chat"),
    ],
)
def test_a_path_or_method_that_does_not_exist(server, method, path, status, message):
    got, _, answer = call(server, path, b'{}' if method == 'POST' else None, method)
    assert got == status
    assert message in answer['error']['message']


def test_the_client_library_raises_its_own_errors(client):
    import openai

    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model='gpt-4', prompt='x')
    assert missing.value.code == 'model_not_found'
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model='stub', prompt='x' * 600)
    assert (long.value.code, long.value.param) == ('context_length_exceeded', 'prompt')


def test_a_request_of_a_page_from_elsewhere_is_refused(server):
    assert call(server, '/v1/completions', COMPLETION, origin='http://evil.example')[0] == 403
    assert call(server, '/v1/models', host='evil.example')[0] == 403
    assert call(server, '/v1/models', host='evil.example:80@127.0.0.1')[0] == 403
    assert call(server, '/v1/models', origin=server.url)[0] == 200
    assert call(server, '/v1/models', host='localhost:1234')[0] == 200


def test_a_page_whose_origin_is_allowed_may_read_answers():
    page = 'http://127.0.0.1:8001'
    with Running(stub_service(chat=False), origins=[page]) as server:
        asked = {'Access-Control-Request-Method': 'POST', 'Access-Control-Request-Headers': 'content-type'}
        status, headers, _ = call(server, '/v1/completions', method='OPTIONS', origin=page, **asked)
        assert (status, headers['access-control-allow-origin']) == (200, page)
        status, headers, _ = call(server, '/v1/completions', COMPLETION, origin=page)
        assert (status, headers['access-control-allow-origin']) == (200, page)
        assert call(server, '/v1/completions', COMPLETION, origin='http://evil.example')[0] == 403


def test_keys_are_needed_for_all_but_the_state_and_the_page():
    import openai

    keys = Keys(['first', 'second'])
    with Running(stub_service(chat=False), keys=keys) as server:
        for header in (
            {},
            {'authorization': 'Bearer third'},
            {'authorization': 'Basic first'},
            {'authorization': 'Bearer'},
        ):
            for path, body in {
                '/v1/completions': COMPLETION,
                '/v1/models': None,
                '/metrics': None,
                '/nothing': None,
            }.items():
                status, headers, answer = call(server, path, body, **header)
                assert (status, headers['www-authenticate']) == (401, 'Bearer')
                assert answer['error']['type'] == 'authentication_error'
        for key in ('first', 'second'):
            assert call(server, '/v1/completions', COMPLETION, authorization=f'Bearer {key}')[0] == 200
        assert call(server, '/v1/models', authorization='Bearer first', host='proxy.example')[0] == 200
        assert call(server, '/health')[0] == call(server, '/ready')[0] == 200
        stranger = openai.OpenAI(base_url=f'{server.url}/v1', api_key='wrong', max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_a_large_body_is_refused_before_it_is_read():
    with Running(stub_service(limits=Limits(body=1000), chat=False)) as server:
        status, _, answer = call(server, '/v1/completions', {'prompt': 'x' * 2000})
        assert (status, answer['error']['message']) == (413, 'the body is larger than 1,000 bytes')
        parts = [b'x' * 100] * 11  # without its length in a header, and not ended; a refusal closes the connection
        assert b' 413 ' in chunked(server, parts)
        assert call(server, '/v1/completions', COMPLETION)[0] == 200


def chunked(server, parts):
    with socket.create_connection(('127.0.0.1', server.port), 60) as opened:
        opened.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n')
        for part in parts:
            opened.sendall(f'{len(part):x}\r\n'.encode() + part + b'\r\n')
        return opened.recv(1000)


def test_metrics_count_requests_by_their_status():
    with Running(stub_service(chat=False)) as server:
        call(server, '/v1/completions', COMPLETION | {'max_tokens': 7})
        call(server, '/v1/completions', {})
        call(server, '/v1/completions')
        for status, count in {'200': 1, '400': 1, '405': 1, '500': 0}.items():
            assert metric(server, 'pretrax_requests_total', endpoint='/v1/completions', status=status) == count
        assert metric(server, 'pretrax_generated_tokens_total', model='stub') == 7
        assert metric(server, 'pretrax_slots') == 4
        assert metric(server, 'pretrax_weights_step') == 100
        assert metric(server, 'pretrax_time_to_first_token_seconds_count') == 1
        assert metric(server, 'pretrax_request_seconds_count') == 1


def test_the_page_is_json_free_of_other_servers(server):
    status, headers, text = call(server, '/')
    if status == 404:
        pytest.skip('no page')
    assert "default-src 'self'" in headers['content-security-policy']
    assert '<html' in text


def test_errors_are_json_even_if_the_server_is_at_fault(monkeypatch):
    service = stub_service(chat=False)
    monkeypatch.setattr(service.models['stub'], 'tokenizer', None)
    with Running(service) as server:
        status, _, answer = call(server, '/v1/completions', COMPLETION)
    assert (status, answer['error']['type']) == (500, 'server_error')
    assert json.dumps(answer)
