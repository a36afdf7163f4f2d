"""Decodes tokens one after another. The parts, joined, are what `tokenizers` decodes from all tokens at once.

A decoder of `tokenizers` is a sequence of steps. Most of them look at one token at a time, so their results are kept in
a table. A step that looks further has a class here, which holds text back until later tokens can no longer change it.
"""

import codecs
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import tokenizers
from tokenizers import pre_tokenizers

from pretrax.data.tokenizers.text_bounds import steps

type Part = tuple[int, str]  # the number of a token, and text that it adds
_BYTE = re.compile(r'<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>')


class Decoding:
    """The decoding of one sequence of tokens. Make one with `Tokenizer.decoding`.

    Attributes:
        pushed: how many tokens were pushed.
    """

    def __init__(self, steps: 'Steps'):
        self._steps = steps
        self._stages = [make() for make in steps.stages]
        self._is_first = True
        self.pushed = 0

    def push(self, ids: Sequence[int]) -> list[Part]:
        """The text that is certain after these tokens. A character belongs to the token that completes it."""
        parts: list[Part] = []
        with self._steps.native_errors():
            for token in ids:
                if self._is_first:
                    text = self._steps.first_text(token)
                    self._is_first = text is None
                else:
                    text = self._steps.text(token)
                if text is not None:
                    parts.append((self.pushed, text))
                self.pushed += 1
            for stage in self._stages:
                parts = stage.push(parts)
        return parts

    def end(self) -> list[Part]:
        """The rest of the text."""
        parts: list[Part] = []
        with self._steps.native_errors():
            for stage in self._stages:
                parts = stage.push(parts) + stage.end()
        return parts

    @property
    def settled(self) -> int:
        """The number of tokens at the beginning that get no more text."""
        return min([self.pushed, *(held for stage in self._stages if (held := stage.held) is not None)])


class Stage(Protocol):
    """A step that looks at more than one token. `held` is the first token whose text is not complete, or None."""

    @property
    def held(self) -> int | None: ...
    def push(self, parts: list[Part]) -> list[Part]: ...
    def end(self) -> list[Part]: ...


class Steps:
    """The steps of a decoder of `tokenizers`.

    Args:
        settings: the section `decoder` of its tokenizer.json; None if it has no decoder.
        native_errors: turns what the library raises into a UserError.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: dict[str, Any] | None,
        native_errors: Callable[[], AbstractContextManager[None]],
    ):
        self._backend, self.native_errors = backend, native_errors
        each: list[_Each] = []  # what happens to each token
        self.stages: list[Callable[[], Stage]] = []  # then, in this order
        self.bytes_of: Callable[[str], bytes | None] = lambda token: None
        fused = after_bytes = False
        for step in steps(settings, 'decoders'):
            match step['type']:
                case 'Fuse':
                    fused = True
                case 'Strip' if fused and step['stop'] == 0:
                    self.stages.append(functools.partial(_StripStart, step['content'], step['start']))
                case 'ByteLevel' if not fused and not after_bytes:
                    self.stages.append(_ByteLevel)
                    self.bytes_of = _byte_level
                    fused = True
                case 'ByteFallback' if not fused and not after_bytes:
                    self.stages.append(_ByteFallback)
                    self.bytes_of = _byte
                    after_bytes = True
                case 'BPEDecoder' if not self.stages and not fused:
                    self.stages.append(functools.partial(_Suffix, _decoder(step)))
                    after_bytes = True
                case 'Strip' | 'Replace' | 'Metaspace' | 'WordPiece' if not fused and not after_bytes:
                    each.append(_Each(_decoder(step), step['type'] in ('Metaspace', 'WordPiece')))
                case _:  # it looks at the whole text, or does not exist in published tokenizers
                    each.clear()
                    self.stages = [lambda: _Whole(backend.decoder)]
                    break
        if settings is None:
            each = [_Each(None, True)]
        self._each = each
        self.first_text = functools.partial(self._text, True)
        self.text = functools.cache(functools.partial(self._text, False))

    def _text(self, first: bool, token: int) -> str | None:
        text: str | None = self._backend.id_to_token(token)
        if text is not None:
            for step in self._each:
                text = step(text, first)
        return text

    def token_bytes(self, token: int) -> bytes:
        """What a token that is not the first one adds to a text, in UTF-8."""
        text = self.text(token) or ''
        found = self.bytes_of(text)
        if found is not None:
            return found
        for stage in (make() for make in self.stages):
            if isinstance(stage, _Suffix | _Whole):
                return ''.join(part for _, part in stage.push([(0, text)]) + stage.end()).encode()
        return text.encode()


class _Each:
    """A step that looks at one token, and whether it is the first one."""

    def __init__(self, decoder: Any, first_differs: bool):
        self._decoder, self._first_differs = decoder, first_differs

    def __call__(self, token: str, first: bool) -> str:
        if self._decoder is None:
            return token if first else f' {token}'
        return self._decoder.decode([token] if first or not self._first_differs else ['', token])


class _ByteLevel:
    """Each letter of a token is a byte; text that is not UTF-8 becomes U+FFFD."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder('utf-8')('replace')
        self._last = 0
        self.held: int | None = None

    def push(self, parts: list[Part]) -> list[Part]:
        found = []
        for number, token in parts:
            content = _byte_level(token)
            found.append((number, self._decoder.decode(content)))
            waiting = len(self._decoder.getstate()[0])
            if not waiting:
                self.held = None
            elif waiting <= len(content):
                self.held = number
            self._last = number
        return found

    def end(self) -> list[Part]:
        text, self.held = self._decoder.decode(b'', final=True), None
        return [(self._last, text)] if text else []


