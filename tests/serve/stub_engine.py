"""An engine without a model, for tests of the server: its tokens are a function of the prompt, the seed and the choice.

Run as a program, it serves itself: `python tests/serve/stub_engine.py --port 8000`.
"""

import argparse
import asyncio
import dataclasses
import sys
import threading
import time
import zlib
from collections import deque
from pathlib import Path

import numpy as np

from pretrax.data.tokenizers.tokenizer_files import bytes_tokenizer
from pretrax.errors import UserError
from pretrax.infer.request import POOLINGS, EngineStatus, Token, Update
from pretrax.serve.access import read_keys
from pretrax.serve.application import make_application
from pretrax.serve.engine_thread import EngineThread
from pretrax.serve.limits import Admission, Limits, Refusals
from pretrax.serve.listen import bind, serve
from pretrax.serve.metrics import Metrics
from pretrax.serve.service import ServedModel, Service

TEXT = 'the cat sat on the mat, é漢 🎉\n'.encode()
WIDTH = 8  # of an embedding


class StubEngine:
    """Repeats a text of bytes, each answer from another place; ids from 256 on end it.

    Attributes:
        seconds: how long a block takes.
        problem: raised by the next block.
        blocked: while it is cleared, blocks wait.
    """

    def __init__(self, *, slots=4, block=4, chunk=32, max_length=256, vocab_size=257, seconds=0.0, timed=False):
        self.max_length, self.vocab_size, self.dtype = max_length, vocab_size, None
        self.seconds, self.problem, self.steps = seconds, None, 0
        self.blocked = threading.Event()
        self.blocked.set()
        self.script = None  # the tokens of every answer
        self.weights_step = 100
        self._slots, self._block, self._chunk, self._timed = slots, block, chunk, timed
        self._waiting, self._running = deque(), {}
        self._next = 0
        self._counts = dict.fromkeys(('prompt_tokens', 'cached_prompt_tokens', 'generated_tokens'), 0)

    @property
    def idle(self):
        return not self._waiting and not self._running

    def check(self, request):
        if not request.prompt:
            raise UserError('the prompt is empty')
        if len(request.prompt) + request.max_tokens > self.max_length:
            raise UserError('too long')

    def add(self, request):
        self.check(request)
        self._next += 1
        self._waiting.append((self._next, request))
        return self._next

    def cancel(self, number):
        self._running.pop(number, None)
        self._waiting = deque(one for one in self._waiting if one[0] != number)

    def step(self):
        self.blocked.wait()
        time.sleep(self.seconds)
        if self.problem:
            raise self.problem
        self.steps += 1
        while self._waiting and len(self._running) < self._slots:
            number, request = self._waiting.popleft()
            self._running[number] = [request, 0, 0]
        updates = []
        for number, state in list(self._running.items()):
            request, read, written = state
            if read < len(request.prompt):
                state[1] = min(read + self._chunk, len(request.prompt))
                self._counts['prompt_tokens'] += state[1] - read
                if state[1] < len(request.prompt):
                    continue
            update = self._written(number, request, written)
            state[2] += len(update.tokens)
            self._counts['generated_tokens'] += len(update.tokens)
            if update.finish:
                del self._running[number]
            updates.append(update)
        if self._timed:
            now = int(time.monotonic() * 1e6)
            updates = [dataclasses.replace(update, weights_step=now) for update in updates]
        return updates

    def _written(self, number, request, written):
        tokens, finish = [], None
        answer = answer_to(request) if self.script is None else self.script
        while len(tokens) < self._block and finish is None:
            position = written + len(tokens)
            if position >= request.max_tokens:
                finish = 'length'
                break
            token = answer[position % len(answer)]
            tokens.append(token_of(token, request.logprobs))
            if token in request.stop_ids:
                finish = 'stop'
            elif position + 1 == request.max_tokens:
                finish = 'length'
        prompt = ()
        if written == 0 and request.prompt_logprobs is not None:
            first, *rest = request.prompt
            prompt = (Token(first), *(token_of(token, request.prompt_logprobs) for token in rest))
        embedding = None
        if request.embedding:
            states = np.outer(request.prompt, np.arange(1.0, WIDTH + 1)).astype(np.float32)  # the token in every unit
            embedding = POOLINGS[request.embedding](states)
        return Update(
            number=number, tokens=tuple(tokens), finish=finish, weights_step=self.weights_step, prompt=prompt,
            embedding=embedding,
        )  # fmt: skip

    def status(self):
        busy = len(self._running)
        return EngineStatus(
            slots=self._slots, busy_slots=busy, waiting=len(self._waiting), pages=10 * self._slots,
            used_pages=10 * busy, cached_pages=0, blocks=self.steps, **self._counts, proposed_tokens=0,
            accepted_tokens=0, compilations=0,
        )  # fmt: skip


