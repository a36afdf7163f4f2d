"""The fastest way to encode with a tokenizer that gives the same ids as `tokenizers`.

    bytes        the bytes of the text are its ids
    fastokens    a faster implementation of byte-level BPE, where it knows every part of the tokenizer.json
    tokenizers   everything else

`choose_encoder` compares the candidate with `tokenizers` on difficult strings and on text of the corpus before it is
trusted. It says which one it takes and why: on one core fastokens is some 20 times as fast.
"""

import importlib.metadata
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from pretrax.data.tokenizers.tokenizer import PROBES, Tokenizer
from pretrax.data.tokenizers.tokenizer_files import is_bytes

type EncoderName = Literal['bytes', 'fastokens', 'tokenizers']
COMPARED_CHARACTERS = 1 << 18  # of the corpus
_COMPARED_AT_ONCE = 1 << 14


class Encoded(NamedTuple):
    """The tokens of some texts: ids uint32 of all of them in a row, and offsets int64 [texts + 1] into these."""

    ids: np.ndarray
    offsets: np.ndarray


type Encoder = Callable[[Sequence[str]], Encoded]


class Choice(NamedTuple):
    name: EncoderName
    reason: str


def make_encoder(tokenizer: Tokenizer, name: EncoderName) -> Encoder:
    """The encoder of that name. Raises ValueError where it does not know the tokenizer."""
    match name:
        case 'bytes':
            return _encode_bytes
        case 'fastokens':
            return _fastokens(tokenizer)
        case 'tokenizers':
            return lambda texts: _joined(tokenizer.encode_batch(texts))


def choose_encoder(tokenizer: Tokenizer, texts: Iterable[str]) -> Choice:
    """The fastest encoder whose ids equal those of `tokenizers` on PROBES and on the first texts, and why it is that.

    texts: of the corpus; as many are read as COMPARED_CHARACTERS needs.
    """
    if is_bytes(tokenizer):
        return Choice('bytes', 'each byte of the text is a token')
    try:
        candidate = make_encoder(tokenizer, 'fastokens')
    except ValueError as error:
        return Choice('tokenizers', f'slower, since fastokens does not know this tokenizer ({_first_line(error)})')
    compared = 0
    for batch in itertools.batched(itertools.chain(PROBES, _limited(texts)), 256):
        ours, theirs = candidate(batch), _joined(tokenizer.encode_batch(batch))
        if not (np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.offsets, theirs.offsets)):
            different = next(
                n for n, text in enumerate(batch) if candidate([text]).ids.tolist() != tokenizer.encode(text)
            )
            return Choice('tokenizers', f'slower, since fastokens gives other ids for {batch[different][:40]!r}')
        compared += len(theirs.ids)
    version = importlib.metadata.version('fastokens')
    return Choice('fastokens', f'version {version}, the same ids as tokenizers in a sample of {compared:,} tokens')


def _limited(texts: Iterable[str]) -> Iterable[str]:
    n = 0
    for text in texts:
        for start in range(0, len(text), _COMPARED_AT_ONCE):
            yield text[start : start + _COMPARED_AT_ONCE]
            n += _COMPARED_AT_ONCE if len(text) > _COMPARED_AT_ONCE else len(text)
            if n >= COMPARED_CHARACTERS:
                return


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def _encode_bytes(texts: Sequence[str]) -> Encoded:
    raw = [text.encode() for text in texts]
    ids = np.frombuffer(b''.join(raw), np.uint8).astype(np.uint32)
    return Encoded(ids, np.cumsum([0, *map(len, raw)], dtype=np.int64))


def _fastokens(tokenizer: Tokenizer) -> Encoder:
    import fastokens

    backend = fastokens.Tokenizer.from_json_str(json.dumps(tokenizer.settings))

    def encode(texts: Sequence[str]) -> Encoded:
        ids, offsets = backend.encode_batch_flat(list(texts), split_special_tokens=True)
        return Encoded(np.frombuffer(ids, '<u4'), np.frombuffer(offsets, '<u8').astype(np.int64))

    return encode


def _joined(encoded: Sequence[Sequence[int]]) -> Encoded:
    ids = np.fromiter(itertools.chain.from_iterable(encoded), np.uint32)
    return Encoded(ids, np.cumsum([0, *map(len, encoded)], dtype=np.int64))
