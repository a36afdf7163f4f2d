"""Encodes the documents of a shard: assigns them to splits, tokenizes them, and marks the tokens that count."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pretrax.data.corpus.content import Document
from pretrax.data.corpus.corpus import Shard
from pretrax.data.corpus.selection import RowCounts
from pretrax.data.tokenizers.encoders import Encoder, EncoderName, make_encoder
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.errors import UserError

TRAIN, VALIDATION = 'train', 'validation'
_ENCODED_AT_ONCE = 4 << 20  # characters

type Progress = Callable[[int, int], None]  # bytes of text and tokens since the last call


@dataclass(frozen=True)
class Job:
    """How to encode documents. Picklable."""

    tokenizer: bytes  # content of a tokenizer.json
    # The ids that begin every document, except a conversation, whose template writes them
    begin_of_text: tuple[int, ...]
    end_of_text: int  # the id that ends every document
    encoder: EncoderName
    validation: float  # fraction to hold out
    cut: bool  # whether the end of each document is held out instead of whole documents
    name: str

    @functools.cached_property
    def tools(self) -> tuple[Tokenizer, Encoder]:
        tokenizer = Tokenizer(self.tokenizer, self.name, self.end_of_text, begin_of_text=self.begin_of_text)
        return tokenizer, make_encoder(tokenizer, self.encoder)

    def __getstate__(self) -> dict:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


class EncodedDocuments(NamedTuple):
    """Whole documents of one split."""

    split: str
    encoded: np.ndarray  # uint32 [tokens], `2 * id + starts_a_document`
    mask: np.ndarray | None  # bool [tokens], whether each token counts as a target; None: all count
    n_documents: int  # number of documents
    # n_bytes, predicted_bytes: as in `TokenCounts`
    n_bytes: int
    predicted_bytes: int


def encode_shard(job: Job, shard: Shard, rows: RowCounts, cut: list[int]) -> Iterator[EncodedDocuments]:
    """Yields the tokens of a shard in order. `rows` counts the rows, and `cut` gets a 1 per document in two splits."""
    for batch in batches(shard.documents(rows)):
        splits: dict[str, list[Document]] = {TRAIN: [], VALIDATION: []}
        for document in batch:
            if job.cut:
                parts = _cut(document, job.validation)
            else:
                parts = {VALIDATION if job.validation and held_out(document.text, job.validation) else TRAIN: document}
            if len(parts) > 1:
                cut.append(1)
            for split, part in parts.items():
                splits[split].append(part)
        for split, documents in splits.items():
            if documents:
                yield encode(job, split, documents)


def held_out(text: str, validation: float) -> bool:
    """Whether a document is in the validation split; depends only on its text."""
    return text_hash(text) < validation * 2**64


def text_hash(text: str) -> int:
    """A 64-bit hash of the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'little')


def n_bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yields the documents in groups that are encoded at once."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _ENCODED_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _cut(document: Document, validation: float) -> dict[str, Document]:
    """Cuts a document in two at the end of a line, one part for each split; an empty part is dropped."""
    text, origin, answers, _ = document
    n_held_out = int(len(text) * validation)
    end = len(text) - n_held_out
    end = text.rfind('\n', max(0, end - n_held_out), end) + 1 or end
    parts = {}
    for split, start, stop in ((TRAIN, 0, end), (VALIDATION, end, len(text))):
        if start < stop:
            inside = None
            if answers is not None:
                ranges = [(max(a, start) - start, min(b, stop) - start) for a, b in answers]
                inside = tuple((a, b) for a, b in ranges if a < b)
            parts[split] = Document(text[start:stop], origin, inside)
    return parts


