"""A corpus -> a directory of flat-tokens, made once for each recipe (text, tokenizer, validation).

The text is tokenised in shards, each into a piece (data/tokenize/pieces.py), by whatever engine there is (data/tokenize/engines.py). The
pieces are laid end to end while they are made. They lie in a hidden directory beside the result: when a run is killed,
the next one with the same recipe makes only those that are missing. Neither this nor the number of workers changes a
byte of the result.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pretrax.data.corpus.corpus import Corpus, Counts, Shard, shards
from pretrax.data.corpus.document import Document
from pretrax.data.tokenize import sample
from pretrax.data.tokenize.engines import Engine, EngineName, in_order, make_engine
from pretrax.data.tokenize.pieces import TRAIN, VALIDATION, Job, Piece, find_piece, piece_name, read_piece
from pretrax.data.tokenize.progress import TokenProgress
from pretrax.data.tokenizers.encoders import choose_encoder
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokenizers.tokenizer_files import TOKENIZER_JSON
from pretrax.data.tokenizers.tokenizer_training import ModelName, train_and_say
from pretrax.data.tokens.flat_tokens import VERSION, TokenizerIdentity, open_split
from pretrax.data.tokens.flat_tokens_writer import Writer, create
from pretrax.errors import UserError
from pretrax.machine.atomic import write_file
from pretrax.machine.locks import lock_directory

SHARD_BYTES = 32 << 20  # of the text as it is stored: what a worker takes at a time
# Where fewer whole documents than this would be held out, the end of each document is held out instead.
_FEWEST_HELD_OUT = 8

type Say = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """Who tokenises: `workers` None is every core, or every CPU of the cluster."""

    engine: EngineName = 'local'
    workers: int | None = None


def prepare(
    corpus: Corpus,
    directory: Path,
    say: Say,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    validation: float,
    work: Work | None = None,
    place: Path | None = None,
) -> Path:
    """The flat-tokens directory of this text: that of an earlier call, or a new one.

    Args:
        directory: it lies here, named by the hash of its recipe.
        tokenizer: the one to use; None trains one with at most vocab_size tokens.
        validation: fraction of the documents to hold out.
        place: it lies here instead.
    """
    recipe = {
        'text': corpus.fingerprint(),
        'tokenizer': f'{tokenizer.sha256} {tokenizer.end_of_text}'
        if tokenizer
        else f'byte-level BPE of {vocab_size} tokens',
        'validation': validation,
        'version': VERSION,
    }
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    place, named = place or directory / f'tokens-{key[:12]}', place is not None
    if _is_there(place, named, recipe, say):
        return place
    if not named:
        _say_others(place, recipe, say)
    pieces = place.parent / f'.{place.name}.{key[:12]}.pieces'
    with _locked(pieces, say):
        for left in pieces.glob('*.partial-*'):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        if _is_there(place, named, recipe, say):  # by now, from the process that was waited for
            return place
        try:
            _Preparation(corpus, pieces, say, validation, work or Work()).make(place, tokenizer, vocab_size, recipe)
        except BaseException:
            kept = len(list(pieces.glob('*/counts.json')))
            if kept:
                say(f'tokens: not finished; {kept:,} shards are kept in {pieces}, and the next run goes on from there')
            else:
                shutil.rmtree(pieces, ignore_errors=True)
            raise
        shutil.rmtree(pieces)
    return place


def _locked(pieces: Path, say: Say) -> IO[str]:
    """The lock of the directory of pieces; waits for another process that works in it."""

    def warn(reason: str) -> None:
        say(f'tokens: {pieces} cannot be locked ({reason}); do not tokenise the same text twice at the same time')

    def before_waiting() -> None:
        say(f'tokens: another process works in {pieces}; waiting for it')

    try:
        return lock_directory(pieces, warn, before_waiting)
    except OSError as error:
        raise UserError(f'{pieces.parent}: cannot write the tokens: {error.strerror}') from error


def _is_there(place: Path, named: bool, recipe: dict[str, Any], say: Say) -> bool:
    if not place.exists():
        return False
    if named and (differs := _difference(place, recipe)):
        raise UserError(f'{place}: is there, and {differs}\n  remove it, or write to another directory')
    say(f'tokens: reused from {place}: same text, tokenizer and validation')
    return True


def _say_others(place: Path, recipe: dict[str, Any], say: Say) -> None:
    for other in sorted(place.parent.glob('tokens-*')):
        say(f'tokens: {other} {_difference(other, recipe)}; it stays, and the text is tokenised afresh')
    for other in sorted(place.parent.glob('.tokens-*.pieces')):
        if not other.name.startswith(f'.{place.name}.'):
            say(f'tokens: {other} was begun with another recipe and is not finished; if it is not needed, remove it')


def _difference(other: Path, recipe: dict[str, Any]) -> str:
    """How what is there differs from what the recipe makes; '' where it does not."""
    try:
        theirs = open_split(other, TRAIN).manifest.source
    except UserError as error:
        return f'is of no use ({str(error).splitlines()[0]})'
    different = [name for name in recipe if recipe[name] != theirs.get(name)]
    return 'is of another ' + ' and '.join(different) if different else ''


class _Preparation:
    """One directory in the making."""

    def __init__(self, corpus: Corpus, pieces: Path, say: Say, validation: float, work: Work):
        self.corpus, self.pieces, self.say, self.validation = corpus, pieces, say, validation
        self._n_shards = shards_for(corpus)
        self.engine: Engine = make_engine(work.engine, work.workers, self._n_shards)
        self.n_documents: int | None = None  # where they were counted

    @functools.cached_property
    def shards(self) -> list[Shard]:
        return _cut_in_shards(self.corpus, self._n_shards, self.engine)

    def _documents(self) -> Iterator[Document]:
        """All of them. `corpus.documents` would look for duplicates once more."""
        return itertools.chain.from_iterable(shard.documents() for shard in self.shards)

    def make(self, place: Path, tokenizer: Tokenizer | None, vocab_size: int, recipe: dict[str, Any]) -> None:
        with contextlib.closing(self.engine):
            tokenizer = tokenizer or self._trained(vocab_size)
            cut = self._cuts()
            encoder, reason = choose_encoder(tokenizer, (document.text for document in self._documents()))
            self.say(f'tokenizer: encodes through {encoder}: {reason}; by {self.engine.name}')
            job = Job(tokenizer.content, tokenizer.end_of_text, encoder, self.validation, cut)
            identity = TokenizerIdentity(
                sha256=tokenizer.sha256, vocab_size=tokenizer.vocab_size, end_of_text=tokenizer.end_of_text
            )
            started = time.perf_counter()
            with create(place, identity, tokenizer.content, recipe) as writer:
                found = self._lay(job, writer)
                try:
                    self._check(found, writer)
                except UserError:
                    shutil.rmtree(self.pieces)  # another run would come to the same
                    raise
        self._report(place, writer, time.perf_counter() - started)

    def _trained(self, vocab_size: int) -> Tokenizer:
        """A tokenizer of the text; that of a run which was interrupted, if there was one."""
        file = self.pieces / TOKENIZER_JSON
        if file.is_file():
            self.say('tokenizer: trained by the run that was interrupted')
            return Tokenizer(file.read_bytes(), str(file))
        tokenizer, self.n_documents = _train(self.engine, self.shards, self.say, vocab_size, 'bpe')
        write_file(file, tokenizer.content, sync=True)
        return tokenizer

    def _cuts(self) -> bool:
        """Whether there are too few documents to hold out whole ones."""
        if not self.validation:
            return False
        enough = math.ceil(_FEWEST_HELD_OUT / self.validation)
        n = self.n_documents
        if n is None:
            n = sum(1 for _ in itertools.islice(self._documents(), enough))
        cut = n * self.validation < _FEWEST_HELD_OUT
        if cut and n:
            self.say(
                f'validation: {n:,} documents are too few to hold out whole ones, '
                f'so the last {self.validation:.1%} of each is held out'
            )
        return cut

    def _lay(self, job: Job, writer: Writer) -> list[Piece]:
        """Make the pieces that are missing, and lay all of them end to end as soon as those before are there."""
        made = {n: piece for n in range(len(self.shards)) if (piece := find_piece(self.pieces, n))}
        missing = [(n, shard) for n, shard in enumerate(self.shards) if n not in made]
        for n, _ in missing:  # what a disk lost of a piece must not stand in the way of a new one
            shutil.rmtree(self.pieces / piece_name(n), ignore_errors=True)
        if made:
            self.say(f'tokens: {len(made):,} of {len(self.shards):,} shards were finished before')
        laid: list[Piece] = []

        def lay() -> None:
            while (piece := made.get(len(laid))) is not None:
                for block in read_piece(self.pieces, len(laid), piece):
                    writer.append_encoded(
                        block.split, block.encoded, block.mask,
                        n_bytes=block.n_bytes, predicted_bytes=block.predicted_bytes,
                    )  # fmt: skip
                laid.append(piece)

        with TokenProgress(sum(shard.size for shard in self.shards), self.say) as progress:
            for number in made:
                progress.skip(self.shards[number].size)
            lay()
            for number, piece in self.engine.pieces(job, self.pieces, missing, progress):
                made[number] = piece
                progress.finished(self.shards[number].size)
                lay()
        return laid

    def _check(self, found: list[Piece], writer: Writer) -> None:
        """Every document in is a document out, and no split is empty."""
        rows, cut = sum((piece.rows for piece in found), Counts()), sum(piece.cut for piece in found)
        assert len(found) == len(self.shards)
        assert rows.read == rows.kept + sum(rows.left_out.values()), rows
        assert rows.kept + cut == sum(counts.documents for counts in writer.counts.values()), (rows, cut)
        for line in rows.lines():
            self.say(line)
        _refuse_empty(rows)
        for split in (TRAIN, VALIDATION) if self.validation else (TRAIN,):
            if split not in writer.counts:
                raise UserError(
                    f'data.validation: {self.validation} of {rows.kept:,} documents leaves {split} with nothing\n'
                    '  change the fraction, give more text, or hold nothing out: data.validation=0'
                )
        writer.account(read=rows.read, kept=rows.kept, cut=cut, left_out=dict(sorted(rows.left_out.items())))

    def _report(self, place: Path, writer: Writer, seconds: float) -> None:
        n_tokens = sum(counts.tokens for counts in writer.counts.values())
        for split, counts in writer.counts.items():
            masked = (
                f', {counts.targets:,} of them targets' if counts.targets != counts.tokens - counts.documents else ''
            )
            self.say(
                f'tokens: {split} {counts.documents:,} documents, {counts.tokens:,} tokens{masked}, '
                f'{(counts.bytes or 0) / counts.tokens:.2f} bytes a token'
            )
        self.say(f'prepared: {place} in {seconds:.1f} s, {n_tokens / seconds / 1e6:.2f} M tokens/s')


def train_on_corpus(corpus: Corpus, say: Say, vocab_size: int, model: ModelName, work: Work) -> Tokenizer:
    """A tokenizer trained on a sample of a corpus."""
    n_shards = shards_for(corpus)
    with contextlib.closing(make_engine(work.engine, work.workers, n_shards)) as engine:
        return _train(engine, _cut_in_shards(corpus, n_shards, engine), say, vocab_size, model)[0]


def _train(
    engine: Engine, shards: Sequence[Shard], say: Say, vocab_size: int, model: ModelName
) -> tuple[Tokenizer, int]:
    """The tokenizer, and how many documents there are."""
    with TokenProgress(sum(shard.size for shard in shards), say, 'sample') as progress:
        rows, n_bytes, chosen = sample.sample(engine, shards, progress)
    _refuse_empty(rows)
    say(f'tokenizer: trains on {rows.kept:,} documents, {n_bytes / 1e6:,.1f} MB')
    return train_and_say(chosen, vocab_size, say, model), rows.kept


def shards_for(corpus: Corpus) -> int:
    """In how many shards a corpus is tokenised; depends on nothing else."""
    return max(1, math.ceil(corpus.size / SHARD_BYTES))


def _cut_in_shards(corpus: Corpus, n_shards: int, engine: Engine) -> list[Shard]:
    def mapped(function: Callable, items: Sequence[Shard]) -> Iterator[Any]:
        calls = [(function, item) for item in items]
        yield from in_order(engine, sample.without_progress, calls, lambda *_: None)

    return shards(corpus, n_shards, map=mapped)  # pyright: ignore[reportArgumentType]


def _refuse_empty(rows: Counts) -> None:
    if not rows.kept:
        raise UserError(f'data.text: no document holds any text\n  {rows.lines()[0]}')
