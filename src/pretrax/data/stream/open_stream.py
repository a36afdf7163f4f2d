"""Opens the text of a configuration with `data.streaming: true`."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from pretrax.data.batches.row_targets import report_rows_without_targets
from pretrax.data.batches.source import DataRequest
from pretrax.data.corpus.content import Document
from pretrax.data.corpus.corpus import Corpus
from pretrax.data.corpus.selection import RowCounts
from pretrax.data.stream.blocks import START, Blocks, encode_all, kept_documents, parts_of
from pretrax.data.stream.places import Places
from pretrax.data.stream.stream_source import StreamSource
from pretrax.data.tokenize.encode_shard import Job, text_hash
from pretrax.data.tokenizers.encoders import choose_encoder
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokens.token_store import TokenStore
from pretrax.errors import UserError

_VERSION = 1  # of the order of a stream


def open_stream(
    corpus: Corpus,
    held_out: Corpus | None,
    tokenizer: Tokenizer,
    request: DataRequest,
    *,
    shuffle_buffer: int,
    validation_documents: int,
) -> StreamSource:
    """Opens text to train on while it is read.

    Args:
        held_out: the text for validation; None: the first documents of `corpus`, which are then not trained on.
        shuffle_buffer: documents that are shuffled together.
        validation_documents: documents for validation; 0: no validation.

    Raises:
        UserError: there is no text for training or validation.
    """
    assert tokenizer.end_of_text is not None  # `load_tokenizer` requires it
    first = list(itertools.islice(_documents(held_out or corpus), validation_documents))
    if validation_documents and not first:
        raise UserError(
            'data.text: no document has any text for validation\n  to train without: data.validation_documents=0'
        )
    encoder, reason = choose_encoder(tokenizer, (document.text for document in first or _documents(corpus)))
    request.say(f'tokenizer: encodes with {encoder}: {reason}; in a thread, while the run trains')
    job = Job(
        tokenizer.content, tokenizer.begin_of_text, tokenizer.end_of_text, encoder, 0.0, cut=False, name=tokenizer.name
    )
    left_out = frozenset() if held_out else frozenset(text_hash(document.text) for document in first)
    stored = StoredTokens(job, first, tokenizer) if first else None
    if stored is not None:
        whose = 'the first documents, which are not trained on' if held_out is None else f'{held_out.files[0]}'
        request.say(f'validation: {stored.n_documents:,} documents, {stored.n_tokens:,} tokens: {whose}')
    else:
        request.say('validation: none, no text is held out')
    recipe = [
        _VERSION,
        corpus.fingerprint(),
        tokenizer.sha256,
        tokenizer.end_of_text,
        shuffle_buffer,
        sorted(left_out),
        None if held_out is None else held_out.fingerprint(),
        *tokenizer.begin_of_text,
    ]
    fingerprint = 'stream ' + hashlib.sha256(repr(recipe).encode()).hexdigest()
    key = hashlib.sha256(f'{fingerprint} {request.seed}'.encode()).hexdigest()
    shuffled = f'blocks of {shuffle_buffer:,} documents are shuffled with seed {request.seed}'
    request.say(
        f'order: {shuffled if shuffle_buffer > 1 else "documents are not shuffled"}, and tokenized as they are read'
    )
    places = Places(request.directory / f'stream-{key[:16]}.json', request.say)
    is_new = places.newest == START
    blocks = Blocks(corpus, job, request.seed, shuffle_buffer, left_out)
    source = StreamSource(blocks, places, stored, tokenizer, fingerprint, request)
    if is_new and corpus.selection.answer_field:
        report_rows_without_targets(
            'the stream',
            lambda numbers: source.batch(0, slice(None), len(numbers)),
            None,
            request.sequence_length,
            request.say,
            request.batch_rows,
        )
    return source


def _documents(corpus: Corpus) -> Iterator[Document]:
    """The documents of a corpus, in order."""
    for part in parts_of(corpus):
        yield from kept_documents(part, corpus.selection, RowCounts())


class StoredTokens(TokenStore):
    """The tokens of some documents, in memory."""

    name, fingerprint = 'the documents for validation', ''

    def __init__(self, job: Job, documents: Sequence[Document], tokenizer: Tokenizer):
        self._encoded, mask = encode_all(job, documents)
        self._starts = np.append(np.flatnonzero(self._encoded & 1), len(self._encoded)).astype(np.uint64)
        self._mask = np.ones(len(self._encoded), bool) if mask is None else mask
        self.has_mask = mask is not None
        self.n_tokens, self.n_documents = len(self._encoded), len(self._starts) - 1
        self.vocab_size, self.largest_token = tokenizer.vocab_size, int(self._encoded.max()) >> 1
        self.end_of_text = job.end_of_text
        if tokenizer.keeps_bytes:
            is_target = self._mask & (self._encoded & 1 == 0)
            n_bytes = int(tokenizer.text_lengths[self._encoded[is_target] >> 1].sum())
            self.bytes_per_target = n_bytes / int(is_target.sum()) if n_bytes else None

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        return [self._encoded[start:stop] for start, stop in ranges]

    def read_starts(self, start: int, stop: int) -> np.ndarray:
        return self._starts[start:stop]

    def read_mask(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        return [self._mask[start:stop] for start, stop in ranges]
