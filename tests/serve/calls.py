"""Requests to a server without a client library, and the state of the server as `/metrics` shows it."""

import contextlib
import json
import socket
import time
import urllib.error
import urllib.request

PATIENCE = 60  # seconds for what takes a moment


def call(server, path, body=None, method=None, **headers):
    """(status, headers, JSON or text) of an answer. `body`: bytes, or what is sent as JSON."""
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace('_', '-'): value for name, value in headers.items()}
    request = urllib.request.Request(server.url + path, content, named, method=method)
    try:
        answer = urllib.request.urlopen(request, timeout=PATIENCE)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        text = answer.read()
        kind = answer.headers['content-type']
        return answer.status, answer.headers, json.loads(text) if kind == 'application/json' else text.decode()


def metric(server, name, **labels):
    """The value of a metric, the sum over the labels that are not given."""
    total = 0.0
    for line in call(server, '/metrics')[2].splitlines():
        key, _, value = line.rpartition(' ')
        if key.partition('{')[0] == name and all(f'{label}="{text}"' in key for label, text in labels.items()):
            total += float(value)
    return total


def eventually(condition):
    """Waits until a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, 'it did not happen'
        time.sleep(0.005)


@contextlib.contextmanager
def connection(server, path, body, **headers):
    """A socket on which a request was sent; leaving the context closes it, as a client that is killed does."""
    content = json.dumps(body).encode()
    lines = [f'POST {path} HTTP/1.1', 'host: localhost', f'content-length: {len(content)}']
    lines += [f'{name}: {value}' for name, value in headers.items()]
    with socket.create_connection(('127.0.0.1', server.port), PATIENCE) as opened:
        opened.sendall('\r\n'.join([*lines, '', '']).encode() + content)
        yield opened
