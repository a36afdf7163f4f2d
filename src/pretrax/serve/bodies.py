"""The JSON that clients send. A field that is unknown, or asks for what the server cannot do, is an error."""

import random
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError, from_json

from pretrax.infer.request import MAX_BIASED, MAX_LOGPROBS, Pooling
from pretrax.infer.sampling_settings import (
    SETTINGS,
    FrequencyPenalty,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Sampling,
    Temperature,
    TopK,
)
from pretrax.serve import fields
from pretrax.serve.errors import ApiError, invalid

MAX_STOPS = 16
MAX_STOP_TOKENS = 8  # besides those that end the answers of the model
Number = Annotated[float, Field(allow_inf_nan=False)]
Token = Annotated[int, Field(ge=0)]
_LONGEST_ID = 19  # digits of a token


def _check_texts(value: Any, check: Any) -> Any:
    try:
        checked = check(value)
    except ValidationError:
        raise ValueError('expected a string, a list of strings, a list of token ids, or a list of such lists') from None
    if checked == []:
        raise ValueError('the list is empty')
    return checked


Texts = Annotated[str | list[str] | list[int] | list[list[int]], WrapValidator(_check_texts)]


class _Object(BaseModel):
    """A JSON object. `neutral` has fields and values that ask for nothing, and what is refused with a reason."""

    model_config = ConfigDict(extra='forbid', strict=True)
    neutral: ClassVar[Mapping[str, fields.Field]] = {}

    @model_validator(mode='before')
    @classmethod
    def _drop_neutral(cls, body: Any) -> Any:
        return fields.asked(body, cls.neutral)


class _Body(_Object):
    neutral = fields.EVERYWHERE

    model: str | None = None


class RawText(_Body):
    """How raw text is read."""

    parse_special: bool = True  # extension: the name of a special token in a text is this token
    add_special_tokens: bool = True  # extension: a text begins with the tokens that begin every text


class StreamOptions(_Object):
    neutral = fields.STREAM_OPTIONS

    include_usage: bool = False


class _Generation(_Body):
    """What completions and chats have in common."""

    n: Annotated[int, Field(ge=1)] = 1
    stop: str | list[str | None] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # Narrower than `Sampling` where the interface of OpenAI is; its top_p may be 0.
    temperature: Annotated[Temperature, Field(le=100)] = Sampling.temperature
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = Sampling.top_p
    top_k: TopK | None = Sampling.top_k
    min_p: MinP = Sampling.min_p
    presence_penalty: Annotated[PresencePenalty, Field(ge=-2, le=2)] = Sampling.presence_penalty
    frequency_penalty: Annotated[FrequencyPenalty, Field(ge=-2, le=2)] = Sampling.frequency_penalty
    repetition_penalty: Annotated[RepetitionPenalty, Field(le=100)] = Sampling.repetition_penalty
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = False

    @field_validator('stop')
    @classmethod
    def _check_stop(cls, stop: str | list[str | None] | None) -> Any:
        if isinstance(stop, list) and len(stop) > MAX_STOPS:
            raise ValueError(f'{len(stop)} strings; expected at most {MAX_STOPS}')
        return stop

    @field_validator('logit_bias')
    @classmethod
    def _check_bias(cls, bias: dict[str, float]) -> dict[str, float]:
        if len(bias) > MAX_BIASED:
            raise ValueError(f'{len(bias)} tokens; expected at most {MAX_BIASED}')
        for token in bias:
            if not (token.isascii() and token.isdecimal() and len(token) <= _LONGEST_ID):
                raise ValueError(f'{token[:40]!r} is not a token id')
        return bias

    @property
    def stops(self) -> list[str]:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in texts if text]  # an empty string stops nothing

    def sampling(self, vocab_size: int) -> Sampling:
        """How to choose tokens; a seed that is not given is random.

        Raises:
            ApiError: a token of logit_bias is outside the vocabulary.
        """
        bias = {int(token): value for token, value in self.logit_bias.items()}
        for token in bias:
            if token >= vocab_size:
                message = f'logit_bias: token {token} is outside the vocabulary of {vocab_size:,} tokens'
                raise ApiError(400, message, param='logit_bias', code='invalid_value')
        own = {'logit_bias': bias, 'seed': random.getrandbits(31) if self.seed is None else self.seed % 2**32}
        return Sampling(**{name: getattr(self, name) for name in SETTINGS} | own)


