"""Real bucket servers on this machine, behind a proxy that injects faults.

S3 is `moto`, Google Cloud Storage is `gcp-storage-emulator`; each runs in a process of its own. The emulator lacks
generation preconditions and the header with an object's generation, which the proxy adds as the documentation of Cloud
Storage describes them (https://cloud.google.com/storage/docs/request-preconditions).
"""

import contextlib
import http.client
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from side_by_side import free_port

BUCKET = 'pretrax-test'
COMMANDS = {
    's3': [sys.executable, '-m', 'moto.server', '-H', '127.0.0.1', '-p', '{port}'],
    'gs': [sys.executable, '-m', 'gcp_storage_emulator', 'start', '--host', '127.0.0.1', '--port', '{port}',
    '--in-memory',
           '--default-bucket', BUCKET],
}  # fmt: skip


@dataclass
class Fault:
    """What happens to the next `times` requests of a method whose path matches the regular expression `match`.

    Attributes:
        status: the server answers with this status.
        cut_after: the connection is cut after this number of bytes of the answer.
        delay: seconds before the request is passed on.
        lose_answer: the request is carried out, and the connection is cut before the answer.
        act: called with the method and the path before the request is passed on.
    """

    method: str = ''
    match: str = ''
    times: float = 1
    status: int = 0
    cut_after: int | None = None
    delay: float = 0
    lose_answer: bool = False
    act: Callable[[str, str], None] | None = None


@dataclass
class BucketServer:
    """A server with one empty bucket, reached through a proxy.

    Attributes:
        url: 's3://pretrax-test' or 'gs://pretrax-test'.
        environment: the variables that a client needs.
        faults: applied to requests, the first that matches.
        requests: method and decoded path of every request so far.
        request: called before each request is passed on; if it raises an exception, the answer is 403.
    """

    scheme: str
    backend: int
    proxy: '_Proxy'
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    request: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        return f'{self.scheme}://{BUCKET}'

    @property
    def environment(self) -> dict[str, str]:
        address = f'http://127.0.0.1:{self.proxy.server_port}'
        common = {'PRETRAX_STORAGE_RETRY_SECONDS': '3', 'AWS_EC2_METADATA_DISABLED': 'true'}
        if self.scheme == 'gs':
            return {**common, 'STORAGE_EMULATOR_HOST': address}
        keys = {'AWS_ACCESS_KEY_ID': 'test', 'AWS_SECRET_ACCESS_KEY': 'test'}
        return {**common, **keys, 'AWS_ENDPOINT_URL': address, 'AWS_REGION': 'us-east-1'}

    def fault(self, **what: Any) -> Fault:
        """Injects a fault; see `Fault`."""
        self.faults.append(Fault(**what))
        return self.faults[-1]

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """The server cannot be reached: connections are cut without an answer."""
        fault = self.fault(times=float('inf'), cut_after=0)
        try:
            yield
        finally:
            self.faults.remove(fault)

    def keys(self, prefix: str = '') -> list[str]:
        """The keys in the bucket, asked for without the proxy."""
        return [key for key in _listed(self.scheme, self.backend) if key.startswith(prefix)]

    def content(self, key: str) -> bytes:
        """The content of an object, asked for without the proxy."""
        quoted = urllib.parse.quote(key, safe='' if self.scheme == 'gs' else '/')
        path = f'/storage/v1/b/{BUCKET}/o/{quoted}?alt=media' if self.scheme == 'gs' else f'/{BUCKET}/{quoted}'
        status, _, body = _ask(self.backend, 'GET', path)
        assert status == 200, (status, key)
        return body

    def put(self, key: str, content: bytes) -> None:
        """Writes an object without the proxy."""
        if self.scheme == 'gs':
            name = urllib.parse.quote(key, safe='')
            path, method = f'/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}', 'POST'
        else:
            path, method = f'/{BUCKET}/{urllib.parse.quote(key)}', 'PUT'
        status, _, _ = _ask(self.backend, method, path, content)
        assert status == 200, (status, key)

    def delete(self, key: str) -> None:
        """Deletes an object without the proxy."""
        quoted = urllib.parse.quote(key, safe='' if self.scheme == 'gs' else '/')
        path = f'/storage/v1/b/{BUCKET}/o/{quoted}' if self.scheme == 'gs' else f'/{BUCKET}/{quoted}'
        status, _, answer = _ask(self.backend, 'DELETE', path)
        assert status in (200, 204), (status, answer)

    def reset(self) -> None:
        """Empties the bucket and forgets faults and requests."""
        self.request = lambda: None
        self.faults.clear()
        self.requests.clear()
        for key in self.keys():
            self.delete(key)

    def fail_often(self, seed: int, every: int = 5) -> None:
        """Injects a fault into about one of `every` requests: 503, a cut answer or upload, a lost answer, a delay."""
        rng, counter, write = random.Random(seed), itertools.count(), 'PUT' if self.scheme == 's3' else 'POST'
        kinds: list[dict[str, Any]] = [
            {'status': 503},
            {'status': 503, 'times': 3},
            {'cut_after': 0},
            {'cut_after': 20, 'method': 'GET'},
            {'lose_answer': True, 'method': write},
            {'delay': 0.1},
        ]

        def request() -> None:
            if next(counter) % every == 0 and sum(fault.times for fault in self.faults if fault.act is None) < 3:
                for spent in [fault for fault in self.faults if fault.times <= 0]:
                    with contextlib.suppress(ValueError):  # another thread has removed it
                        self.faults.remove(spent)
                self.fault(**rng.choice(kinds))

        self.request = request

    @contextlib.contextmanager
    def another_proxy(self) -> Iterator['BucketServer']:
        """The same bucket through a proxy of its own, with its own faults and requests."""
        with _serving(self.scheme, self.backend, self.proxy.lock) as server:
            yield server


