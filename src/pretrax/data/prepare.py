"""A corpus -> a directory of flat-tokens, made once for each recipe (text, tokenizer, validation)."""

import hashlib
import heapq
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrax.data.corpus import Corpus, Counts
from pretrax.data.flat_tokens import VERSION, TokenizerIdentity, open_split
from pretrax.data.flat_tokens_writer import Writer, create
from pretrax.data.tokenizer import Tokenizer
from pretrax.data.tokenizer_training import train_tokenizer
from pretrax.errors import UserError

# A tokenizer is trained on at most so much text, in pieces that the hash of each chooses from all documents.
SAMPLE_CHARACTERS = 16 << 20
_PIECE = 1 << 16
_ENCODED_AT_ONCE = 4 << 20
# Where fewer whole documents than this would be held out, the end of each document is held out instead.
_FEWEST_HELD_OUT = 8

type Say = Callable[[str], None]


def prepare(
    corpus: Corpus, directory: Path, say: Say, *, tokenizer: Tokenizer | None, vocab_size: int, validation: float
) -> Path:
    """The flat-tokens directory of this text below `directory`: that of an earlier call, or a new one.

    Args:
        tokenizer: the one to use; None trains one with at most vocab_size tokens.
        validation: fraction of the documents to hold out.
    """
    recipe = {
        'text': corpus.fingerprint(),
        'tokenizer': tokenizer.sha256 if tokenizer else f'byte-level BPE of {vocab_size} tokens',
        'validation': validation,
        'version': VERSION,
    }
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    place = directory / f'tokens-{key[:12]}'
    if place.exists():
        say(f'tokens: reused from {place}: same text, tokenizer and validation')
        return place
    for other in sorted(directory.glob('tokens-*')):
        say(f'tokens: {other} is of {_difference(other, recipe)}; it stays, and the text is tokenised afresh')
    survey = _survey(corpus, say, sampled=tokenizer is None)
    say(f'text: {survey.n_documents:,} documents, {survey.n_bytes / 1e6:,.1f} MB')
    if tokenizer is None:
        tokenizer = _train(survey.sample, vocab_size, say)
    _tokenise(corpus, survey, tokenizer, validation, place, recipe, say)
    return place


def _difference(other: Path, recipe: dict[str, Any]) -> str:
    try:
        theirs = open_split(other, 'train').manifest.source
    except UserError as error:
        return f'no use ({str(error).splitlines()[0]})'
    return 'another ' + ' and '.join(name for name in recipe if recipe[name] != theirs.get(name))


@dataclass(frozen=True)
class _Survey:
    """What a first pass over the documents finds."""

    n_documents: int
    n_bytes: int
    sample: list[str]


def _survey(corpus: Corpus, say: Say, sampled: bool) -> _Survey:
    n_bytes = n_sampled = 0
    counts = Counts()
    sample: list[tuple[int, str]] = []  # a heap: the piece with the largest hash leaves first
    for text, *_ in corpus.documents(counts):
        n_bytes += len(text.encode())
        for start in range(0, len(text) if sampled else 0, _PIECE):
            piece = text[start : start + _PIECE]
            heapq.heappush(sample, (-_hash(piece), piece))
            n_sampled += len(piece)
            while n_sampled > SAMPLE_CHARACTERS:
                n_sampled -= len(heapq.heappop(sample)[1])
    for line in counts.lines():
        say(line)
    if not counts.kept:
        raise UserError(f'data.text: no document holds any text\n  {counts.lines()[0]}')
    return _Survey(counts.kept, n_bytes, [piece for _, piece in sample])


def _train(sample: list[str], vocab_size: int, say: Say) -> Tokenizer:
    started = time.perf_counter()
    tokenizer = train_tokenizer(sample, vocab_size)
    short = '' if tokenizer.vocab_size == vocab_size else f' (the text has no more; {vocab_size:,} were asked for)'
    say(
        f'tokenizer: byte-level BPE of {tokenizer.vocab_size:,} tokens{short}, trained on '
        f'{sum(map(len, sample)) / 1e6:,.1f} M characters in {time.perf_counter() - started:.1f} s'
    )
    return tokenizer


