"""Who may use a server."""

import pytest

from pretrax.serve.access import Keys
from serve.calls import call
from serve.stub_engine import Running, stub_service

COMPLETION = {'prompt': 'x', 'max_tokens': 1}


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