@contextlib.contextmanager
def bucket_server(scheme: str) -> Iterator[BucketServer]:
    """Starts the server of a scheme, 's3' or 'gs', with its proxy."""
    backend = free_port()
    command = [part.format(port=backend) for part in COMMANDS[scheme]]
    environment = {key: value for key, value in os.environ.items() if not key.startswith('PYTHON')}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        _wait_until_up(process, backend)
        if scheme == 's3':
            _ask(backend, 'PUT', f'/{BUCKET}')
        with _serving(scheme, backend, threading.Lock()) as server:
            yield server
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _serving(scheme: str, backend: int, lock: threading.Lock) -> Iterator[BucketServer]:
    proxy = _Proxy(('127.0.0.1', 0), _Handler, lock)
    server = proxy.server = BucketServer(scheme, backend, proxy)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        proxy.shutdown()
        proxy.server_close()


def _wait_until_up(process: subprocess.Popen, port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, 'the bucket server did not start'
        with contextlib.suppress(OSError):
            _ask(port, 'GET', '/')
            return
        time.sleep(0.05)
    raise AssertionError('the bucket server did not start within a minute')


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    server: BucketServer

    def __init__(self, address: tuple[str, int], handler: type, lock: threading.Lock):
        super().__init__(address, handler)
        self.lock = lock  # makes a precondition and its write atomic

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that is cut is no news here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True  # or each body waits up to 40 ms until its headers are acknowledged

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        server = self.server.server
        path = urllib.parse.unquote(self.path)
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        server.requests.append((self.command, path))
        try:
            server.request()
        except BaseException:
            self._answer(403, {}, b'injected')
            return
        fault = self._fault(server, path)
        if fault is not None:
            if fault.act is not None:
                fault.act(self.command, path)
            time.sleep(fault.delay)
            if fault.status:
                self._answer(fault.status, {}, b'injected')
                return
            if fault.cut_after == 0:
                self._cut()
                return
        status, headers, answer = self._pass_on(server, body)
        if fault is not None and fault.lose_answer:
            self._cut()
            return
        self._answer(status, headers, answer, fault.cut_after if fault is not None else None)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def _fault(self, server: BucketServer, path: str) -> Fault | None:
        for fault in server.faults:
            if fault.times > 0 and fault.method in ('', self.command) and re.search(fault.match, path):
                fault.times -= 1
                return fault
        return None

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, server: BucketServer, body: bytes) -> tuple[int, dict[str, str], bytes]:
        headers = {key: value for key, value in self.headers.items() if key.lower() not in ('host', 'expect')}
        if server.scheme == 's3':
            headers['Host'] = self.headers['Host']  # part of the signature
            with self.server.lock if self.command == 'PUT' else contextlib.nullcontext():
                return _ask(server.backend, self.command, self.path, body, headers)
        with self.server.lock:
            wanted = re.search(r'[?&]ifGenerationMatch=(\d+)', self.path)
            if wanted and int(wanted[1]) != _generation(server.backend, self.path):
                return 412, {'Content-Type': 'application/json'}, b'{"error": {"code": 412}}'
            last = re.fullmatch(r'bytes=-(\d+)', self.headers.get('Range', ''))  # the emulator ignores such a range
            if last:
                headers = {key: value for key, value in headers.items() if key.lower() != 'range'}
            status, found, answer = _ask(server.backend, self.command, self.path, body, headers)
            if last and status == 200:
                start = max(0, len(answer) - int(last[1]))
                found['Content-Range'] = f'bytes {start}-{len(answer) - 1}/{len(answer)}'
                status, answer = 206, answer[start:]
            if self.command == 'GET' and status < 300 and 'alt=media' in self.path:
                found['x-goog-generation'] = str(_generation(server.backend, self.path))
            return status, found, answer

    def _answer(self, status: int, headers: dict[str, str], content: bytes, cut_after: int | None = None) -> None:
        self.send_response(status)
        for key, value in headers.items():
            if key.lower() not in ('content-length', 'transfer-encoding', 'connection', 'date', 'server'):
                self.send_header(key, value)
        length = headers.get('Content-Length', len(content)) if self.command == 'HEAD' else len(content)
        self.send_header('Content-Length', str(length))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content if cut_after is None else content[:cut_after])
        if cut_after is not None:
            self.wfile.flush()
            self._cut()


