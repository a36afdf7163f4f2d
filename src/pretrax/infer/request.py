"""What the engine is asked for, and what it answers. No JAX here: the server and its tests need no devices."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

from pretrax.errors import UserError
from pretrax.infer.sampling_settings import Sampling

DEFAULT_TOKENS = 128  # of an answer, unless the user says otherwise
MAX_STOP_IDS = 16
MAX_BIASED = 300  # tokens with a logit bias
MAX_LOGPROBS = 20  # likeliest tokens reported at a position

type Finish = Literal['stop', 'length', 'cancelled']
Pooling = Literal['mean', 'last', 'cls', 'min', 'max']
# One vector f32 [M] from the hidden states of a text, f32 [L, M]; `cls` is the first token, as other servers call it.
POOLINGS: dict[Pooling, Callable[[np.ndarray], np.ndarray]] = {
    'mean': lambda states: states.mean(axis=0),
    'last': lambda states: states[-1],
    'cls': lambda states: states[0],
    'min': lambda states: states.min(axis=0),
    'max': lambda states: states.max(axis=0),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue. Several answers to one prompt are several requests with different `choice`."""

    prompt: tuple[int, ...]
    max_tokens: int  # 0: the prompt is only read, for `prompt_logprobs` or `embedding`
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    choice: int = 0  # the randomness depends only on the seed, this number, and the position
    stop_ids: tuple[int, ...] = ()  # tokens that end the answer; the one that did is its last token
    logprobs: int | None = None  # report the log probability of each token, and the n likeliest tokens
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    embedding: Pooling | None = None  # report the hidden states after the last norm, pooled


@dataclasses.dataclass(frozen=True)
class Token:
    """A token. Log probabilities are those of the model, before anything that `Sampling` does."""

    id: int
    logprob: float | None = None  # None: not asked for, or the first token of a prompt
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their log probabilities, the likeliest first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """What a call of `Engine.step` found out about a request."""

    number: int  # of the request
    tokens: tuple[Token, ...] = ()  # new tokens of the answer
    finish: Finish | None = None  # None: more will follow
    weights_step: int | None = None  # training step of the weights that wrote the tokens
    cached: int = 0  # tokens of the prompt that were in the prefix cache; in the first update
    prompt: tuple[Token, ...] = ()  # with `prompt_logprobs`; in the first update
    embedding: np.ndarray | None = None  # f32 [M]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """A snapshot of an engine. Counts are totals since the start."""

    slots: int
    busy_slots: int
    waiting: int  # requests without a slot
    pages: int  # of the cache
    used_pages: int  # that a request uses
    cached_pages: int  # that no request uses, kept for later prompts with the same beginning
    blocks: int  # calls of `step` that ran a program; it grows as long as the engine advances
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    proposed_tokens: int  # by speculation
    accepted_tokens: int
    compilations: int  # after the engine was ready; 0 if all is well


def check_request(request: Request, max_length: int, vocab_size: int) -> None:
    """Raises UserError for a request that an engine can never run.

    Args:
        request: the request.
        max_length: the most tokens of a prompt and its answer.
        vocab_size: number of tokens.
    """
    prompt, sampling = len(request.prompt), request.sampling
    if not prompt:
        raise UserError('the prompt is empty\ngive at least one token to continue')
    if request.max_tokens < 0:
        raise UserError(f'max_tokens is {request.max_tokens}\ngive 0 or more')
    if request.embedding and request.max_tokens:
        raise UserError(f'max_tokens is {request.max_tokens}, but an embedding covers only the prompt\ngive 0')
    if prompt + request.max_tokens > max_length:
        raise UserError(
            f'the prompt has {prompt} tokens; with {request.max_tokens} new ones that is '
            f'{prompt + request.max_tokens}, '
            f'but there is room for {max_length}\n'
            + (f'ask for at most {max_length - prompt} new tokens' if prompt < max_length else 'shorten the prompt')
        )
    named = {'the prompt': request.prompt, 'stop_ids': request.stop_ids, 'logit_bias': tuple(sampling.logit_bias)}
    for name, ids in named.items():
        if strange := [token for token in ids if not 0 <= token < vocab_size]:
            raise UserError(f'{name} has the token {strange[0]}\nthe vocabulary has the tokens 0 to {vocab_size - 1}')
    limits = {
        'stop_ids': (len(request.stop_ids), MAX_STOP_IDS),
        'logit_bias': (len(sampling.logit_bias), MAX_BIASED),
        'logprobs': (request.logprobs or 0, MAX_LOGPROBS),
        'prompt_logprobs': (request.prompt_logprobs or 0, MAX_LOGPROBS),
    }
    for name, (count, most) in limits.items():
        if count > most:
            raise UserError(f'{name} asks for {count}\nat most {most} are possible')


def check_positions(prompt: int, tokens: int, positions: int | None) -> None:
    """Raises UserError if a prompt and its answer exceed the positions of a model.

    Args:
        prompt: tokens of the prompt.
        tokens: the most tokens of the answer.
        positions: positions of the model; None: any number.
    """
    if positions is None or prompt + tokens <= positions:
        return
    if prompt >= positions:
        raise UserError(
            f'a prompt of {prompt} tokens leaves no room for an answer: the model has {positions} positions\n'
            'shorten the prompt'
        )
    raise UserError(
        f'a prompt of {prompt} tokens and {tokens} new ones exceed the {positions} positions of the model\n'
        f'ask for at most {positions - prompt} new tokens'
    )


def answer_length(prompt: int, tokens: int | None, positions: int | None) -> int:
    """The most tokens of an answer.

    Args:
        prompt: tokens of the prompt.
        tokens: how many were asked for; None: `DEFAULT_TOKENS`, or as many as fit.
        positions: positions of the model; None: any number.

    Raises:
        UserError: the prompt and its answer exceed the positions.
    """
    if tokens is None:
        tokens = DEFAULT_TOKENS if positions is None else max(1, min(DEFAULT_TOKENS, positions - prompt))
    check_positions(prompt, tokens, positions)
    return tokens
