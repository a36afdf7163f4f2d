"""Converts text to token ids and back, as a `tokenizer.json` defines it.

This wraps the library `tokenizers` so that encoding never changes the text: no padding, no truncation, no template, no
BPE dropout, and the name of a special token inside a document is ordinary text. It is the reference for the faster
encoders in data/tokenizers/encoders.py.

It also owns what begins and ends a text. A document is `begin_of_text`, the text, `end_of_text`; a prompt or a text
that is scored is `begin_of_text` and the text.
"""

import contextlib
import functools
import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders

from pretrax.data.tokenizers.decoding import Decoding, Steps
from pretrax.data.tokenizers.text_bounds import Added, added_tokens, most_bytes_per_token, refuse_growth, with_begin
from pretrax.errors import UserError, first_line
from pretrax.system.json_file import parse_json

END_OF_TEXT = '<|endoftext|>'
# Its names in published tokenizers; the first one found is used.
_END_OF_TEXT_NAMES = (END_OF_TEXT, '<|end_of_text|>', '<eos>', '</s>')
# Strings on which implementations may differ: contractions, digits, all kinds of spaces, long runs, combining marks,
# characters beyond 16 bits, names of special tokens, characters that normalization changes.
PROBES = (
    '',
    ' ',
    '\n',
    ' \n ',
    '\r\n',
    '\t\tx',
    '   three  blanks ',
    'x\n\n\n  y',
    'x \n \r y',
    '\u00a0\u2009\u3000x',
    "I'll WE'VE don't 'S ''s can\u2019t",
    '0 12 123 1234 12345 \u0663\u0664 \u00b2\u00bd \u2163',
    '!!! ?!.,;: -- ---- ==',
    'na\u00efve ca\ufb01 e\u0301 \u1e9b\u0323 \u212b \u01c5',
    '\u6f22\u5b57\u304b\u306a \ud55c\uad6d\uc5b4 \u0e44\u0e17\u0e22',
    '\U0001f389\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea',
    '\x00\x01\x7f\x80\x9f\ufeff\ufffd\u2028\u2029',
    'x' * 300,
    ' ' * 300 + 'x',
    '\n' * 100,
    'ab' * 200,
    '9' * 100,
    '_a__b_',
    'CamelCaseHTTPServer',
    '<0x41> \u2581x',
    'a<|endoftext|>b',
    '<s> </s> <eos> <unk> [MASK] <|im_start|>',
    '\u05d0\u05b8 \u0627\u0644\u0639\u0631\u0628\u064a\u0629',
    '\u0130\u0131\u00df\u017f',
)
LARGEST_VOCABULARY = 1 << 22  # every character of Unicode, several times
_BYTE = re.compile('<0x[0-9A-F]{2}>')