def _generation(port: int, path: str) -> int:
    """The generation of the object that a request of the JSON API names; 0: there is none."""
    parsed = urllib.parse.urlsplit(path)
    name = urllib.parse.parse_qs(parsed.query).get('name', [''])[0]
    quoted = urllib.parse.quote(name, safe='') if '/upload/' in parsed.path else parsed.path.rpartition('/o/')[2]
    status, _, content = _ask(port, 'GET', f'/storage/v1/b/{BUCKET}/o/{quoted}')
    return int(json.loads(content)['generation']) if status == 200 else 0


def _listed(scheme: str, port: int) -> list[str]:
    if scheme == 'gs':
        _, _, content = _ask(port, 'GET', f'/storage/v1/b/{BUCKET}/o?maxResults=100000')
        return sorted(item['name'] for item in json.loads(content).get('items', []))
    keys, more = [], ''
    while True:
        _, _, content = _ask(port, 'GET', f'/{BUCKET}?list-type=2&max-keys=1000{more}')
        keys += [urllib.parse.unquote(key) for key in re.findall(r'<Key>(.*?)</Key>', content.decode())]
        token = re.search(r'<NextContinuationToken>(.*?)<', content.decode())
        if token is None:
            return sorted(keys)
        more = f'&continuation-token={urllib.parse.quote(token[1])}'


def _ask(
    port: int, method: str, path: str, body: bytes = b'', headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    signed = {
        'Authorization': 'AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request'
    }  # moto checks no more
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=60)
    try:
        connection.request(method, path, body or None, headers or signed)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()