class CompletionBody(_Generation, RawText):
    neutral = fields.COMPLETION

    prompt: Texts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TextPart(_Object):
    neutral = fields.PART

    type: Literal['text']
    text: str


class Message(_Object):
    neutral = fields.MESSAGE

    role: Literal['system', 'developer', 'user', 'assistant']
    content: str | list[TextPart] = ''
    name: str | None = None

    @field_validator('role', mode='before')
    @classmethod
    def _check_role(cls, role: Any) -> Any:
        if role in ('tool', 'function'):
            raise PydanticCustomError('unsupported', '{reason}', {'field': '', 'reason': fields.TOOLS})
        return role

    @field_validator('content', mode='wrap')
    @classmethod
    def _check_content(cls, value: Any, check: Any) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise ValueError('expected a string, or a list of parts of text: {"type": "text", "text": ...}') from None

    @model_validator(mode='after')
    def _check_has_content(self) -> Self:
        if 'content' not in self.model_fields_set and self.role != 'assistant':  # an answer may be empty
            raise PydanticCustomError('absent', '', {'field': 'content'})
        return self

    @property
    def written(self) -> dict[str, str]:
        """The message as templates read it."""
        text = self.content if isinstance(self.content, str) else ''.join(part.text for part in self.content)
        return {'role': self.role, 'content': text} | ({} if self.name is None else {'name': self.name})


class Conversation(_Object):
    """The messages before an answer. All but the messages are extensions."""

    messages: list[Message] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] = {}  # variables of the chat template
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer continues the last message

    @model_validator(mode='after')
    def _check_end(self) -> Self:
        if self.continue_final_message:
            if len(self.messages) < 2 or self.messages[-1].role != 'assistant':
                raise ValueError('continue_final_message needs a last message of the role assistant, after another one')
        elif not self.add_generation_prompt:
            raise ValueError('without add_generation_prompt there is no answer; continue_final_message continues one')
        return self


class ChatBody(_Generation, Conversation):
    neutral = fields.CHAT

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0

    @model_validator(mode='after')
    def _check_pairs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError('top_logprobs needs "logprobs": true')
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError('max_tokens and max_completion_tokens differ; give one of them')
        return self


class EmbeddingBody(RawText):
    neutral = fields.EMBEDDING

    input: Texts
    encoding_format: Literal['float', 'base64'] = 'float'
    pooling: Pooling | None = None  # extension; None: that of the server
    normalize: bool | None = None  # extension; None: that of the server
    dimensions: Annotated[int, Field(ge=1)] | None = None


class TokenizeBody(RawText, Conversation):
    text: str | None = None
    prompt: str | None = None  # the same, by the name that vLLM has for it
    messages: list[Message] = []

    @model_validator(mode='after')
    def _check_one(self) -> Self:
        if [self.text is None, self.prompt is None, not self.messages].count(False) != 1:
            raise ValueError('give one of text, prompt and messages')
        return self

    @property
    def content(self) -> str:
        return (self.prompt if self.text is None else self.text) or ''


class DetokenizeBody(_Body):
    tokens: list[Token]


def listed(texts: Texts) -> list[str] | list[list[int]]:
    """Each text, or the tokens of each."""
    if isinstance(texts, str):
        return [texts]
    return [texts] if isinstance(texts[0], int) else texts  # type: ignore[return-value]


def parse[B: BaseModel](kind: type[B], content: bytes) -> B:
    """The body of a request. Raises ApiError, which names the field that is wrong."""
    try:
        body = from_json(content)
    except ValueError as error:
        raise ApiError(400, f'the body is not JSON: {error}', code='invalid_json') from None
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise invalid(error, kind.model_fields) from None
