"""Requests that do not end as planned: clients go away, engines fail or hang, time runs out, queues are full."""

import asyncio
import contextlib
import json
import threading

import pytest

from pretrax.serve.access import Keys
from pretrax.serve.generation import Generation
from pretrax.serve.limits import Limits
from serve.calls import PATIENCE, call, connection, eventually, metric
from serve.stub_engine import Running, stub_service

LONG = {'prompt': 'x' * 40, 'max_tokens': 400, 'stream': True}


@contextlib.contextmanager
def running(**options):
    limits = options.pop('limits', Limits())
    with Running(stub_service(limits=limits, chat=False, **({'max_length': 4096} | options))) as server:
        try:
            yield server
        finally:
            server.engine.blocked.set()
            server.engine.seconds = 0


@pytest.fixture
def slow():
    """A server whose blocks take 10 ms; it has two slots."""
    with running(slots=2, seconds=0.01) as server:
        yield server


def is_free(server):
    """Whether the engine and the server have no requests, as `/metrics` shows it."""
    return not any(metric(server, f'pretrax_{name}') for name in ('busy_slots', 'waiting', 'used_pages', 'admitted'))


def test_a_client_that_is_killed_in_the_middle_of_a_stream_frees_its_slot(slow):
    with connection(slow, '/v1/completions', LONG) as opened:
        assert b'text_completion' in opened.recv(10_000) + opened.recv(10_000)
        assert metric(slow, 'pretrax_busy_slots') == 1
        began = slow.engine.steps
    eventually(lambda: is_free(slow))
    assert slow.engine.steps - began < 60  # the answer takes 100
    eventually(lambda: metric(slow, 'pretrax_requests_total', status='aborted') == 1)


@pytest.mark.parametrize('stream', [False, True])
def test_a_client_that_is_killed_while_its_prompt_is_read_frees_its_slot(slow, stream):
    with connection(slow, '/v1/completions', {'prompt': 'x' * 4000, 'max_tokens': 1, 'stream': stream}):
        eventually(lambda: metric(slow, 'pretrax_busy_slots') == 1)
    eventually(lambda: is_free(slow))
    assert metric(slow, 'pretrax_generated_tokens_total') == 0
    eventually(lambda: metric(slow, 'pretrax_requests_total', status='aborted') == 1)


@pytest.mark.parametrize('path', ['/v1/completions', '/v1/embeddings'])
def test_a_client_that_is_killed_in_the_queue_leaves_it(slow, path):
    slow.engine.blocked.clear()
    body = {'input': 'x'} if 'embed' in path else {'prompt': 'x'}
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connection(slow, '/v1/completions', LONG))
        eventually(lambda: metric(slow, 'pretrax_admitted') == 2)
        with connection(slow, path, body):
            eventually(lambda: metric(slow, 'pretrax_admitted') == 3)
        eventually(lambda: metric(slow, 'pretrax_admitted') == 2)
        slow.engine.blocked.set()
    eventually(lambda: is_free(slow))


def test_a_stop_string_frees_the_slot(slow):
    asked = {'prompt': 'x', 'temperature': 0, 'max_tokens': 4000, 'stop': 'on the', 'n': 2}
    assert [choice['text'] for choice in call(slow, '/v1/completions', asked)[2]['choices']] == ['the cat sat '] * 2
    eventually(lambda: is_free(slow))
    assert slow.engine.steps < 20


def test_an_engine_that_raises_answers_500_and_hangs_no_client(capfd):
    with running(slots=1, seconds=0.01) as server, connection(server, '/v1/completions', LONG) as opened:
        assert b'data: ' in opened.recv(10_000) + opened.recv(10_000)
        waiting = threading.Thread(target=lambda: answers.append(call(server, '/v1/completions', {'prompt': 'x'})))
        answers = []
        waiting.start()
        eventually(lambda: metric(server, 'pretrax_waiting') == 1)
        server.engine.problem = RuntimeError('the device is lost')
        waiting.join()
        assert answers[0][0] == 500
        assert answers[0][2]['error']['code'] == 'engine_failed'
        events = rest(opened)
        assert json.loads(events[-1].removeprefix('data: '))['error']['code'] == 'engine_failed'
        assert call(server, '/v1/completions', {'prompt': 'x'})[0] == 500
        assert call(server, '/health')[0] == call(server, '/ready')[0] == 503
        assert metric(server, 'pretrax_requests_total', status='failed') == 1
    assert 'RuntimeError: the device is lost' in capfd.readouterr().err


