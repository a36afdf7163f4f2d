"""`/v1/completions`: text that continues a prompt."""

import asyncio
import dataclasses
import functools
from typing import Any

from pretrax.infer.request import Request, Token
from pretrax.serve.answers import Choice, Delta, Echo, token_name
from pretrax.serve.bodies import CompletionBody, RawText, listed
from pretrax.serve.generation import Format, Generation
from pretrax.serve.service import Tokenizer, service_of

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
            choices.append(Choice(model.tokenizer, request, body.stops, len(choices), number, echo, hidden))
    has_logprobs, with_usage = body.logprobs is not None, body.stream_options.include_usage
    form = _Completion(model, 'cmpl', 'text_completion', has_logprobs, with_usage)
    return Generation(service, model, requests, choices, form, body.stream)


def _echo(tokenizer: Tokenizer, prompt: str | list[int], ids: tuple[int, ...], how: RawText) -> Echo:
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


def completion_logprobs(tokenizer: Tokenizer, delta: Delta) -> dict[str, Any]:
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