def _tokenise(
    corpus: Corpus,
    survey: _Survey,
    tokenizer: Tokenizer,
    validation: float,
    place: Path,
    recipe: dict[str, Any],
    say: Say,
) -> None:
    cut = validation > 0 and survey.n_documents * validation < _FEWEST_HELD_OUT
    if cut:
        say(
            f'validation: {survey.n_documents:,} documents are too few to hold out whole ones, '
            f'so the last {validation:.1%} of each is held out'
        )
    parts = (part for text, *_ in corpus.documents() for part in _parts(text, validation, cut))
    identity = TokenizerIdentity(
        sha256=tokenizer.sha256, vocab_size=tokenizer.vocab_size, end_of_text=tokenizer.end_of_text
    )
    started = said = time.perf_counter()
    with create(place, identity, tokenizer.content, recipe) as writer:
        for batch in _batches(parts):
            _append(writer, tokenizer, batch)
            if (now := time.perf_counter()) - said > 10:
                said = now
                say(f'tokens: {_n_bytes(writer) / survey.n_bytes:.0%} of the text after {now - started:.0f} s')
        if _n_bytes(writer) != survey.n_bytes:
            raise UserError(
                f'data.text: {survey.n_bytes:,} bytes of text at first, {_n_bytes(writer):,} when read again\n'
                '  a file changed in between: start again when the files are at rest'
            )
        for split in ('train', 'validation') if validation > 0 else ('train',):
            if split not in writer.counts:
                raise UserError(
                    f'data.validation: {validation} of {survey.n_documents:,} documents leaves {split} with nothing\n'
                    '  change the fraction, give more text, or hold nothing out: data.validation=0'
                )
    seconds = time.perf_counter() - started
    n_tokens = sum(counts.tokens for counts in writer.counts.values())
    for split, counts in writer.counts.items():
        say(
            f'tokens: {split} {counts.documents:,} documents, {counts.tokens:,} tokens, '
            f'{(counts.bytes or 0) / counts.tokens:.2f} bytes a token'
        )
    say(f'tokens: written to {place} in {seconds:.1f} s, {n_tokens / seconds / 1e6:.2f} M tokens/s')


def _parts(text: str, validation: float, cut: bool) -> Iterator[tuple[str, str]]:
    """(split, text) of a document: all of it on one side, chosen by its hash, or cut in two at the end of a line."""
    if not cut:
        yield ('validation' if _hash(text) < validation * 2**64 else 'train'), text
        return
    n_held_out = int(len(text) * validation)
    end = len(text) - n_held_out
    end = text.rfind('\n', max(0, end - n_held_out), end) + 1 or end
    for split, part in (('train', text[:end]), ('validation', text[end:])):
        if part:
            yield split, part


def _batches(parts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += len(part[1])
        if size >= _ENCODED_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _append(writer: Writer, tokenizer: Tokenizer, batch: list[tuple[str, str]]) -> None:
    encoded = tokenizer.encode_batch([text for _, text in batch])
    for split in dict.fromkeys(split for split, _ in batch):
        chosen = [(text, ids) for (of, text), ids in zip(batch, encoded, strict=True) if of == split]
        n_bytes = sum(len(text.encode()) for text, _ in chosen)
        # A given tokenizer may make nothing of a text (one of blanks, say): then its end-of-text token is all there is.
        unpredicted = sum(tokenizer.byte_length(ids[0]) for _, ids in chosen if ids)
        writer.append(
            split,
            [[*ids, tokenizer.end_of_text] for _, ids in chosen],
            n_bytes=n_bytes,
            predicted_bytes=n_bytes - unpredicted,
        )


def _n_bytes(writer: Writer) -> int:
    return sum(counts.bytes or 0 for counts in writer.counts.values())  # known for all, as the text is at hand


def _hash(text: str) -> int:
    """64 bits that depend on nothing but the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'little')