def test_an_engine_that_raises_when_a_request_is_added_hangs_no_client(capfd, monkeypatch):
    def add(request):
        raise RuntimeError('the device is lost')

    with running(slots=1, limits=Limits(seconds=PATIENCE)) as server:
        monkeypatch.setattr(server.engine, 'add', add)
        status, _, answer = call(server, '/v1/completions', {'prompt': 'x'})
        assert (status, answer['error']['code']) == (500, 'engine_failed')
    assert 'RuntimeError: the device is lost' in capfd.readouterr().err


def rest(opened):
    """The events that are still to come on a socket."""
    content = b''
    while part := opened.recv(10_000):
        content += part
        if content.endswith(b'0\r\n\r\n'):
            break
    return [line for line in content.decode().splitlines() if line.startswith('data: ')]


def test_the_client_library_raises_an_error_in_the_middle_of_a_stream():
    import openai

    with running(slots=1, seconds=0.01) as server, openai.OpenAI(base_url=f'{server.url}/v1', api_key='-') as client:
        stream = client.completions.create(model='stub', **LONG)
        next(stream)
        server.engine.problem = RuntimeError('the device is lost')
        with pytest.raises(openai.APIError, match='the engine failed'):
            list(stream)


def test_an_engine_that_hangs_is_not_healthy():
    with running(limits=Limits(silence=0.05)) as server:
        assert call(server, '/health')[0] == 200
        server.engine.blocked.clear()
        with connection(server, '/v1/completions', LONG):
            eventually(lambda: call(server, '/health')[0] == 503)
            assert 'the engine of stub has not advanced for' in call(server, '/ready')[2]['error']['message']
            server.engine.blocked.set()
            eventually(lambda: call(server, '/health')[0] == 200)


@pytest.mark.parametrize('stream', [False, True])
def test_an_answer_that_takes_too_long_is_an_error(stream):
    with running(limits=Limits(seconds=0.2), seconds=0.02) as server:
        if stream:
            with connection(server, '/v1/completions', LONG) as opened:
                events = rest(opened)
            assert len(events) > 1
            error = json.loads(events[-1].removeprefix('data: '))['error']
        else:
            status, _, answer = call(server, '/v1/completions', LONG | {'stream': False})
            assert status == 504
            error = answer['error']
        assert (error['code'], error['message']) == (
            'time_limit',
            'the answer took longer than 0.2 s; ask for fewer tokens',
        )
        eventually(lambda: is_free(server))


def test_a_full_queue_answers_429_and_nobody_starves():
    """40 clients at once, room for 8: 32 are refused while the engine stands still, and all are served in the end."""
    import openai

    with running(limits=Limits(queue=6), slots=2) as server:
        server.engine.blocked.clear()
        refused = []

        async def ask(client, number):
            while True:
                try:
                    return await client.completions.create(model='stub', prompt=f'{number:03}', max_tokens=20, seed=1)
                except openai.RateLimitError as error:
                    refused.append((error.code, int(error.response.headers['retry-after']) >= 1))
                if len(refused) >= 32:
                    server.engine.blocked.set()
                await asyncio.sleep(0.1)

        async def flood():
            async with openai.AsyncOpenAI(base_url=f'{server.url}/v1', api_key='-', max_retries=0) as client:
                return await asyncio.gather(*(ask(client, number) for number in range(40)))

        answers = asyncio.run(asyncio.wait_for(flood(), PATIENCE))
        assert all(answer.usage.completion_tokens == 20 for answer in answers)
        assert metric(server, 'pretrax_requests_total', status='429') == len(refused) >= 32
        assert set(refused) == {('queue_full', True)}
        assert is_free(server)


def test_a_client_is_served_although_others_flood(slow):
    """Requests are served in the order in which they came."""
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connection(slow, '/v1/completions', {'prompt': 'x', 'max_tokens': 40}))
        eventually(lambda: metric(slow, 'pretrax_admitted') == 20)
        before = slow.engine.steps
        assert call(slow, '/v1/completions', {'prompt': 'y', 'max_tokens': 4})[0] == 200
        assert slow.engine.steps - before <= 10 * 10 + 5


@pytest.mark.parametrize('path', ['/v1/completions', '/v1/embeddings'])
def test_a_request_of_many_texts_does_not_stand_before_others(slow, path):
    """1,000 texts take the places of two, which is the number of slots."""
    slow.engine.blocked.clear()
    texts = [[1]] * 1000
    body = {'input': texts} if 'embed' in path else {'prompt': texts, 'max_tokens': 4}
    with connection(slow, path, body):
        eventually(lambda: metric(slow, 'pretrax_admitted') == 2)
        with connection(slow, '/v1/completions', {'prompt': 'x', 'max_tokens': 4}) as other:
            eventually(lambda: metric(slow, 'pretrax_admitted') == 3)
            before = slow.engine.steps
            slow.engine.blocked.set()
            assert b'200 OK' in other.recv(10_000)
            assert slow.engine.steps - before < 10  # of 500
    eventually(lambda: is_free(slow))  # and the texts that were not begun are forgotten
    assert metric(slow, 'pretrax_prompt_tokens_total') < 1000


