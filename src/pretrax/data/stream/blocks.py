"""An endless stream of tokens, in blocks of documents that can be read again from where they start.

An epoch reads the parts of a corpus in a shuffled order, and the documents of each part in their own. Consecutive
documents form a block; a block is shuffled and tokenized as a whole. Where a block starts is five numbers
(`BlockStart`), and everything after it follows from them, the seed and the corpus.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pretrax.data.batches.order import permute
from pretrax.data.corpus.content import Document
from pretrax.data.corpus.corpus import Corpus, whole
from pretrax.data.corpus.hugging_face import HuggingFaceDataset
from pretrax.data.corpus.parts import Part
from pretrax.data.corpus.selection import RowCounts, Selection, documents
from pretrax.data.tokenize.encode_shard import TRAIN, Job, batches, encode, text_hash
from pretrax.errors import UserError

MOST_CHARACTERS = 32 << 20  # of a block, unless one document has more


class BlockStart(NamedTuple):
    """Where a block starts."""

    token: int  # tokens of the stream before it
    epoch: int  # epochs before it
    block: int  # blocks of its epoch before it
    part: int  # parts of its epoch before the one in which it starts
    row: int  # rows of that part before it


START = BlockStart(0, 0, 0, 0, 0)


class Block(NamedTuple):
    """The tokens of a block, as in `EncodedDocuments`, and the place of the next one."""

    place: BlockStart
    encoded: np.ndarray
    mask: np.ndarray | None
    following: BlockStart


@dataclass(frozen=True)
class Blocks:
    """The stream of a corpus."""

    corpus: Corpus
    job: Job
    seed: int  # seed of the order of parts and of documents in a block
    n_documents: int  # documents per block; 1: no shuffling at all
    left_out: frozenset[int] = frozenset()  # `text_hash` of the documents to leave out

    def read(self, place: BlockStart) -> Iterator[Block]:
        """Yields the blocks from a place on, without end. Raises UserError if the text is unreadable or empty."""
        parts = parts_of(self.corpus)
        while True:
            empty = place.block == 0
            for block in self._epoch(parts, place):
                yield block
                place, empty = block.following, False
            if empty:
                raise UserError('data.text: no document has any text to train on\n  give more text')
            place = BlockStart(place.token, place.epoch + 1, 0, 0, 0)

    def _epoch(self, parts: Sequence[Part], place: BlockStart) -> Iterator[Block]:
        """The blocks of an epoch from a place on."""
        order = np.arange(len(parts))
        if self.n_documents > 1:
            order = permute(order, len(parts), self.seed, np.array(place.epoch))
        start, waiting, n_characters = place, list[Document](), 0
        for at in range(start.part, len(parts)):
            before = start.row if at == start.part else 0
            counts = RowCounts()
            for document in kept_documents(parts[order[at]], self.corpus.selection, counts, before):
                if self.left_out and text_hash(document.text) in self.left_out:
                    continue
                waiting.append(document)
                n_characters += len(document.text)
                if len(waiting) == self.n_documents or n_characters >= MOST_CHARACTERS:
                    block = self._block(waiting, place, at, before + counts.read)
                    yield block
                    place, waiting, n_characters = block.following, [], 0
        if waiting:
            yield self._block(waiting, place, len(parts), 0)

    def _block(self, waiting: list[Document], place: BlockStart, part: int, row: int) -> Block:
        """The block of some documents; the next one starts at this part and row."""
        order = permute(np.arange(len(waiting)), len(waiting), self.seed, np.array(place.epoch), np.array(place.block))
        encoded, mask = encode_all(self.job, [waiting[number] for number in order.tolist()])
        following = BlockStart(place.token + len(encoded), place.epoch, place.block + 1, part, row)
        return Block(place, encoded, mask, following)


def parts_of(corpus: Corpus) -> list[Part]:
    """The files of a corpus. Reading can start at any row of a file."""
    parts: list[Part] = []
    for file in corpus.files:
        if isinstance(file, HuggingFaceDataset) and file.options.streaming:
            parts += file.files(corpus.selection.fields)
        else:
            parts += whole(file, corpus.selection.fields)
    return parts


def kept_documents(part: Part, selection: Selection, counts: RowCounts, start: int = 0) -> Iterator[Document]:
    """The documents of a part, without those of the first `start` rows."""
    found = documents(part.rows(start), selection, counts, part.exact)
    return (document for document in found if document is not None)


def encode_all(job: Job, texts: Sequence[Document]) -> tuple[np.ndarray, np.ndarray | None]:
    """The tokens of documents, as `encoded` and `mask` of `EncodedDocuments`."""
    made = [encode(job, TRAIN, batch) for batch in batches(texts)]
    masked = any(each.mask is not None for each in made)
    mask = [np.ones(len(each.encoded), bool) if each.mask is None else each.mask for each in made]
    return np.concatenate([each.encoded for each in made]), np.concatenate(mask) if masked else None
