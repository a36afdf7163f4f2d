"""Bodies of requests."""

import socket

import pytest

from pretrax.serve.limits import Limits
from serve.calls import call
from serve.stub_engine import Running, stub_service

COMPLETION = {'prompt': 'x', 'max_tokens': 1}


HELLO = [{'role': 'user', 'content': 'hello'}]
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