def encode(job: Job, split: str, parts: Sequence[Document]) -> EncodedDocuments:
    """Encodes documents of one split, each with the tokens that begin and end it."""
    if any(part.special_tokens is not None for part in parts):
        return _encode_conversations(job, split, parts)
    tokenizer, encode = job.tools
    try:
        ids, offsets = encode([part.text for part in parts])
    except UserError:
        for part in parts:  # which document is to blame
            with _named(part):
                tokenizer.encode(part.text)
        raise
    n_begin = len(job.begin_of_text)
    lengths = n_begin + np.diff(offsets) + 1
    ends = np.cumsum(lengths) - 1
    starts = ends - lengths + 1
    is_text = np.ones(lengths.sum(), bool)
    is_text[ends] = False
    encoded = np.empty(len(is_text), np.uint32)
    for number, token in enumerate(job.begin_of_text):
        is_text[starts + number] = False
        encoded[starts + number] = token
    encoded[is_text] = ids
    encoded[ends] = job.end_of_text
    encoded <<= 1
    encoded[starts] |= 1
    sizes = [n_bytes_of(part.text) for part in parts]
    predicted = sum(sizes)
    if not n_begin:  # nothing predicts the first token of the text
        # A tokenizer may give no tokens for a text, such as one of spaces; only the end-of-text token remains.
        first = ids[offsets[:-1][lengths > 1]]
        predicted -= int(tokenizer.byte_lengths[first].sum())
    mask = None
    if any(part.answers is not None for part in parts):
        mask = np.ones(len(encoded), bool)
        for number, part in enumerate(parts):
            if part.answers is not None:
                start, stop = offsets[number], offsets[number + 1]
                at = tokenizer.token_starts(part.text, ids[start:stop])
                bounds = [n_bytes_of(part.text[:bound]) for answer in part.answers for bound in answer]
                counted = np.searchsorted(np.array(bounds, np.int64), at[:-1], side='right') % 2 == 1
                mask[starts[number] : ends[number] - len(counted)] = False
                mask[ends[number] - len(counted) : ends[number]] = counted
                targets = slice(0 if n_begin else 1, None)
                predicted -= int(np.diff(at)[targets][~counted[targets]].sum())
    return EncodedDocuments(split, encoded, mask, len(parts), sum(sizes), predicted)


@contextlib.contextmanager
def _named(part: Document) -> Iterator[None]:
    """Names the document in the error of the tokenizer."""
    try:
        yield
    except UserError as error:
        raise UserError(f'{part.origin}: {error}') from error


def _encode_conversations(job: Job, split: str, parts: Sequence[Document]) -> EncodedDocuments:
    """Encodes conversations: the template's special tokens are tokens, and those that start in an answer count."""
    tokenizer = job.tools[0]
    ids: list[int] = []
    mask: list[bool] = []
    starts: list[int] = []
    n_bytes = 0
    for part in parts:
        pieces, places, end = list[int | str](), list[int](), 0
        for start, stop, token in part.special_tokens or ():
            if end < start:
                pieces.append(part.text[end:start])
                places.append(end)
            pieces.append(token)
            places.append(start)
            end = stop
        if end < len(part.text):
            pieces.append(part.text[end:])
            places.append(end)
        with _named(part):
            found, at = tokenizer.encode_parts(pieces)
        # A special token lies in an answer as a whole or not at all, and has another length in `at`.
        first = [places[n] + (offset if isinstance(pieces[n], str) else 0) for n, offset in at]
        bounds = [bound for answer in part.answers or () for bound in answer]
        counted = np.searchsorted(np.array(bounds, np.int64), np.array(first, np.int64), side='right') % 2 == 1
        starts.append(len(ids))
        ids += found
        mask += counted.tolist()
        if not found or found[-1] != job.end_of_text:
            ids.append(job.end_of_text)
            mask.append(False)
        n_bytes += sum(n_bytes_of(piece) for piece in pieces if isinstance(piece, str))
    encoded = np.array(ids, np.uint32) << 1
    encoded[starts] |= 1
    counted = np.array(mask, bool)
    counted[starts] = False  # the first token is never a target
    predicted = int(tokenizer.text_lengths[encoded[counted] >> 1].sum())
    return EncodedDocuments(split, encoded, counted, len(parts), n_bytes, predicted)
