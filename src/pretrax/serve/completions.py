"""`/v1/completions`, text that continues a prompt, and `/v1/chat/completions`, the next message of a conversation."""

import asyncio
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from pretrax.errors import UserError
from pretrax.infer.request import Request, Token
from pretrax.serve.answers import Choice, Delta, Echo, token_name
from pretrax.serve.bodies import ChatBody, CompletionBody, Conversation, RawText, listed
from pretrax.serve.errors import ApiError
from pretrax.serve.generation import Format, Generation
from pretrax.serve.service import ServedModel, service_of

if TYPE_CHECKING:
    from pretrax.data.chat.templates import ChatTemplate
    from pretrax.data.tokenizers.tokenizer import Tokenizer

_DEFAULT_TOKENS = 16  # as OpenAI's


async def completions(http: Any) -> Generation:
    service = service_of(http)
    body = await service.read(http, CompletionBody)
    model = service.model(body.model)
    prompts = listed(body.prompt)
    model.admission.check(len(prompts) * body.n)
    sampling, stop_ids = body.sampling(model.thread.vocab_size), model.stop_ids(body.ignore_eos, body.stop_token_ids)
    hidden = model.hidden(body.skip_special_tokens)
    requests, choices = [], []
    for number, prompt in enumerate(prompts):
        await asyncio.sleep(0)  # other clients do not wait for a long list
        ids = await model.tokens(prompt, 'prompt', body)
        room = model.room(ids, body.max_tokens, 'prompt', _DEFAULT_TOKENS)
        echo = _echo(model.tokenizer, prompt, ids, body) if body.echo else None
        asked = Request(prompt=ids, max_tokens=room, sampling=sampling, stop_ids=stop_ids, logprobs=body.logprobs)
        for choice in range(body.n):
            request = dataclasses.replace(asked, choice=choice, prompt_logprobs=body.logprobs if body.echo else None)
            requests.append(request)
            choices.append(Choice(model.tokenizer, request, body.stops, len(choices), number, echo=echo, hidden=hidden))
    has_logprobs, with_usage = body.logprobs is not None, body.stream_options.include_usage
    form = _Completion(model, 'cmpl', 'text_completion', has_logprobs, with_usage)
    return Generation(service, model, requests, choices, form, body.stream)


def _echo(tokenizer: 'Tokenizer', prompt: str | list[int], ids: tuple[int, ...], how: RawText) -> Echo:
    if not isinstance(prompt, str):
        return Echo(tokenizer.decode(prompt), before=0)
    begin = tokenizer.begin_of_text if how.add_special_tokens else ()
    is_written = how.parse_special and begin and prompt.startswith(tokenizer.decode(begin))
    return Echo(prompt, 0 if is_written else len(begin) if prompt else len(ids))


