"""A real process that serves: how it starts, drains and stops."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from pretrax.errors import UserError
from pretrax.serve.listen import bind
from serve.calls import call, connection, eventually, metric

PROGRAM = Path(__file__).with_name('stub_engine.py')
LONG = {'prompt': 'x', 'max_tokens': 300, 'stream': True}


@contextlib.contextmanager
def process(*options):
    command = [sys.executable, str(PROGRAM), '--no-chat', '--seconds', '0.01', *options]
    environment = {'PYTHONPATH': str(PROGRAM.parents[1])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as started:
        try:
            url = started.stdout.readline().strip()
            yield SimpleNamespace(url=url, port=int(url.rpartition(':')[2]), process=started)
        finally:
            started.kill()


def test_sigterm_finishes_what_runs_and_refuses_what_is_new():
    with process() as server, connection(server, '/v1/completions', LONG) as opened:
        answers = []
        whole = threading.Thread(
            target=lambda: answers.append(call(server, '/v1/completions', LONG | {'stream': False}))
        )
        whole.start()
        eventually(lambda: metric(server, 'pretrax_busy_slots') == 2)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: call(server, '/ready')[0] == 503)
        status, headers, answer = call(server, '/v1/completions', LONG)
        assert (status, answer['error']['code'], headers['retry-after']) == (503, 'draining', '5')
        assert call(server, '/health')[0] == 200
        whole.join()
        assert answers[0][2]['usage']['completion_tokens'] == 300
        content = b''
        while part := opened.recv(10_000):
            content += part
        assert b'data: [DONE]' in content
        assert server.process.wait(60) == 0
        assert 'stopping after 2 running requests' in server.process.stderr.read()


def test_another_sigterm_ends_it_now_and_a_copy_of_the_first_does_not():
    with process() as server, connection(server, '/v1/completions', LONG | {'max_tokens': 2000}):
        eventually(lambda: metric(server, 'pretrax_busy_slots') == 1)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: call(server, '/ready')[0] == 503)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(1.1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 128 + signal.SIGTERM


def test_a_client_that_reads_no_answer_does_not_keep_a_server_that_stops():
    with process() as server, connection(server, '/detokenize', {'tokens': [0] * 1_000_000}):
        eventually(lambda: metric(server, 'pretrax_requests_total', endpoint='/detokenize', status='200') == 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_stops_at_once(number):
    with process() as server, socket.create_connection(('127.0.0.1', server.port)):
        server.process.send_signal(number)
        assert server.process.wait(60) == 0
        assert server.process.stderr.read() == ''


def test_a_port_in_use_is_a_mistake_of_the_user():
    with bind('127.0.0.1', 0) as first:
        first.listen()
        with pytest.raises(UserError, match='Address already in use\n  choose another port'):
            bind('127.0.0.1', first.getsockname()[1])
    for host in ('no..name', 'no.such.name.invalid'):
        with pytest.raises(UserError, match=f'^--host {host}: no such name or address$'):
            bind(host, 0)
    with pytest.raises(UserError, match='--host 203'):
        bind('203.0.113.1', 0)
