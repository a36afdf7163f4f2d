"""Pieces: the tokens of one shard of the text, in files that are there whole or not at all.

Shards are tokenised by several workers in any order; data/tokenize/prepare.py lays their pieces end to end. A piece that is
finished when a run is killed is not made again by the next one.

    000012/train.tokens     uint32, little-endian: 2 * id + starts_a_document
    000012/train.mask       uint8, one a token; only where a document has answers
    000012/counts.json      rows and documents, and tokens and bytes by split

Nothing here depends on how many workers there are, or on which of them makes a piece.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from pretrax.data.corpus.corpus import Shard
from pretrax.data.corpus.document import Document
from pretrax.data.corpus.selection import Counts as Rows
from pretrax.data.tokenizers.encoders import Encoder, EncoderName, make_encoder
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.errors import UserError
from pretrax.machine.atomic import partial_path, rename_directory, sync_file

TRAIN, VALIDATION = 'train', 'validation'
_ENCODED_AT_ONCE = 4 << 20  # characters
_READ_AT_ONCE = 1 << 22  # tokens

type Progress = Callable[[int, int], None]  # bytes of text and tokens since the last call


@dataclass(frozen=True)
class Job:
    """How text becomes tokens. Picklable.

    Args:
        tokenizer: the content of a tokenizer.json.
        cut: whether the end of each document is held out, in place of whole documents.
    """

    tokenizer: bytes
    end_of_text: int
    encoder: EncoderName
    validation: float
    cut: bool

    @functools.cached_property
    def tools(self) -> tuple[Tokenizer, Encoder]:
        tokenizer = Tokenizer(self.tokenizer, 'the tokenizer', self.end_of_text)
        return tokenizer, make_encoder(tokenizer, self.encoder)

    def __getstate__(self) -> dict:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


class Block(NamedTuple):
    """Whole documents of one split, as they are stored; mask bool or None, bytes as in flat-tokens' counts."""

    split: str
    encoded: np.ndarray
    mask: np.ndarray | None
    n_documents: int
    n_bytes: int
    predicted_bytes: int


@dataclass
class SplitCounts:
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    predicted_bytes: int = 0
    masked: bool = False


@dataclass
class Piece:
    """What a piece holds. `cut` documents are in two splits."""

    rows: Rows
    cut: int
    splits: dict[str, SplitCounts]

    def to_json(self) -> bytes:
        rows = vars(self.rows) | {'left_out': dict(self.rows.left_out)}
        splits = {name: vars(counts) for name, counts in self.splits.items()}
        return json.dumps({'rows': rows, 'cut': self.cut, 'splits': splits}).encode()

    @classmethod
    def from_json(cls, content: bytes) -> 'Piece':
        found = json.loads(content)
        rows = Rows(**found['rows'] | {'left_out': collections.Counter(found['rows']['left_out'])})
        return cls(rows, found['cut'], {name: SplitCounts(**counts) for name, counts in found['splits'].items()})


class Part(NamedTuple):
    split: str
    text: str
    answers: tuple[tuple[int, int], ...] | None


def blocks(job: Job, shard: Shard, rows: Rows, cut: list[int]) -> Iterator[Block]:
    """The tokens of a shard in order. `rows` counts what is read, and `cut` gets a 1 for each document in two splits."""
    for batch in _batches(shard.documents(rows), job, cut):
        for split in (TRAIN, VALIDATION):
            if parts := [part for part in batch if part.split == split]:
                yield _block(job, split, parts)


def write_piece(job: Job, directory: Path, number: int, shard: Shard, progress: Progress) -> Piece:
    """Tokenise a shard into its piece."""
    rows, cut = Rows(), []
    with PieceWriter(directory, number) as writer:
        for block in blocks(job, shard, rows, cut):
            writer.append(block)
            progress(block.n_bytes, len(block.encoded))
        return writer.finish(rows, len(cut))


class PieceWriter:
    """The files of a piece while they grow; `finish` gives them their name."""

    def __init__(self, directory: Path, number: int):
        self._place = directory / piece_name(number)
        self._partial = partial_path(self._place)
        self._splits: dict[str, SplitCounts] = {}
        self._files = contextlib.ExitStack()
        self._open: dict[str, BinaryIO] = {}

    def append(self, block: Block) -> None:
        counts = self._splits.setdefault(block.split, SplitCounts())
        with _writing(self._place):
            self._file(block.split, 'tokens').write(np.ascontiguousarray(block.encoded, '<u4'))
            if block.mask is not None and not counts.masked:
                counts.masked = True
                for start in range(0, counts.tokens, _READ_AT_ONCE):  # what came before it counts
                    self._file(block.split, 'mask').write(b'\1' * min(_READ_AT_ONCE, counts.tokens - start))
            if counts.masked:
                mask = b'\1' * len(block.encoded) if block.mask is None else block.mask.astype(np.uint8)
                self._file(block.split, 'mask').write(mask)
        counts.documents += block.n_documents
        counts.tokens += len(block.encoded)
        counts.bytes += block.n_bytes
        counts.predicted_bytes += block.predicted_bytes

    def finish(self, rows: Rows, cut: int) -> Piece:
        piece = Piece(rows, cut, self._splits)
        with _writing(self._place):
            with (self._partial / 'counts.json').open('wb') as stream:
                stream.write(piece.to_json())
                sync_file(stream)
            for stream in self._open.values():
                sync_file(stream)
            self._files.close()
            rename_directory(self._partial, self._place, keep_existing=True)  # another worker may have made it
        return piece

    def __enter__(self) -> 'PieceWriter':
        with _writing(self._place):
            self._partial.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # closing flushes, and a full disk was told of already
            self._files.close()
        shutil.rmtree(self._partial, ignore_errors=True)

    def _file(self, split: str, kind: str) -> BinaryIO:
        name = f'{split}.{kind}'
        if name not in self._open:
            self._open[name] = self._files.enter_context((self._partial / name).open('wb'))
        return self._open[name]