def test_a_client_may_ask_so_often_in_a_minute():
    with Running(stub_service(limits=Limits(rate=3), chat=False), keys=Keys(['a', 'b'])) as server:
        codes = [call(server, '/v1/completions', {'prompt': 'x'}, authorization='Bearer a') for _ in range(4)]
        assert [status for status, _, _ in codes] == [200, 200, 200, 429]
        assert 15 <= int(codes[-1][1]['retry-after']) <= 21
        assert codes[-1][2]['error']['code'] == 'rate_limit_exceeded'
        assert call(server, '/v1/completions', {'prompt': 'x'}, authorization='Bearer b')[0] == 200
        assert call(server, '/v1/models', authorization='Bearer a')[0] == 200


def test_32_clients_at_once_get_what_each_gets_alone(server):
    import openai

    async def ask(client, number, stream):
        asked = {'model': 'stub', 'prompt': f'prompt {number}', 'max_tokens': 40, 'seed': number}
        answer = await client.completions.create(**asked, stream=stream)
        return ''.join([event.choices[0].text async for event in answer]) if stream else answer.choices[0].text

    async def everybody():
        async with openai.AsyncOpenAI(base_url=f'{server.url}/v1', api_key='-', max_retries=0) as client:
            together = await asyncio.gather(*(ask(client, number, number % 2 == 0) for number in range(32)))
            alone = [await ask(client, number, False) for number in range(32)]
        return together, alone

    together, alone = asyncio.run(everybody())
    assert together == alone
    assert len(set(together)) > 8


def test_weights_are_swapped_between_blocks_without_losing_a_request(slow):
    model = slow.service.models['stub']
    with connection(slow, '/v1/completions', LONG | {'max_tokens': 200}) as opened:
        assert b'step-100' in opened.recv(10_000) + opened.recv(10_000)
        model.swap(lambda: setattr(slow.engine, 'weights_step', 200), 200, created=5)
        events = [json.loads(line.removeprefix('data: ')) for line in rest(opened)[:-1]]
    assert events[-1]['system_fingerprint'] == 'step-200'
    assert events[-1]['choices'][0]['finish_reason'] == 'length'
    about = call(slow, '/v1/models')[2]['data'][0]
    assert (about['step'], about['created']) == (200, 5)


def test_an_answer_that_two_checkpoints_wrote_names_both(slow):
    answers = []
    body = {'prompt': 'x', 'max_tokens': 200}
    asking = threading.Thread(target=lambda: answers.append(call(slow, '/v1/completions', body)))
    asking.start()
    eventually(lambda: metric(slow, 'pretrax_generated_tokens_total') > 8)
    slow.service.models['stub'].swap(lambda: setattr(slow.engine, 'weights_step', 200), 200, created=5)
    asking.join()
    assert answers[0][2]['system_fingerprint'] == 'step-100..200'


def test_a_swap_that_fails_leaves_the_engine_as_it_was(slow, capfd):
    def fail():
        raise OSError('the checkpoint is gone')

    slow.service.models['stub'].swap(fail, 200, created=5)
    answer = call(slow, '/v1/completions', {'prompt': 'x'})
    assert (answer[0], answer[2]['system_fingerprint']) == (200, 'step-100')
    assert call(slow, '/v1/models')[2]['data'][0]['step'] == 100
    assert 'the checkpoint is gone' in capfd.readouterr().err


def test_the_last_tokens_of_all_streams_come_before_the_end_of_any(monkeypatch):
    """One block has eight answers. The engine starts the first one alone, and the others together."""
    order, send = [], Generation._send

    async def noted(self, channel, events):
        order.append('end' if events[-1:] == [None] else 'news')
        await send(self, channel, events)

    monkeypatch.setattr(Generation, '_send', noted)
    with running(slots=8) as server, contextlib.ExitStack() as stack:
        server.engine.blocked.clear()
        body = {'prompt': 'x', 'max_tokens': 3, 'stream': True}
        for _ in range(8):
            stack.enter_context(connection(server, '/v1/completions', body))
        eventually(lambda: metric(server, 'pretrax_admitted') == 8)
        server.engine.blocked.set()
        eventually(lambda: order.count('end') == 8)
    assert order[-7:] == ['end'] * 7
