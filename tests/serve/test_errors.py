"""Errors as JSON."""

import json

import pytest

from serve.calls import call
from serve.stub_engine import Running, stub_service

COMPLETION = {'prompt': 'x', 'max_tokens': 1}


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


def test_errors_are_json_even_if_the_server_is_at_fault(monkeypatch):
    service = stub_service(chat=False)
    monkeypatch.setattr(service.models['stub'], 'tokenizer', None)
    with Running(service) as server:
        status, _, answer = call(server, '/v1/completions', COMPLETION)
    assert (status, answer['error']['type']) == (500, 'server_error')
    assert json.dumps(answer)
