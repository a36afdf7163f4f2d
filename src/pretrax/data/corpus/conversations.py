"""Rows with `messages` as documents, by a chat template. Only the answers of the assistant count in the loss."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrax.data.chat.templates import Template
from pretrax.data.corpus.content import Document
from pretrax.errors import UserError

_REFUSED = ('tool_calls', 'function_call', 'tool_call_id')


@dataclass(frozen=True)
class Conversations:
    """How a list of messages becomes a document. Picklable, for workers.

    Attributes:
        field: the field with the messages, for error messages.
        source, variables, name: of the chat template, as in `Template`.
        special_tokens: (name, id) of the tokenizer's special tokens.
    """

    field: str
    source: str
    variables: tuple[tuple[str, str], ...]
    special_tokens: tuple[tuple[str, int], ...]
    name: str

    def document(self, messages: Any, origin: str) -> Document:
        """The document of the messages in a row; empty if there are none. Raises UserError for a bad row."""
        if not isinstance(messages, list):
            raise self._bad(origin, f'is {type(messages).__name__}', 'expected a list of messages')
        if not messages:
            return Document('', origin)
        for number, message in enumerate(messages, 1):
            self._check(message, number, origin)
        if all(message['role'] != 'assistant' for message in messages):
            raise self._bad(origin, "has no message with the role 'assistant'", 'nothing in it would count in the loss')
        # OpenAI's format: answers with weight 0 are context.
        weights = [message.get('weight', 1) for message in messages if message['role'] == 'assistant']
        shown = [{key: value for key, value in message.items() if key != 'weight'} for message in messages]
        try:
            text, special, answers = _template(self).conversation(shown)
        except UserError as error:
            raise UserError(f'{origin}: {error}') from None
        counted = tuple(answer for answer, weight in zip(answers, weights, strict=True) if weight)
        return Document(text, origin, counted, special)

    def _check(self, message: Any, number: int, origin: str) -> None:
        if not isinstance(message, Mapping):
            raise self._bad(origin, f'has {type(message).__name__} as message {number}', 'expected an object')
        for key in ('role', 'content'):
            if not isinstance(message.get(key), str):
                found = 'no' if key not in message else f'{type(message[key]).__name__} as'
                raise self._bad(origin, f'has {found} {key} in message {number}', 'expected a string')
        if used := [key for key in _REFUSED if message.get(key)]:
            raise self._bad(origin, f'has {used[0]} in message {number}', 'tool calls are not supported')
        if message.get('weight', 1) not in (0, 1):
            raise self._bad(origin, f'has weight {message["weight"]!r} in message {number}', 'expected 0 or 1')

    def _bad(self, origin: str, problem: str, hint: str) -> UserError:
        return UserError(f'{origin}: field {self.field!r} {problem}\n  {hint}')


@functools.lru_cache(maxsize=4)
def _template(of: Conversations) -> Template:
    """One per process: rendering has a process of its own."""
    return Template(of.source, dict(of.special_tokens), dict(of.variables), of.name)
