import pytest

from serve.stub_engine import Running, stub_service


@pytest.fixture(scope='session')
def server():
    """A server with a stub engine, for tests that leave it as it was."""
    with Running(stub_service(max_length=512, slots=8)) as running:
        yield running


@pytest.fixture(scope='session')
def client(server):
    from openai import OpenAI

    with OpenAI(base_url=f'{server.url}/v1', api_key='none', max_retries=0) as client:
        yield client
