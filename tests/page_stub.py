"""A small server with OpenAI's API that writes what a prompt asks for, to test the page in a browser."""

import asyncio
import contextlib
import json
import math
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

PAGE = Path(__file__).parents[1] / 'src' / 'pretrax' / 'serve' / 'page'
SECURITY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


class Stub:
    """What the server is to answer, and what it was asked.

    Attributes:
        answers: texts of the next answers, as lists of tokens; the last one is used again and again.
        gate: closed, an answer stops after its first token until it is opened.
        doors: closed, no models are named until they are opened.
        asked: bodies of the requests.
        cancelled: set when a client closed the connection during an answer.
    """

    def __init__(
        self, *, chat: bool = False, key: str = '', name: str = 'tiny', origin: str = '', max_length: int = 2048
    ):
        self.chat, self.key, self.name, self.origin, self.max_length = chat, key, name, origin, max_length
        self.answers: list[list[str]] = [[' and', ' they', ' lived', ' happily']]
        self.gate = threading.Event()
        self.gate.set()
        self.doors = threading.Event()
        self.doors.set()
        self.asked: list[dict[str, Any]] = []
        self.cancelled = threading.Event()
        self.error: dict[str, Any] | None = None

    def application(self) -> Starlette:
        routes = [
            Route('/v1/models', self.models),
            Route('/v1/completions', self.complete, methods=['POST', 'OPTIONS']),
            Route('/v1/chat/completions', self.complete, methods=['POST', 'OPTIONS']),
            Route('/tokenize', self.tokenize, methods=['POST']),
            Mount('/', StaticFiles(directory=PAGE, packages=[('pretrax', 'page_kit')], html=True)),
        ]
        application = Starlette(routes=routes)

        async def with_headers(scope, receive, send):
            async def send_with_headers(message):
                if message['type'] == 'http.response.start':
                    allowed = f"{SECURITY}; connect-src 'self' {self.origin}" if self.origin else SECURITY
                    message['headers'] += [
                        (b'content-security-policy', allowed.encode()),
                        (b'access-control-allow-origin', self.origin.encode()),
                        (b'access-control-allow-headers', b'content-type, authorization'),
                    ]
                await send(message)

            await application(scope, receive, send_with_headers)

        return with_headers  # type: ignore[return-value]

    def _refusal(self, request) -> JSONResponse | None:
        if self.key and request.headers.get('authorization') != f'Bearer {self.key}':
            return JSONResponse({'error': {'message': 'wrong API key', 'code': 'invalid_api_key'}}, 401)
        return None

    async def models(self, request):
        while not self.doors.is_set():
            await asyncio.sleep(0.005)
        about = {
            'id': self.name,
            'object': 'model',
            'created': 0,
            'owned_by': 'pretrax',
            'max_model_len': self.max_length,
            'step': 12000,
            'chat': self.chat,
        }
        return self._refusal(request) or JSONResponse({'object': 'list', 'data': [about]})

    async def tokenize(self, request):
        tokens = list(_content(await request.json()).encode())
        return JSONResponse({'count': len(tokens), 'max_model_len': self.max_length, 'tokens': tokens})

    async def complete(self, request):
        if request.method == 'OPTIONS':
            return JSONResponse({})
        if refusal := self._refusal(request):
            return refusal
        body = await request.json()
        self.asked.append(body)
        if len(_content(body)) + body['max_tokens'] > self.max_length:
            return JSONResponse({'error': {'message': 'too long', 'code': 'context_length_exceeded'}}, 400)
        if self.error:
            error, self.error = self.error, None
            return JSONResponse({'error': error}, error['status'])
        tokens = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return StreamingResponse(self._stream(body, tokens), media_type='text/event-stream')

    async def _stream(self, body: dict[str, Any], tokens: list[str]) -> AsyncIterator[bytes]:
        finished = False
        try:
            for content in self._events(body, tokens):
                cut = max((at for at, byte in enumerate(content) if byte > 127), default=0)
                if cut:  # a character may come in two packets
                    yield content[:cut]
                    await asyncio.sleep(0.01)
                yield content[cut:]
                while not self.gate.is_set():
                    await asyncio.sleep(0.005)
            finished = True
        finally:
            if not finished:
                self.cancelled.set()

    def _events(self, body: dict[str, Any], tokens: list[str]) -> Iterator[bytes]:
        chat, offset = 'messages' in body, 0
        about = {'id': '1', 'object': 'x', 'created': 0, 'model': body['model'], 'system_fingerprint': 'step-12000'}

        def event(content: dict[str, Any]) -> bytes:
            return b'data: ' + json.dumps(about | content, ensure_ascii=False).encode() + b'\n\n'

        def choice(text: str, logprobs: Any, finish: str | None) -> bytes:
            said = {'delta': {'content': text} if text else {}} if chat else {'text': text}
            return event({'choices': [{'index': 0, 'logprobs': logprobs, 'finish_reason': finish, **said}]})

        for number, token in enumerate(tokens):
            # A token with a bar is torn: what is before the bar is no whole character, so its text comes with the next
            # one.
            torn = [part.strip('\0') for part in token.split('|')] if '|' in token else [token]
            names = ['\ufffd'] * len(torn) if len(torn) > 1 else torn
            text = ''.join(torn)
            likely = [0.62, 0.97, 0.31, 0.12, 0.02][number % 5]
            others = [(' dog', 0.2), (' cat', 0.1), ('\n', 0.05), (' \u202eabc', 0.01)]
            logprobs: Any = None
            if body.get('logprobs') and chat:
                logprobs = {'content': [
                    {'token': name, 'bytes': list(name.encode()), 'logprob': math.log(likely),
                     'top_logprobs': [{'token': o, 'bytes': [], 'logprob': math.log(p)} for o, p in [(name, likely),
                     *others]]}
                    for name in names
                ]}  # fmt: skip
            elif body.get('logprobs'):
                logprobs = {
                    'tokens': names, 'token_logprobs': [math.log(likely)] * len(names),
                    'top_logprobs': [{o: math.log(p) for o, p in [(name, likely), *others]} for name in names],
                    'text_offset': [offset] * len(names),
                }  # fmt: skip
            offset += len(text)
            yield choice(text, logprobs, None)
        yield choice('', None, 'length')
        yield event({'choices': [], 'usage': {'prompt_tokens': 3, 'completion_tokens': len(tokens)}})
        yield b'data: [DONE]\n\n'


def _content(body: dict[str, Any]) -> Any:
    """What a model reads, with a token for each byte."""
    if 'messages' in body:
        return ''.join(message['content'] for message in body['messages'])
    return body['prompt']


@contextlib.contextmanager
def running(stub: Stub, port: int = 0) -> Iterator[str]:
    """Serves a stub from a thread, and yields its address."""
    opened = socket.create_server(('127.0.0.1', port))
    config = uvicorn.Config(stub.application(), log_level='error', lifespan='off', timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=[[opened]])
    thread.start()
    try:
        yield f'http://127.0.0.1:{opened.getsockname()[1]}'
    finally:
        server.should_exit = True
        stub.gate.set()
        stub.doors.set()
        thread.join()
        opened.close()


if __name__ == '__main__':  # a process that a test kills; with --halt it stops writing after the first token
    stub = Stub()
    if '--halt' in sys.argv:
        stub.gate.clear()
    with running(stub, int(sys.argv[1])):
        print('ready', flush=True)
        threading.Event().wait()
