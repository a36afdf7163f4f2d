"""Clients that do not speak HTTP as they should, on real sockets: they cost little and keep nobody out."""

import asyncio
import contextlib
import resource
import socket
import sys
import threading
from types import SimpleNamespace

import pytest

from live_server import watching
from pretrax.serve.access import Keys, network
from pretrax.serve.connections import ConnectionLimits, limits_for
from serve.calls import PATIENCE, call, connection, eventually, metric
from serve.stub_engine import Running, stub_service

LONG = {'prompt': 'x', 'max_tokens': 4000, 'stream': True}
COMPLETION = {'prompt': 'x', 'max_tokens': 4}


@contextlib.contextmanager
def running(keys=None, **limits):
    service = stub_service(chat=False, max_length=4096, slots=2, seconds=0.005)
    with Running(service, ConnectionLimits(**limits), keys=keys) as server:
        yield server


@contextlib.contextmanager
def half_open(server, count, content=b'GET /health HTTP/1.1\r\nhost: local'):
    """Connections that began a request."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(stack.enter_context(socket.create_connection(('127.0.0.1', server.port), PATIENCE)))
            opened[-1].sendall(content)
        yield opened


def refused(server, reason):
    return metric(server, 'pretrax_refused_total', reason=reason)


def rest(opened):
    """All that is still to come on a socket, until the server closes it."""
    content = b''
    with contextlib.suppress(ConnectionResetError):
        while part := opened.recv(1 << 16):
            content += part
    return content


@pytest.mark.parametrize('parser', ['with httptools', 'without'])
def test_a_head_without_end_is_refused_when_it_is_too_large(monkeypatch, parser):
    """Whether or not httptools is installed, which uvicorn takes where it finds it, and which has no limit."""
    if parser == 'with httptools':
        monkeypatch.setitem(sys.modules, 'httptools', SimpleNamespace())
    with running(head_bytes=8192) as server:
        with half_open(server, 1, b'GET /health HTTP/1.1\r\nx: ') as [opened]:
            with contextlib.suppress(ConnectionError):
                for _ in range(200):
                    opened.sendall(b'y' * 65_536)
            assert rest(opened)[:12] in (b'HTTP/1.1 431', b'')  # the client may be cut before it reads
        many = b''.join(b'x%d: y\r\n' % number for number in range(5000))
        with half_open(server, 1, b'GET /health HTTP/1.1\r\n' + many) as [opened]:
            rest(opened)
        assert refused(server, 'head_size') == 2
        assert call(server, '/health', cookie='z' * 7000)[0] == 200


def test_a_head_that_does_not_arrive_is_given_up():
    with running(head_seconds=0.2) as server:
        with half_open(server, 1) as [slow], half_open(server, 1, b'') as [silent]:
            assert rest(slow).startswith(b'HTTP/1.1 408')
            assert rest(silent) == b''
        with half_open(server, 1, b'GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /hea') as [second]:
            answers = rest(second)
            assert (answers.count(b'HTTP/1.1 200'), answers.count(b'HTTP/1.1 408')) == (1, 1)
        body = b'GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n'  # which nobody reads
        with half_open(server, 1, body) as [dripping], contextlib.suppress(ConnectionError):
            while refused(server, 'head_time') < 4:
                dripping.sendall(b'x')
        assert refused(server, 'head_time') == 4
        assert (
            call(server, '/v1/completions', COMPLETION | {'max_tokens': 400})[0] == 200
        )  # takes longer than a head may


def test_half_open_connections_keep_nobody_out():
    with running(total=20, per_address=20) as server, half_open(server, 60):
        for _ in range(30):
            assert call(server, '/v1/completions', COMPLETION)[0] == 200
        assert refused(server, 'replaced') >= 40
        assert refused(server, 'total') == refused(server, 'address') == 0


def test_connections_that_are_busy_are_not_replaced():
    """One address has 3 connections, and none is free for a fourth while all stream."""
    with running(total=100, per_address=3) as server, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(connection(server, '/v1/completions', LONG)) for _ in range(3)]
        eventually(lambda: server.service.running == 3)
        with socket.create_connection(('127.0.0.1', server.port), PATIENCE) as fourth:
            assert fourth.recv(1000).startswith(b'HTTP/1.1 503')
        with socket.create_connection(('127.0.0.1', server.port), PATIENCE, ('127.0.0.2', 0)) as other:
            other.sendall(b'GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n')
            assert other.recv(1000).startswith(b'HTTP/1.1 200')
        streams[0].close()
        eventually(lambda: server.service.running == 2)
        assert refused(server, 'address') == 1
    assert limits_for(72).per_address >= 72


def test_a_client_that_does_not_read_its_answer_is_cut_off():
    with running(stalled_seconds=0.2) as server:
        server.engine.seconds = 0
        with socket.socket() as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            opened.connect(('127.0.0.1', server.port))
            body = b'{"tokens": [' + b'256,' * 1_000_000 + b'65]}'  # 13 characters each
            opened.sendall(
                b'POST /detokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n' % len(body) + body
            )
            eventually(lambda: refused(server, 'stalled') == 1)


@pytest.mark.slow
def test_a_client_that_does_not_read_its_stream_frees_its_slot():
    with running(stalled_seconds=0.2) as server:
        server.engine.seconds = 0
        body = LONG | {'logprobs': 20, 'n': 8}
        with connection(server, '/v1/completions', body):  # much more than the system keeps for a client
            eventually(lambda: refused(server, 'stalled') == 1)
            eventually(lambda: metric(server, 'pretrax_admitted') == 0)


@pytest.mark.parametrize(
    'content',
    [
        b'\x16\x03\x01\x02\x00\x01\x00', b'hello\r\n\r\n', b'GET / HTTP/1.1\r\nhost\r\n\r\n',
        b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n',
        b'POST /nothing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\nzz\r\n',
        b'POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n',
        b'GET / HTTP/1.1\r\nhost: localhost\r\n\r\n\x00\x00\r\n\r\n',
    ],
)  # fmt: skip
def test_what_is_no_http_is_refused_without_a_traceback(content, capfd):
    with running() as server:
        with half_open(server, 1, content) as [opened]:
            assert b'500' not in rest(opened)
        assert refused(server, 'malformed') == 1
    written = capfd.readouterr().err
    assert 'Traceback' not in written
    assert 'refused: a request that is not HTTP, from 127.0.0.1' in written


@pytest.mark.parametrize('keys', [None, Keys(['right'])])
@pytest.mark.parametrize(
    'header',
    ['origin: http://[', 'origin: http://[::1', 'origin: \x80', 'host: [', 'host: http://[', 'host: a]b',
    'authorization: Bearer \xff'],
)  # fmt: skip
def test_a_strange_header_is_never_an_error_of_the_server(keys, header):
    with running(keys) as server:
        for path in ('/nothing', '/health/', '/v1/models', '/', '/../x', '/%ff'):
            host = '' if header.startswith('host') else 'host: localhost\r\n'
            request = f'GET {path} HTTP/1.1\r\n{host}{header}\r\nconnection: close\r\n\r\n'.encode('latin-1')
            with half_open(server, 1, request) as [opened]:
                status = int(rest(opened).split()[1])
            assert status in (200, 400, 401, 403, 404), (path, status)


def test_the_live_page_has_the_same_limits(tmp_path, capfd):
    with watching(tmp_path) as url:
        server = SimpleNamespace(url=url, port=int(url.rpartition(':')[2]))
        with half_open(server, 1, b'GET / HTTP/1.1\r\nx: ' + b'y' * 40_000) as [opened]:
            rest(opened)
        with half_open(server, 1, b'GET / HTTP/1.1\r\nhost: localhost\r\norigin: http://[\r\n\r\n') as [opened]:
            assert opened.recv(1000).startswith(b'HTTP/1.1 403')
        with half_open(server, limits_for(64).per_address + 10):
            assert call(server, '/')[0] == 200
    written = capfd.readouterr().out
    assert 'refused: a request whose head is too large, from 127.0.0.1' in written
    assert ' replaced, 1 head_size\n' in written  # when it stops


def test_limits_leave_files_to_the_program(monkeypatch):
    assert limits_for(72) == ConnectionLimits(total=1024, per_address=256)
    assert limits_for(5000).per_address == 5000 or resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 20_000
    monkeypatch.setattr(resource, 'getrlimit', lambda what: (400, 4000))
    assert limits_for(72) == ConnectionLimits(total=200, per_address=100)


def test_addresses_of_one_network_count_as_one():
    assert network('10.0.0.1') != network('10.0.0.2')
    assert network('2001:db8::1') == network('2001:db8::ffff:1') != network('2001:db8:0:1::1')
    assert network('::ffff:10.0.0.1') == '10.0.0.1'
    assert network('fe80::1%eth0') == network('fe80::2')


def guess(server, key):
    return call(server, '/v1/models', authorization=f'Bearer {key}')


def test_wrong_keys_are_slowed_and_lock_nobody_out():
    """32 clients guess for as long as the others take: a flood gets a few answers in each delay."""
    with running(Keys(['right', 'other'], seconds=0.5)) as server:
        assert guess(server, 'right')[0] == 200
        for number in range(10):  # typing errors cost nothing
            assert guess(server, f'wrong {number}')[0] == 401
        flood, answers = threading.Event(), []

        def attack():
            while not flood.is_set():
                answers.append(guess(server, f'guess {len(answers)}')[0])

        threads = [threading.Thread(target=attack) for _ in range(32)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(server.keys._waiting) == 1)
        for _ in range(50):
            assert guess(server, 'right')[0] == 200  # at once: this address has used it
        assert guess(server, 'other')[0] == 200  # after the delay
        flood.set()
        for thread in threads:
            thread.join()
        assert set(answers) == {401}
        assert call(server, '/v1/models')[0] == 401  # no key is no guess, and is answered at once
    assert server.service.metrics.refusals.counts['wrong_key'] == len(answers) + 10


def test_keys_are_not_looked_at_while_too_many_wait():
    keys, service = Keys(['right'], seconds=60), stub_service(chat=False)
    refusals = service.metrics.refusals

    async def send(key, address='10.0.0.1'):
        return await keys.client({'authorization': f'Bearer {key}'}, address, refusals)

    async def statuses(*requests):
        return [getattr(one, 'status', 200) for one in await asyncio.gather(*requests, return_exceptions=True)]

    async def attack():
        assert await send('right', '10.0.0.9')
        assert await statuses(*(send(f'{n}') for n in range(10))) == [401] * 10
        waiting = [asyncio.create_task(send(f'wrong {n}')) for n in range(64)]
        await asyncio.sleep(0)
        assert await statuses(send('right'), send('wrong')) == [429, 429]
        assert await statuses(send('right', '10.0.0.2'), send('right', '10.0.0.9')) == [200, 200]
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(attack())
    assert (refusals.counts['wrong_key'], refusals.counts['wrong_keys']) == (10, 2)


def test_only_a_proxy_that_is_trusted_names_addresses():
    for proxies, count in (((), 1), (('127.0.0.1',), 3)):
        with running(Keys(['right'], seconds=0), proxies=proxies) as server:
            for n in range(3):
                call(server, '/v1/models', authorization='Bearer x', x_forwarded_for=f'10.0.0.{n}')
            assert len(server.keys._wrong._left) == count
