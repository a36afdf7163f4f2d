"""`/v1/embeddings`."""

import base64

import numpy as np
import pytest

from serve.calls import call

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
