"""The JSON that clients send. A field that is unknown or not supported is an error, never ignored."""

import functools
import random
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from pretrax.infer.request import MAX_BIASED, MAX_LOGPROBS, Pooling, Sampling
from pretrax.serve.errors import ApiError, invalid

MAX_STOPS = 16
# Fields of OpenAI's interface that this server has not, and the reasons.
_NO_TOOLS = 'this server calls no tools'
UNSUPPORTED = {
    'suffix': 'this server only continues text; it does not insert text before a suffix',
    'best_of': 'this server does not rank answers; ask for n answers with logprobs and choose one',
    'tools': _NO_TOOLS,
    'tool_choice': _NO_TOOLS,
    'functions': _NO_TOOLS,
    'function_call': _NO_TOOLS,
    'response_format': 'this server does not constrain the format of an answer',
    'modalities': 'this server answers with text alone',
    'audio': 'this server answers with text alone',
    'encoding_format': 'expected "float" or "base64"',
}
Number = Annotated[float, Field(allow_inf_nan=False)]
_LONGEST_ID = 19  # digits of a token


def _nullable(default: Any) -> BeforeValidator:
    """null is the default, as in OpenAI's interface."""
    return BeforeValidator(lambda value: default if value is None else value)


_Flag = Annotated[bool, _nullable(default=False)]


class _Body(BaseModel):
    model_config = ConfigDict(extra='forbid', strict=True)

    model: str | None = None
    user: str | None = None  # names the client's user; not used


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra='forbid', strict=True)

    include_usage: _Flag = False


class _Generation(_Body):
    """What completions and chats have in common."""

    n: Annotated[int, Field(ge=1), _nullable(default=1)] = 1
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: _Flag = False

    @field_validator('stop')
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        texts = [stop] if isinstance(stop, str) else stop or []
        if len(texts) > MAX_STOPS:
            raise ValueError(f'{len(texts)} strings; expected at most {MAX_STOPS}')
        if '' in texts:
            raise ValueError('an empty string stops nothing')
        return stop

    @field_validator('logit_bias')
    @classmethod
    def _check_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        if bias and len(bias) > MAX_BIASED:
            raise ValueError(f'{len(bias)} tokens; expected at most {MAX_BIASED}')
        for token in bias or ():
            if not (token.isascii() and token.isdecimal() and len(token) <= _LONGEST_ID):
                raise ValueError(f'{token[:40]!r} is not a token id')
        return bias

    @model_validator(mode='after')
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError('stream_options is for streams: set "stream": true')
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """Whether the last event of a stream is to say how many tokens there were."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, vocab_size: int) -> Sampling:
        """How to choose tokens; a seed that is not given is random.

        Raises:
            ApiError: a token of logit_bias is outside the vocabulary.
        """
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        for token in bias:
            if token >= vocab_size:
                message = f'logit_bias: token {token} is outside the vocabulary of {vocab_size:,} tokens'
                raise ApiError(400, message, param='logit_bias', code='invalid_value')
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=bias,
            seed=random.getrandbits(31) if self.seed is None else self.seed % 2**32,
        )


class CompletionBody(_Generation):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: _Flag = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: None = None
    best_of: None = None

    @field_validator('prompt', mode='wrap')
    @classmethod
    def _check_prompt(cls, value: Any, check: Any) -> Any:
        return _check_texts(value, check)

    @model_validator(mode='after')
    def _check_max_tokens(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError('max_tokens: 0 asks for nothing; set "echo": true for the log probabilities of the prompt')
        return self


class TextPart(BaseModel):
    model_config = ConfigDict(extra='forbid', strict=True)

    type: Literal['text']
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra='forbid', strict=True)

    role: Literal['system', 'developer', 'user', 'assistant']
    content: str | list[TextPart]
    name: str | None = None

    @field_validator('content', mode='wrap')
    @classmethod
    def _check_content(cls, value: Any, check: Any) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise ValueError('expected a string, or a list of parts of text: {"type": "text", "text": ...}') from None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else ''.join(part.text for part in self.content)


class ChatBody(_Generation):
    messages: list[Message] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: _Flag = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: None = None
    tool_choice: None = None
    functions: None = None
    function_call: None = None
    response_format: None = None
    modalities: None = None
    audio: None = None

    @model_validator(mode='after')
    def _check_pairs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError('top_logprobs needs "logprobs": true')
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError('max_tokens and max_completion_tokens differ; give one of them')
        return self


class EmbeddingBody(_Body):
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Annotated[Literal['float', 'base64'], _nullable(default='float')] = 'float'
    pooling: Pooling | None = None  # extension; None: that of the server
    normalize: bool | None = None  # extension; None: that of the server
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @field_validator('input', mode='wrap')
    @classmethod
    def _check_input(cls, value: Any, check: Any) -> Any:
        return _check_texts(value, check)


class TokenizeBody(_Body):
    text: str


class DetokenizeBody(_Body):
    tokens: list[Annotated[int, Field(ge=0)]]


def _check_texts(value: Any, check: Any) -> Any:
    try:
        checked = check(value)
    except ValidationError:
        raise ValueError('expected a string, a list of strings, a list of token ids, or a list of such lists') from None
    if checked == []:
        raise ValueError('the list is empty')
    return checked


def listed(texts: str | list[str] | list[int] | list[list[int]]) -> list[str] | list[list[int]]:
    """Each text, or the tokens of each."""
    if isinstance(texts, str):
        return [texts]
    return [texts] if isinstance(texts[0], int) else texts  # type: ignore[return-value]


def parse[B: BaseModel](kind: type[B], content: bytes) -> B:
    """The body of a request. Raises ApiError, which names the field that is wrong."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise invalid(error, _fields(kind), UNSUPPORTED) from None


@functools.cache
def _fields(kind: type[BaseModel]) -> Mapping[str, Any]:
    return {name: None for name in kind.model_fields if name not in UNSUPPORTED}