def piece_name(number: int) -> str:
    return f'{number:06}'


def find_piece(directory: Path, number: int) -> Piece | None:
    """A piece that was finished before; None where there is none, or its files have not the length that it says."""
    place = directory / piece_name(number)
    try:
        piece = Piece.from_json((place / 'counts.json').read_bytes())
        for name, counts in piece.splits.items():
            whole = (place / f'{name}.tokens').stat().st_size == 4 * counts.tokens
            if counts.masked:
                whole &= (place / f'{name}.mask').stat().st_size == counts.tokens
            if not whole:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return piece


def read_piece(directory: Path, number: int, piece: Piece) -> Iterator[Block]:
    """The tokens of a piece, some at a time; the counts come with the first of each split."""
    for split, counts in piece.splits.items():
        place = directory / piece_name(number)
        documents, n_bytes, predicted = counts.documents, counts.bytes, counts.predicted_bytes
        for start in range(0, counts.tokens, _READ_AT_ONCE):
            n = min(_READ_AT_ONCE, counts.tokens - start)
            encoded = np.fromfile(place / f'{split}.tokens', '<u4', n, offset=4 * start).astype(np.uint32, copy=False)
            mask = None
            if counts.masked:
                mask = np.fromfile(place / f'{split}.mask', np.uint8, n, offset=start).astype(bool)
            yield Block(split, encoded, mask, documents, n_bytes, predicted)
            documents = n_bytes = predicted = 0


def held_out(text: str, validation: float) -> bool:
    """Whether a document is in the validation split: by its text and nothing else."""
    return text_hash(text) < validation * 2**64


def text_hash(text: str) -> int:
    """64 bits that depend on nothing but the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], 'little')


def n_bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _batches(documents: Iterable[Document], job: Job, cut: list[int]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    size = 0
    for document in documents:
        parts = _cut(document, job.validation) if job.cut else [_whole(document, job.validation)]
        if len(parts) > 1:
            cut.append(1)
        batch += parts
        size += len(document.text)
        if size >= _ENCODED_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _whole(document: Document, validation: float) -> Part:
    split = VALIDATION if validation and held_out(document.text, validation) else TRAIN
    return Part(split, document.text, document.answers)


def _cut(document: Document, validation: float) -> list[Part]:
    """A document in two, at the end of a line; one of them may be empty, and is left out."""
    text, _, answers = document
    n_held_out = int(len(text) * validation)
    end = len(text) - n_held_out
    end = text.rfind('\n', max(0, end - n_held_out), end) + 1 or end
    parts = []
    for split, start, stop in ((TRAIN, 0, end), (VALIDATION, end, len(text))):
        if start < stop:
            inside = None
            if answers is not None:
                ranges = [(max(a, start) - start, min(b, stop) - start) for a, b in answers]
                inside = tuple((a, b) for a, b in ranges if a < b)
            parts.append(Part(split, text[start:stop], inside))
    return parts


def _block(job: Job, split: str, parts: Sequence[Part]) -> Block:
    """Documents -> their tokens as they are stored, each with its end-of-text token."""
    tokenizer, encode = job.tools
    ids, offsets = encode([part.text for part in parts])
    lengths = np.diff(offsets) + 1
    ends = np.cumsum(lengths) - 1
    is_end = np.zeros(len(ids) + len(parts), bool)
    is_end[ends] = True
    encoded = np.empty(len(is_end), np.uint32)
    encoded[~is_end] = ids
    encoded[is_end] = tokenizer.end_of_text
    encoded <<= 1
    encoded[ends - lengths + 1] |= 1
    sizes = [n_bytes_of(part.text) for part in parts]
    # A tokenizer may make nothing of a text (one of blanks, say): then its end-of-text token is all there is.
    first = ids[offsets[:-1][lengths > 1]]
    predicted = sum(sizes) - int(tokenizer.byte_lengths[first].sum())
    mask = None
    if any(part.answers is not None for part in parts):
        mask = np.ones(len(encoded), bool)
        for number, part in enumerate(parts):
            if part.answers is not None:
                start, stop = offsets[number], offsets[number + 1]
                at = tokenizer.token_starts(part.text, ids[start:stop])
                counted = _in_answers(part.text, part.answers, at[:-1])
                mask[ends[number] - len(counted) : ends[number]] = counted
                predicted -= int(np.diff(at)[1:][~counted[1:]].sum())
    return Block(split, encoded, mask, len(parts), sum(sizes), predicted)


def _in_answers(text: str, answers: tuple[tuple[int, int], ...], starts: np.ndarray) -> np.ndarray:
    """Whether each token, which begins at these bytes of the text, begins in an answer."""
    bounds = [n_bytes_of(text[:at]) for answer in answers for at in answer]
    return np.searchsorted(np.array(bounds, np.int64), starts, side='right') % 2 == 1


@contextlib.contextmanager
def _writing(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f'{place.parent}: cannot write the tokens: {error.strerror or error}') from error