class _Completion(Format):
    """The JSON of a completion."""

    def choice(self, choice: Choice) -> dict[str, Any]:
        return self.delta(choice, choice.whole)

    def delta(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        logprobs = completion_logprobs(self._tokenizer, delta) if self._logprobs else None
        return {'index': choice.index, 'text': delta.text, 'logprobs': logprobs, 'finish_reason': delta.finish}


def completion_logprobs(tokenizer: 'Tokenizer', delta: Delta) -> dict[str, Any]:
    """The log probabilities of tokens, as four lists."""

    name = functools.partial(token_name, tokenizer)

    def top(token: Token) -> dict[str, float] | None:
        return None if token.logprob is None else {name(other): logprob for other, logprob in reversed(token.top)}

    return {
        'tokens': [name(token.id) for token in delta.tokens],
        'token_logprobs': [token.logprob for token in delta.tokens],
        'top_logprobs': [top(token) for token in delta.tokens],
        'text_offset': delta.offsets,
    }


async def chat_completions(http: Any) -> Generation:
    service = service_of(http)
    body = await service.read(http, ChatBody)
    model = service.model(body.model)
    template = template_of(model)
    model.admission.check(body.n)
    prompt = await chat_prompt(model, body)
    room = model.room(prompt, body.max_completion_tokens or body.max_tokens, 'messages')
    sampling = body.sampling(model.thread.vocab_size)
    stop_ids = model.stop_ids(body.ignore_eos, body.stop_token_ids, template.end_of_turn)
    hidden = model.hidden(body.skip_special_tokens)
    logprobs = body.top_logprobs if body.logprobs else None
    request = Request(prompt=prompt, max_tokens=room, sampling=sampling, stop_ids=stop_ids, logprobs=logprobs)
    requests = [dataclasses.replace(request, choice=choice) for choice in range(body.n)]
    choices = [Choice(model.tokenizer, request, body.stops, i, hidden=hidden) for i, request in enumerate(requests)]
    kind = 'chat.completion.chunk' if body.stream else 'chat.completion'
    form = _Chat(model, 'chatcmpl', kind, body.logprobs, body.stream_options.include_usage)
    return Generation(service, model, requests, choices, form, body.stream)


def template_of(model: ServedModel) -> 'ChatTemplate':
    """The chat template of a model. Raises ApiError 400 if it has none."""
    if model.template is None:
        message = f'{model.name} is a base model: it has no chat template; use /v1/completions'
        raise ApiError(400, message, param='messages', code='no_chat_template')
    return model.template


async def chat_prompt(model: ServedModel, body: Conversation) -> tuple[int, ...]:
    """The tokens of a conversation.

    Raises:
        ApiError: the model has no template, the tokens are too many, or the template leaves something out.
    """
    template = template_of(model)
    try:
        template.check_variables(body.chat_template_kwargs)
    except UserError as error:
        raise ApiError(400, str(error), param='chat_template_kwargs', code='invalid_value') from None
    messages = [message.written for message in body.messages]
    begun = messages.pop()['content'] if body.continue_final_message else ''
    try:
        parts = await asyncio.to_thread(template.prompt, messages, body.chat_template_kwargs)
    except UserError as error:
        raise ApiError(400, str(error), param='messages', code='invalid_value') from None
    if begun:  # one text with what the template writes before it, as while it was written
        before = parts.pop() if isinstance(parts[-1], str) else ''
        parts.append(f'{before}{begun}')
    model.check_size(sum(len(part.encode()) for part in parts if isinstance(part, str)), 'messages')
    return tuple(await asyncio.to_thread(model.tokenizer.encode_with_special_tokens, parts))


class _Chat(Format):
    """The JSON of a chat's answer."""

    def choice(self, choice: Choice) -> dict[str, Any]:
        message = {'role': 'assistant', 'content': choice.whole.text, 'refusal': None}
        return self._choice(choice, choice.whole, 'message', message)

    def opening(self, choice: Choice) -> dict[str, Any]:
        return self.event(choice, self._choice(choice, None, 'delta', {'role': 'assistant', 'content': ''}))

    def delta(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return self._choice(choice, delta, 'delta', {'content': delta.text} if delta.text else {})

    def _choice(self, choice: Choice, delta: Delta | None, key: str, message: dict[str, Any]) -> dict[str, Any]:
        logprobs = chat_logprobs(self._tokenizer, delta) if delta and self._logprobs else None
        finish = delta and delta.finish
        return {'index': choice.index, key: message, 'logprobs': logprobs, 'finish_reason': finish}


def chat_logprobs(tokenizer: 'Tokenizer', delta: Delta) -> dict[str, Any]:
    """The log probabilities of tokens, one entry each."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        content = list(tokenizer.token_bytes(token))
        return {'token': token_name(tokenizer, token), 'logprob': logprob, 'bytes': content}

    content = [
        entry(token.id, token.logprob) | {'top_logprobs': [entry(*other) for other in token.top]}
        for token in delta.tokens
    ]
    return {'content': content, 'refusal': None}