class Tokenizer:
    """Encodes text to token ids and decodes them.

    Args:
        content: the bytes of a tokenizer.json.
        end_of_text: None: the first token with one of the usual names.
        needs_end: whether it is an error if there is no such token.
        end_from: the file that names `end_of_text`.
        begin_of_text: the ids that begin a text; None: those that the post-processor of the file adds.
        before_text: the id before a text that begins with none; None: `end_of_text`, which ends the text before.

    Attributes:
        vocab_size: the largest id plus 1.
        begin_of_text: the ids that begin every text, often none.
        end_of_text: the id that ends every document; None if there is none.
        adds: the ids that the post-processor of the file adds.
        content: the bytes of tokenizer.json.
        sha256: SHA-256 of `content`.
        settings: `content` as a dict, without the parts that would change the text.
    """

    def __init__(
        self,
        content: bytes,
        name: str,
        end_of_text: int | None = None,
        needs_end: bool = True,
        end_from: str = 'tokenizer.json',
        begin_of_text: Sequence[int] | None = None,
        before_text: int | None = None,
    ):
        self.content, self.name, self.end_from, self.before_text = content, name, end_from, before_text
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.settings, self._backend, self.adds = _load(content, name)
        self.begin_of_text = self.adds.before if begin_of_text is None else tuple(begin_of_text)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > LARGEST_VOCABULARY:
            raise UserError(
                f'{name}: it has a token with the id {self.vocab_size - 1:,}, of {len(vocabulary):,} tokens\n'
                f'  expected ids below {LARGEST_VOCABULARY:,}'
            )
        self.end_of_text = _end_of_text(vocabulary, name, needs_end) if end_of_text is None else end_of_text
        if self.end_of_text is not None and not 0 <= self.end_of_text < self.vocab_size:
            raise UserError(
                f'{name}: end-of-text is {self.end_of_text}, but the tokenizer has {self.vocab_size:,} tokens'
            )
        if strange := [token for token in self.begin_of_text if not 0 <= token < self.vocab_size]:
            raise UserError(
                f'{name}: token {strange[0]} begins a text, but the tokenizer has {self.vocab_size:,} tokens'
            )
        self._byte_level = isinstance(self._backend.decoder, decoders.ByteLevel)

    def encode(self, text: str) -> list[int]:
        """The ids of the text, without the tokens that begin and end it.

        Raises UserError if the text has a character outside a closed vocabulary, or the tokenizer fails on it.
        """
        with self._native_errors(text):
            return self._backend.encode(text, add_special_tokens=False).ids

    @contextlib.contextmanager
    def _native_errors(self, text: str | None = None) -> Iterator[None]:
        """Turns what the library raises while it encodes a text, or decodes, into a UserError."""
        try:
            yield
        except BaseException as error:
            if not is_native_error(error):
                raise
            shown = 'tokens' if text is None else repr(text[:40])
            said = f'{self.name}: cannot {"decode" if text is None else "encode"} {shown}: {first_line(error)}'
            strange = next((letter for letter in text or '' if self.token_id(letter) is None), None)
            panics = not isinstance(error, Exception) or strange is None
            hint = 'use another tokenizer, or other text' if panics else f'it has no token for {strange!r}'
            raise UserError(f'{said}\n  {hint}') from error

    def encode_with_names(self, text: str) -> list[int]:
        """The ids of a text in which the name of a special token is this token."""
        with self._native_errors(text):
            return self._parsing.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _parsing(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(json.dumps(self.settings))

    @functools.cached_property
    def max_bytes_per_token(self) -> int | None:
        """The most bytes of text for each token; None if there is no bound."""
        return most_bytes_per_token(self.settings)

    def encode_with_special_tokens(self, parts: Sequence[int | str]) -> list[int]:
        """The ids of texts with special tokens between them, as `tokenizers` encodes the whole with special tokens.

        Args:
            parts: ids of special tokens, and texts. The name of a special token inside of a text is ordinary text.
        """
        return self.encode_parts(parts)[0]

    def encode_parts(self, parts: Sequence[int | str]) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode_with_special_tokens`, and (part, character in the part) at which each token starts."""
        backend, names, ids = self._with_special_tokens
        texts = [part if isinstance(part, str) else names[part] for part in parts]
        with self._native_errors(''.join(part for part in parts if isinstance(part, str))):
            encoding = backend.encode(''.join(texts), add_special_tokens=False)
        begins = np.cumsum([0, *map(len, texts)])
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        of = np.searchsorted(begins, starts, side='right') - 1
        return [ids.get(token, token) for token in encoding.ids], list(
            zip(of.tolist(), (starts - begins[of]).tolist(), strict=True)
        )

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the special tokens by their names."""
        added = self.settings.get('added_tokens') or ()
        return {token['content']: token['id'] for token in added if token.get('special')}

    @functools.cached_property
    def _with_special_tokens(self) -> tuple[tokenizers.Tokenizer, dict[int, str], dict[int, int]]:
        """A tokenizer whose special tokens have names that nobody can guess, these names, and the ids of its tokens."""
        names = {token: f'<{secrets.token_hex(16)}>' for token in self.special_tokens.values()}
        added = [
            token | ({'content': names[token['id']], 'normalized': False} if token['id'] in names else {})
            for token in self.settings.get('added_tokens') or ()
        ]
        backend = tokenizers.Tokenizer.from_str(json.dumps(self.settings | {'added_tokens': added}))
        vocabulary = backend.get_vocab(with_added_tokens=True)  # the library numbers the renamed tokens anew
        return backend, names, {vocabulary[token['content']]: token['id'] for token in added}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        try:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        except BaseException as error:
            if not is_native_error(error):
                raise
        return [self.encode(text) for text in texts]  # raises the error for the text that is to blame

    def text_ids[T: (list[int], np.ndarray)](self, ids: T) -> T:
        """The ids of a document without the tokens that begin and end it."""
        n = len(self.begin_of_text)
        ids = ids[n:] if tuple(ids[:n]) == self.begin_of_text else ids
        return ids[:-1] if len(ids) and ids[-1] == self.end_of_text else ids

    def begin_with(self, choice: bool | str | None) -> None:
        """Chooses what begins a text: `data.begin_of_text`.

        Args:
            choice: None: the tokens that the post-processor of the file adds; True: these, or else the token that is
                named `bos_token`; False: none; or the name of a token.

        Raises:
            UserError: there is no such token.
        """
        begin = self.adds.before
        if choice is True and not begin:
            if self.before_text is None:
                raise UserError(
                    f'data.begin_of_text: {self.name} names no token that begins a text\n'
                    '  name one: data.begin_of_text=NAME'
                )
            begin = (self.before_text,)
        elif isinstance(choice, str):
            token = self.token_id(choice)
            if token is None:
                raise UserError(f'data.begin_of_text: {choice!r} is not a token of {self.name}')
            begin = (token,)
        self.begin_of_text = () if choice is False else begin

    @property
    def shown_begin(self) -> str:
        """The tokens that begin a text with their ids, for messages; 'nothing' if there are none."""
        return self.shown(self.begin_of_text) or 'nothing'

    def shown(self, ids: Sequence[int]) -> str:
        """The names of tokens with their ids, for messages."""
        return ' '.join(f'{self._backend.id_to_token(token)} (id {token})' for token in ids)

    def exported(self) -> bytes:
        """The tokenizer.json whose post-processor adds `begin_of_text`; the same bytes if it does so already."""
        ids = {*self.begin_of_text, *self.adds.after}
        return with_begin(
            self.content, self.begin_of_text, {token: self._backend.id_to_token(token) or '' for token in ids}
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; special tokens appear by name."""
        with self._native_errors():
            return self._backend.decode(ids, skip_special_tokens=False)

    def decoding(self) -> Decoding:
        """A decoding of tokens one after another, into the text that `decode` gives for all of them."""
        return Decoding(self._steps)

    def token_bytes(self, token: int) -> bytes:
        """What a token that is not the first one adds to a text, in UTF-8; it may be a part of a character."""
        with self._native_errors():
            return self._steps.token_bytes(token)

    @functools.cached_property
    def _steps(self) -> Steps:
        return Steps(self._backend, self.settings.get('decoder'), self._native_errors)

    def token_id(self, name: str) -> int | None:
        """The id of the token with this name, or None."""
        return self._backend.token_to_id(name)

    def token_starts(self, text: str, ids: np.ndarray) -> np.ndarray:
        """Where each token starts in the UTF-8 bytes of the text, int64 [ids + 1]; the last entry is the end."""
        size = len(text.encode())
        if self._byte_level and self.settings.get('normalizer') is None:
            lengths = self.byte_lengths[ids]
            if lengths.sum() == size:  # false if the tokenizer prepends a space
                return np.append(0, np.cumsum(lengths))
        with self._native_errors(text):
            encoding = self._backend.encode(text, add_special_tokens=False)
        assert np.array_equal(encoding.ids, ids)
        code_points = np.frombuffer(text.encode('utf-32-le'), np.uint32)
        before = np.append(0, np.cumsum(1 + sum((code_points >= least).astype(np.int64) for least in _LONGER)))
        starts = before[np.array([start for start, _ in encoding.offsets] or [0], np.int64)][: len(ids)]
        if len(starts):
            starts[0] = 0
        return np.append(np.maximum.accumulate(starts) if len(starts) else starts, size)

    @functools.cached_property
    def keeps_bytes(self) -> bool:
        """Whether the tokens of any text have the bytes of this text, so that `byte_lengths` add up to its size."""
        strips = any(token.get('lstrip') or token.get('rstrip') for token in self.settings.get('added_tokens') or ())
        if not self._byte_level or self.settings.get('normalizer') is not None or strips:
            return False
        end = '' if self.end_of_text is None else self._backend.id_to_token(self.end_of_text) or ''
        return self.end_of_text not in self.encode(end) and all(
            self.byte_lengths[self.encode(text)].sum() == len(text.encode()) for text in PROBES
        )

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """The number of UTF-8 bytes of text of every token, int64."""
        added = {token['id']: token['content'] for token in self.settings.get('added_tokens') or ()}
        return np.array([self._length(token, added.get(token)) for token in range(self.vocab_size)], np.int64)

    @functools.cached_property
    def text_lengths(self) -> np.ndarray:
        """`byte_lengths`, but 0 for begin-of-text, end-of-text and special tokens, which only templates write."""
        lengths = self.byte_lengths.copy()
        end = () if self.end_of_text is None else (self.end_of_text,)
        lengths[[*self.begin_of_text, *end, *self.special_tokens.values()]] = 0
        return lengths

    def _length(self, token: int, added: str | None) -> int:
        written = self._backend.id_to_token(token) or ''
        if not self._byte_level and _BYTE.fullmatch(written):  # a byte of a character outside the vocabulary
            return 1
        if added is not None:
            return len(added.encode())
        if self._byte_level:  # each letter of a byte-level token is one byte of the text
            return len(written)
        return len(self.decode([token]).encode())


_LONGER = (0x80, 0x800, 0x10000)  # from each of these code points on, UTF-8 needs another byte


def is_native_error(error: BaseException) -> bool:
    """Whether an exception may come from a native library: a panic in Rust is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == 'PanicException'


def tokens_before(content: bytes, name: str) -> tuple[int, ...]:
    """The ids that a tokenizer.json adds before a text. Raises UserError if it is malformed."""
    with _reading(name):
        return added_tokens(parse_json(content)).before


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Raises UserError for an error that the content of a tokenizer.json causes, also in a native library."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, UserError) or not is_native_error(error):
            raise
        raise UserError(f'{name}: not a tokenizer.json of the `tokenizers` library\n  {first_line(error)}') from None


def _load(content: bytes, name: str) -> tuple[dict[str, Any], tokenizers.Tokenizer, Added]:
    with _reading(name):
        settings = parse_json(content)
        adds = added_tokens(settings)
        # Truncation, padding, templates and BPE dropout would make the tokens differ from the text.
        settings['truncation'] = settings['padding'] = settings['post_processor'] = None
        settings['model'] |= {'dropout': None} if 'dropout' in settings['model'] else {}
        refuse_growth(settings, name)
        backend = tokenizers.Tokenizer.from_buffer(json.dumps(settings).encode())
    backend.encode_special_tokens = True
    return settings, backend, adds


def _end_of_text(vocabulary: dict[str, int], name: str, needed: bool) -> int | None:
    for candidate in _END_OF_TEXT_NAMES:
        if candidate in vocabulary:
            return vocabulary[candidate]
    if not needed:
        return None
    raise UserError(
        f'{name}: no end-of-text token\n  expected one of {", ".join(_END_OF_TEXT_NAMES)}\n'
        f'  its first tokens: {", ".join(sorted(vocabulary, key=vocabulary.__getitem__)[:8])}\n'
        '  if it has another name, give the directory of tokenizer.json with a tokenizer_config.json\n'
        '  that has {"eos_token": "NAME"}'
    )