class _ByteFallback:
    """Tokens such as <0xE2> are bytes. A run of them is text if all of it is UTF-8, otherwise U+FFFD for each byte."""

    def __init__(self):
        self._run: list[tuple[int, bytes]] = []

    @property
    def held(self) -> int | None:
        return self._run[0][0] if self._run else None

    def push(self, parts: list[Part]) -> list[Part]:
        found = []
        for number, token in parts:
            if (byte := _byte(token)) is not None:
                self._run.append((number, byte))
            else:
                found += [*self.end(), (number, token)]
        return found

    def end(self) -> list[Part]:
        run, self._run = self._run, []
        try:
            b''.join(byte for _, byte in run).decode()
        except UnicodeDecodeError:
            return [(number, '\ufffd') for number, _ in run]
        decoder = codecs.getincrementaldecoder('utf-8')()
        return [(number, decoder.decode(byte)) for number, byte in run]


class _Suffix:
    """The end of a word is a space, except after the last token."""

    def __init__(self, decoder: Any):
        self._decoder = decoder
        self._last: Part | None = None

    @property
    def held(self) -> int | None:
        return self._last[0] if self._last else None

    def push(self, parts: list[Part]) -> list[Part]:
        found = []
        for part in parts:
            if self._last:
                found.append((self._last[0], self._decoder.decode([self._last[1], ''])))
            self._last = part
        return found

    def end(self) -> list[Part]:
        last, self._last = self._last, None
        return [(last[0], self._decoder.decode([last[1]]))] if last else []


class _StripStart:
    """Removes up to `count` letters from the beginning of the text."""

    held = None

    def __init__(self, letter: str, count: int):
        self._letter, self._left = letter, count

    def push(self, parts: list[Part]) -> list[Part]:
        if not self._left:
            return parts
        found = []
        for number, text in parts:
            while self._left and text.startswith(self._letter):
                text = text[1:]
                self._left -= 1
            if text:
                self._left = 0
            found.append((number, text))
        return found

    def end(self) -> list[Part]:
        return []


class _Whole:
    """Any other decoder: no text before the end."""

    def __init__(self, decoder: Any):
        self._decoder = decoder
        self._parts: list[Part] = []

    @property
    def held(self) -> int | None:
        return self._parts[0][0] if self._parts else None

    def push(self, parts: list[Part]) -> list[Part]:
        self._parts += parts
        return []

    def end(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return [(parts[-1][0], self._decoder.decode([token for _, token in parts]))] if parts else []


def _decoder(step: Mapping[str, Any]) -> Any:
    """The step as a decoder of its own."""
    model = {'type': 'WordLevel', 'vocab': {}, 'unk_token': ''}
    return tokenizers.Tokenizer.from_str(json.dumps({'version': '1.0', 'decoder': step, 'model': model})).decoder


def _byte(token: str) -> bytes | None:
    match = _BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else None


@functools.cache
def _byte_level(token: str) -> bytes:
    """The bytes of a byte-level token; a token with another letter, such as an added one, is text."""
    values = _byte_values()
    if all(letter in values for letter in token):
        return bytes(values[letter] for letter in token)
    return token.encode()


@functools.cache
def _byte_values() -> dict[str, int]:
    return {letter: byte for byte, letter in enumerate(byte_letters())}


def byte_letters() -> list[str]:
    """The letter for each byte in a byte-level vocabulary; printable ones stand for themselves. Radford et al. 2019."""
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    others = iter(sorted(letter for letter in letters if ord(letter) > 255))
    return [chr(byte) if chr(byte) in letters else next(others) for byte in range(256)]