def answer_to(request):
    """The bytes that the engine repeats for a request."""
    key = repr((request.prompt, request.sampling.seed, request.choice)).encode()
    start = 0 if request.sampling.temperature == 0 else zlib.crc32(key) % len(TEXT)
    return TEXT[start:] + TEXT[:start]


def token_of(token, logprobs):
    if logprobs is None:
        return Token(token)
    likeliest = [(token, -0.5), *((other, -1.0 - other / 100) for other in range(32, 64) if other != token)]
    return Token(token, -0.5, tuple(likeliest[:logprobs]))


class StubTemplate:
    """Each message with its role before it; the byte 1 ends an answer."""

    end_of_turn = (1,)
    source = '{% for message in messages %}...{% endfor %}'

    def check_variables(self, variables):
        if strange := variables.keys() - {'mood'}:
            raise UserError(f'the template reads no {strange}')

    def prompt(self, messages, variables):
        if not messages[0]['content']:
            raise UserError('the template refuses an empty message')
        text = ''.join(f'{message["role"]}: {message["content"]}\n' for message in messages)
        return [f'{text}assistant{variables.get("mood", "")}: ']


def report(text):
    print(text, file=sys.stderr, flush=True)


def stub_service(*, limits=None, chat=True, **options):
    """A service with a base model `stub`, and a model `stub-chat` with a template."""
    limits, models = limits or Limits(), {}
    for name in ('stub', 'stub-chat') if chat else ('stub',):
        engine = StubEngine(**options)
        admission = Admission(engine.status().slots, limits.queue)
        template = StubTemplate() if name == 'stub-chat' else None
        thread = EngineThread(engine, report)
        thread.stub = engine
        models[name] = ServedModel(name, thread, bytes_tokenizer(), admission, template, step=100, created=1)
    return Service(models, limits, Metrics(Refusals(report)))


class Running:
    """A server in a thread of this process, on a free port.

    Args:
        service: what it serves.
        limits: of connections.
        access: who may use it, see `make_application`.
    """

    def __init__(self, service, limits=None, **access):
        self.service, self.keys = service, access.get('keys')
        self.engine = service.models['stub'].thread.stub
        self.engines = {name: model.thread.stub for name, model in service.models.items()}
        opened = bind('127.0.0.1', 0)
        self.port = opened.getsockname()[1]
        self.url = f'http://127.0.0.1:{self.port}'
        self.stop = None
        listening = threading.Event()

        async def run():
            self.stop = asyncio.Event()
            self._loop = asyncio.get_running_loop()
            application = make_application(service, **access)
            await serve(application, service, opened, report, self.stop, listening.set, limits)

        self._thread = threading.Thread(target=asyncio.run, args=[run()])
        self._thread.start()
        assert listening.wait(30)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self.stop.set)
        self._thread.join()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--port', type=int, default=0)
    parser.add_argument('--slots', type=int, default=4)
    parser.add_argument('--seconds', type=float, default=0.02, help='that a block takes')
    parser.add_argument('--max-length', type=int, default=2048)
    parser.add_argument('--block', type=int, default=4)
    parser.add_argument('--timed', action='store_true', help='the step of the weights is the time in microseconds')
    parser.add_argument('--api-key-file', type=Path)
    parser.add_argument('--no-chat', dest='chat', action='store_false', help='only the base model')
    options = vars(parser.parse_args())
    opened, key_file = bind('127.0.0.1', options.pop('port')), options.pop('api_key_file')
    service = stub_service(**options)
    application = make_application(service, keys=key_file and read_keys(key_file))
    url = f'http://127.0.0.1:{opened.getsockname()[1]}'
    asyncio.run(serve(application, service, opened, report, listening=lambda: print(url, flush=True)))


if __name__ == '__main__':
    main()
