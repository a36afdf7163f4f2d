"""Runs the requests of one HTTP request, and answers at once or as a stream of server-sent events."""

import asyncio
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from pretrax.errors import UserError
from pretrax.infer.request import Request, Update
from pretrax.serve.answers import Choice, Delta
from pretrax.serve.engine_thread import EngineFailedError, Job
from pretrax.serve.errors import ApiError
from pretrax.serve.service import ServedModel, Service

_STREAM = [
    (b'content-type', b'text/event-stream; charset=utf-8'),
    (b'cache-control', b'no-cache'),
    (b'x-accel-buffering', b'no'),  # nginx passes every event on at once
]
_json = json.JSONEncoder(ensure_ascii=False, separators=(',', ':')).encode
OUTCOME = 'outcome'  # key of the scope: how an answer ended, if not as its status says


class Format:
    """The JSON of an answer. A subclass says how a choice looks.

    Args:
        prefix: prefix of the answer's id.
        kind: the `object` of the answer.
        logprobs: whether choices have log probabilities.
        with_usage: the events of a stream have a `usage`, which is null but in the last.
    """

    def __init__(self, model: ServedModel, prefix: str, kind: str, logprobs: bool, with_usage: bool):
        self._tokenizer, self._logprobs, self.with_usage = model.tokenizer, logprobs, with_usage
        own = f'{prefix}-{uuid.uuid4().hex}'
        self._about = {'id': own, 'object': kind, 'created': int(time.time()), 'model': model.name}
        self._no_usage = {'usage': None} if with_usage else {}

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice."""
        raise NotImplementedError

    def delta(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """News of a choice."""
        raise NotImplementedError

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The first event of a choice, before its text."""
        del choice
        return None

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """An answer that is not streamed."""
        steps = sorted({step for choice in choices for step in choice.steps})
        content = {'choices': [self.choice(choice) for choice in choices], 'usage': usage_of(choices)}
        return self._about | {'system_fingerprint': fingerprint(steps)} | content

    def event(self, choice: Choice, content: dict[str, Any]) -> dict[str, Any]:
        """An event with news of a choice."""
        steps = fingerprint(choice.steps[-1:])
        return self._about | {'system_fingerprint': steps, 'choices': [content]} | self._no_usage

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last event."""
        return self._about | {'choices': [], 'usage': usage_of(choices)}


class DisconnectedError(Exception):
    """The client has closed the connection."""


@dataclasses.dataclass
class Generation:
    """An answer that the engine is about to write; an ASGI application.

    Args:
        requests: one for each of `choices`.
        stream: whether to answer as a stream.
    """

    service: Service
    model: ServedModel
    requests: Sequence[Request]
    choices: Sequence[Choice]
    format: Format
    stream: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._began = time.monotonic()
        self._times = [0.0] * len(self.requests)  # of the newest update of each choice
        self._started = False
        self._inter_token = self.service.metrics.inter_token.labels(self.model.name)
        try:
            await unless_disconnected(receive, self._answer(scope, send))
        except DisconnectedError:
            scope[OUTCOME] = 'aborted'

    async def _answer(self, scope: Scope, send: Send) -> None:
        try:
            async with running(self.service, self.model, self.requests) as job:
                await (self._write_stream if self.stream else self._write_whole)(job, send)
        except ApiError as error:
            if not self._started:
                raise
            scope[OUTCOME] = 'failed'
            async with asyncio.timeout(10):  # a client that reads nothing does not read this either
                await send({'type': 'http.response.body', 'body': b'data: ' + error.body + b'\n\n'})

    async def _write_whole(self, job: Job, send: Send) -> None:
        async for news in job:
            for index, update in news:
                self._take(job, index, update)
        content = _json(self.format.whole(self.choices)).encode()
        headers = [(b'content-type', b'application/json'), (b'content-length', str(len(content)).encode())]
        await send({'type': 'http.response.start', 'status': 200, 'headers': headers})
        await send({'type': 'http.response.body', 'body': content})

    async def _write_stream(self, job: Job, send: Send) -> None:
        self._started = True
        await send({'type': 'http.response.start', 'status': 200, 'headers': _STREAM})
        await self._send(send, [event for choice in self.choices if (event := self.format.opening(choice))])
        async for news in job:
            events = []
            for index, update in news:
                delta = self._take(job, index, update)
                if delta.text or delta.tokens or delta.finish:
                    choice = self.choices[index]
                    events.append(self.format.event(choice, self.format.delta(choice, delta)))
            await self._send(send, events)
        await asyncio.sleep(0)  # the tokens of other streams come before the end of this one
        last = [self.format.usage(self.choices)] if self.format.with_usage else []
        await self._send(send, [*last, None])

    async def _send(self, send: Send, events: list[Any]) -> None:
        texts = ['[DONE]' if event is None else _json(event) for event in events]
        if texts:
            content = ''.join(f'data: {text}\n\n' for text in texts).encode()
            await send({'type': 'http.response.body', 'body': content, 'more_body': events[-1] is not None})

    def _take(self, job: Job, index: int, update: Update) -> Delta:
        delta = self.choices[index].take(update)
        if delta.finish and not update.finish:  # a stop string
            self.model.thread.cancel(job, index)
        now = time.monotonic()
        if update.tokens:
            before, self._times[index] = self._times[index], now
            if before:
                seconds = (now - before) / len(update.tokens)
                self._inter_token.observe(seconds)
            else:
                self.service.metrics.first_token.labels(self.model.name).observe(now - self._began)
        return delta


@contextlib.asynccontextmanager
async def running(service: Service, model: ServedModel, requests: Sequence[Request]) -> AsyncIterator[Job]:
    """Runs requests for as long as the context lasts.

    Raises:
        ApiError: the queue is full, the engine refuses a request or fails, or the time is up.
    """
    count, limit = len(requests), service.limits.seconds
    entered = model.admission.enter(count)
    job = model.thread.submit(requests, model.admission.slots)
    try:
        async with asyncio.timeout(limit):
            await job.accepted()
            yield job
    except UserError as error:
        raise ApiError(400, str(error)) from None
    except EngineFailedError:
        raise ApiError(500, 'the engine failed; the server has to be restarted', code='engine_failed') from None
    except TimeoutError:
        message = f'the answer took longer than {limit:g} s; ask for fewer tokens'
        raise ApiError(504, message, code='time_limit') from None
    finally:
        model.thread.cancel(job)
        model.admission.leave(count, entered)
        service.metrics.duration.labels(model.name).observe(time.monotonic() - entered)


async def unless_disconnected[T](receive: Receive, work: Awaitable[T]) -> T:
    """Awaits work, and cancels it if the client closes the connection. Raises DisconnectedError if the client did."""

    async def disconnected() -> None:
        while (await receive())['type'] != 'http.disconnect':
            pass

    task = asyncio.ensure_future(work)
    tasks = task, asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise DisconnectedError
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def fingerprint(steps: Sequence[int]) -> str | None:
    """Which training step wrote an answer: step-1200, or step-1200..1300 if the weights were swapped meanwhile."""
    if not steps:
        return None
    return f'step-{steps[0]}' + (f'..{steps[-1]}' if len(steps) > 1 else '')


def usage_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """Token counts; the prompt of several choices counts once."""
    prompts = {choice.prompt_number: choice for choice in reversed(choices)}.values()
    prompt = sum(choice.prompt_tokens for choice in prompts)
    answer = sum(choice.answer_tokens for choice in choices)
    return {
        'prompt_tokens': prompt,
        'completion_tokens': answer,
        'total_tokens': prompt + answer,
        'prompt_tokens_details': {'cached_tokens': sum(choice.cached_tokens for choice in prompts)},
    }
