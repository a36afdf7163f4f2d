"""What the endpoints share: the models that are served, the limits, the metrics."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from pretrax.infer.answers import begun
from pretrax.infer.request import Pooling
from pretrax.serve.bodies import RawText, parse
from pretrax.serve.engine_thread import EngineThread
from pretrax.serve.errors import ApiError
from pretrax.serve.limits import Admission, Limits
from pretrax.serve.metrics import Metrics

if TYPE_CHECKING:
    from pretrax.data.chat.templates import ChatTemplate
    from pretrax.data.tokenizers.tokenizer import Tokenizer

_LONG = 2_000  # characters; longer texts are tokenized in a thread, so that other clients do not wait


@dataclasses.dataclass(eq=False)
class ServedModel:
    """A model with its engine."""

    name: str  # by which clients choose it
    thread: EngineThread
    tokenizer: 'Tokenizer'
    admission: Admission
    template: 'ChatTemplate | None' = (
        None  # encodes the messages of a chat; None: a base model, which only continues text
    )
    step: int | None = None  # training step of the newest weights
    created: int = 0  # when they were written, in seconds since 1970
    pooling: Pooling = 'mean'  # pooling of embeddings, unless a request says otherwise
    normalize: bool = True  # whether embeddings have length 1
    end_tokens: tuple[int, ...] = ()  # end an answer, besides the tokenizer's end-of-text token
    _long_texts: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(2), init=False)

    def swap(self, function: Callable[[], None], step: int, created: int) -> None:
        """Runs a function that gives the engine newer weights between two blocks."""

        def between_blocks() -> None:
            function()
            self.step, self.created = step, created

        self.thread.between_blocks(between_blocks)

    async def in_thread[T](self, function: Callable[..., T], text: Sequence[Any]) -> T:
        """The function of a text or of tokens; long ones run in a thread, a few at a time: others need threads too."""
        if len(text) <= _LONG:
            return function(text)
        async with self._long_texts:
            return await asyncio.to_thread(function, text)

    async def encode(self, text: str, how: RawText) -> list[int]:
        """The tokens of a text, with those that begin a text."""
        ids = await self.in_thread(
            self.tokenizer.encode_with_names if how.parse_special else self.tokenizer.encode, text
        )
        if not how.add_special_tokens:
            return ids
        return begun(self.tokenizer, ids) if ids else list(self.tokenizer.begin_of_text)

    async def tokens(self, text: str | list[int], param: str, how: RawText) -> tuple[int, ...]:
        """The tokens of a prompt, or these tokens; an empty text is the end of the text before.

        Raises:
            ApiError: there are no tokens, one is unknown, or the text is longer than the model can read.
        """
        if isinstance(text, str):
            self.check_size(len(text.encode()), param)
            ids, end = await self.encode(text, how), self.tokenizer.end_of_text
            if not ids and end is None:
                raise ApiError(400, 'the prompt is empty', param=param, code='invalid_value')
            return tuple(ids) if ids or end is None else (end,)
        if not text:
            raise ApiError(400, f'{param}: the list of tokens is empty', param=param, code='invalid_value')
        self.check_tokens(text, param)
        return tuple(text)

    def check_size(self, size: int, param: str) -> None:
        """Raises ApiError 400 if a text of this many bytes has more tokens than the model reads, whatever it says."""
        most, per_token = self.thread.max_length, self.tokenizer.max_bytes_per_token
        if per_token is not None and size > most * per_token:
            message = (
                f'the prompt has {size:,} bytes, which are at least {-(-size // per_token):,} tokens; '
                f'this model reads at most {most:,} tokens'
            )
            raise ApiError(400, message, param=param, code='context_length_exceeded')

    def check_tokens(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError 400 if a token is outside the vocabulary."""
        for token in ids:
            if not 0 <= token < self.thread.vocab_size:
                message = f'{param}: token {token} is outside the vocabulary of {self.thread.vocab_size:,} tokens'
                raise ApiError(400, message, param=param, code='invalid_value')

    def stop_ids(self, ignore_eos: bool, more: Sequence[int], end_of_turn: Sequence[int] = ()) -> tuple[int, ...]:
        """The tokens that end an answer: those of a request, and unless they are ignored, those of the model."""
        end = self.tokenizer.end_of_text
        ends = () if ignore_eos else (*(() if end is None else (end,)), *self.end_tokens, *end_of_turn)
        self.check_tokens(more, 'stop_token_ids')
        return tuple(dict.fromkeys((*ends, *more)))

    def hidden(self, skip_special_tokens: bool) -> frozenset[int]:
        """The tokens that have no text in an answer."""
        return frozenset(self.tokenizer.special_tokens.values() if skip_special_tokens else ())

    def room(self, prompt: Sequence[int], asked: int | None, param: str, default: int | None = None) -> int:
        """How many tokens the answer to a prompt may have.

        Raises:
            ApiError: the prompt and the tokens that were asked for are longer than the model can read.
        """
        left = self.thread.max_length - len(prompt)
        if asked is not None and asked <= left:
            return asked
        if asked is None and left > 0:
            return left if default is None else min(default, left)
        answer = f', and max_tokens is {asked:,}: {len(prompt) + asked:,} together' if asked else ''
        most = f'this model reads at most {self.thread.max_length:,} tokens'
        message = f'the prompt has {len(prompt):,} tokens{answer}; {most}'
        raise ApiError(400, message, param=param, code='context_length_exceeded')


@dataclasses.dataclass(eq=False)
class Service:
    """A running server. `draining`: it finishes what runs and takes nothing new."""

    models: dict[str, ServedModel]
    limits: Limits
    metrics: Metrics
    draining: bool = False
    running: int = 0  # HTTP requests, without those that only ask how the server is

    def __post_init__(self) -> None:
        self.metrics.watch(
            lambda: [(m.name, m.thread.status, m.step, m.admission.admitted) for m in self.models.values()]
        )

    def model(self, name: str | None) -> ServedModel:
        """The model with a name; None: the first. Raises ApiError 404."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            message = f'model: there is no {name!r}; this server has {", ".join(self.models)}'
            raise ApiError(404, message, param='model', code='model_not_found')
        return self.models[name]

    async def read[B: BaseModel](self, request: Request, kind: type[B]) -> B:
        """The body of a request. Raises ApiError."""
        content, limit = bytearray(), self.limits.body
        declared = request.headers.get('content-length', '')
        if not (declared.isdecimal() and int(declared) > limit):
            try:
                async with asyncio.timeout(self.limits.body_seconds):
                    async for part in request.stream():
                        content += part
                        if len(content) > limit:
                            break
                    else:
                        return parse(kind, bytes(content))
            except TimeoutError:
                raise ApiError(408, f'the body did not arrive within {self.limits.body_seconds:g} s') from None
            except ClientDisconnect:
                raise ApiError(400, 'the client closed the connection before the end of the body') from None
        headers = {'connection': 'close'}
        raise ApiError(413, f'the body is larger than {limit:,} bytes', code='body_too_large', headers=headers)


def service_of(request: Request) -> Service:
    return request.app.state.service
