"""Chooses the fastest encoder that gives the same ids as the library `tokenizers`.

    bytes        the ids are the bytes of the text
    fastokens    a faster byte-level BPE, if it supports every part of the tokenizer.json
    tokenizers   everything else

`choose_encoder` compares the candidate with `tokenizers` on difficult strings and on text of the corpus, and returns
its choice with the reason. On one core, fastokens is about 20 times as fast.
"""

import importlib.metadata
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from pretrax.data.tokenizers.tokenizer import PROBES, Tokenizer, is_native_error
from pretrax.data.tokenizers.tokenizer_files import is_bytes
from pretrax.errors import UserError, first_line

type EncoderName = Literal['bytes', 'fastokens', 'tokenizers']
COMPARED_CHARACTERS = 1 << 18  # of the corpus, compared before an encoder is used
_COMPARED_AT_ONCE = 1 << 14


class Encoded(NamedTuple):
    """The tokens of some texts: the concatenated ids, uint32, and where each text starts, int64 [texts + 1]."""

    ids: np.ndarray
    offsets: np.ndarray


type Encoder = Callable[[Sequence[str]], Encoded]


class EncoderChoice(NamedTuple):
    """The encoder to use, and the reason, for messages."""

    name: EncoderName
    reason: str


def make_encoder(tokenizer: Tokenizer, name: EncoderName) -> Encoder:
    """Makes an encoder. Raises ValueError if it does not support the tokenizer."""
    match name:
        case 'bytes':
            return _encode_bytes
        case 'fastokens':
            return _fastokens(tokenizer)
        case 'tokenizers':
            return lambda texts: _joined(tokenizer.encode_batch(texts))


def choose_encoder(tokenizer: Tokenizer, texts: Iterable[str]) -> EncoderChoice:
    """The fastest encoder that gives the ids of `tokenizers` on PROBES and on the first texts.

    Args:
        texts: texts of the corpus; COMPARED_CHARACTERS of them are read.
    """
    if is_bytes(tokenizer):
        return EncoderChoice('bytes', 'each byte of the text is a token')
    try:
        candidate = make_encoder(tokenizer, 'fastokens')
    except ValueError as error:
        return EncoderChoice(
            'tokenizers', f'slower, since fastokens does not support this tokenizer ({first_line(error)[:120]})'
        )
    compared = 0
    for batch in itertools.batched(itertools.chain(PROBES, _limited(texts)), 256):
        try:
            ours, theirs = candidate(batch), _joined(tokenizer.encode_batch(batch))
        except UserError:  # the error names the document when it is encoded
            return EncoderChoice('tokenizers', 'slower, since it cannot encode a text of the sample')
        if not (np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.offsets, theirs.offsets)):
            different = next(
                n for n, text in enumerate(batch) if candidate([text]).ids.tolist() != tokenizer.encode(text)
            )
            return EncoderChoice('tokenizers', f'slower, since fastokens gives other ids for {batch[different][:40]!r}')
        compared += len(theirs.ids)
    version = importlib.metadata.version('fastokens')
    return EncoderChoice(
        'fastokens', f'version {version}, the same ids as tokenizers in a sample of {compared:,} tokens'
    )


def _limited(texts: Iterable[str]) -> Iterable[str]:
    n = 0
    for text in texts:
        for start in range(0, len(text), _COMPARED_AT_ONCE):
            yield text[start : start + _COMPARED_AT_ONCE]
            n += _COMPARED_AT_ONCE if len(text) > _COMPARED_AT_ONCE else len(text)
            if n >= COMPARED_CHARACTERS:
                return


def _encode_bytes(texts: Sequence[str]) -> Encoded:
    raw = [text.encode() for text in texts]
    ids = np.frombuffer(b''.join(raw), np.uint8).astype(np.uint32)
    return Encoded(ids, np.cumsum([0, *map(len, raw)], dtype=np.int64))


def _fastokens(tokenizer: Tokenizer) -> Encoder:
    import fastokens

    backend = fastokens.Tokenizer.from_json_str(json.dumps(tokenizer.settings))

    def encode(texts: Sequence[str]) -> Encoded:
        try:
            ids, offsets = backend.encode_batch_flat(list(texts), split_special_tokens=True)
        except BaseException as error:  # for example, its search for a pattern went back too often
            if not is_native_error(error):
                raise
            return _joined(tokenizer.encode_batch(texts))
        return Encoded(np.frombuffer(ids, '<u4'), np.frombuffer(offsets, '<u8').astype(np.int64))

    return encode


def _joined(encoded: Sequence[Sequence[int]]) -> Encoded:
    ids = np.fromiter(itertools.chain.from_iterable(encoded), np.uint32)
    return Encoded(ids, np.cumsum([0, *map(len, encoded)], dtype=np.int64))
