"""Tokenizes a corpus to a flat-tokens directory, once per recipe (text, tokenizer, validation).

An engine (data/tokenize/engines.py) tokenizes the shards of the text (data/tokenize/tokenized_shards.py), and they are
concatenated in order. Finished shards are kept in a hidden directory next to the result until it is complete: after a
kill, the next run with the same recipe tokenizes only the missing shards. The result is the same to the byte for any
number of workers and interruptions.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrax.data.corpus.content import Document
from pretrax.data.corpus.corpus import Corpus, Shard, shards
from pretrax.data.corpus.selection import RowCounts
from pretrax.data.tokenize import sample
from pretrax.data.tokenize.encode_shard import TRAIN, VALIDATION, Job
from pretrax.data.tokenize.engines import Engine, EngineName, InProcess, Processes
from pretrax.data.tokenize.progress import TokenProgress
from pretrax.data.tokenize.tokenized_shards import TokenizedShard, find_shard, read_shard, shard_name
from pretrax.data.tokenizers.encoders import choose_encoder
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokenizers.tokenizer_files import TOKENIZER_JSON
from pretrax.data.tokenizers.tokenizer_training import ModelName, train_and_report
from pretrax.data.tokens.flat_tokens import VERSION, TokenizerIdentity, open_split, refuse_unreadable
from pretrax.data.tokens.flat_tokens_writer import Writer, WrittenMeanwhileError, create
from pretrax.errors import Report, UserError, first_line, system_errors
from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.result import remove_unfinished, result_at
from pretrax.system.atomic import write_file
from pretrax.system.cache import cache_directory
from pretrax.system.cores import usable_cores
from pretrax.system.locks import DirectoryLock, lock_directory

SHARD_BYTES = 32 << 20  # stored bytes of text per shard, the unit of work
# If fewer whole documents than this would be held out, the end of each document is held out instead.
_MIN_HELD_OUT = 8


@dataclass(frozen=True)
class Work:
    """The engine and its workers; `workers` None: one per core, or per CPU of the cluster."""

    engine: EngineName = 'local'
    workers: int | None = None

    def start(self, n_shards: int) -> Engine:
        """The engine for a number of shards."""
        if self.engine == 'ray':
            from pretrax.data.tokenize.engine_ray import Ray

            return Ray(self.workers)
        n_workers = min(self.workers or usable_cores(), n_shards)
        return InProcess() if n_workers <= 1 else Processes(n_workers)


def prepare(
    corpus: Corpus,
    directory: AnyPath,
    say: Report,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    validation: float,
    work: Work | None = None,
    out: AnyPath | None = None,
) -> AnyPath:
    """Tokenizes a text unless this was done before, and returns the flat-tokens directory.

    Args:
        directory: where to write it, under a name with the hash of the recipe.
        tokenizer: the tokenizer; None trains one with at most `vocab_size` tokens.
        validation: fraction of the documents to hold out.
        out: the flat-tokens directory, instead of one in `directory`.

    Raises:
        UserError: the text cannot be read, the files cannot be written, or a split is empty.
    """
    recipe = {
        'text': corpus.fingerprint(),
        'tokenizer': _identity(tokenizer) if tokenizer else f'byte-level BPE of {vocab_size} tokens',
        'validation': validation,
        'version': VERSION,
    }
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    path, named = out or directory / f'tokens-{key[:12]}', out is not None
    if _is_reusable(path, named, recipe, say):
        return path
    if not named and isinstance(path, Path):
        _report_others(path, recipe, say)
    shards_dir = _shards_dir(path, key)
    with _locked(shards_dir, say):
        for left in shards_dir.glob('*.partial-*'):  # left by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        if _is_reusable(path, named, recipe, say):  # the process that held the lock has written it
            return path
        try:
            _Preparation(corpus, shards_dir, say, validation, work or Work()).make(path, tokenizer, vocab_size, recipe)
        except WrittenMeanwhileError:
            if not _is_reusable(path, named, recipe, say):
                raise
        except BaseException:
            kept = len(list(shards_dir.glob('*/counts.json')))
            if kept:
                say(
                    f'tokens: not finished; {kept:,} shards are kept in {shards_dir}, '
                    'and the next run continues with the rest'
                )
            else:
                shutil.rmtree(shards_dir, ignore_errors=True)
            raise
        shutil.rmtree(shards_dir)
    return path


def _identity(tokenizer: Tokenizer) -> str:
    """What the tokens of a text depend on. Without begin tokens, it is what an older pretrax wrote."""
    begin = f', texts begin with {list(tokenizer.begin_of_text)}' if tokenizer.begin_of_text else ''
    return f'{tokenizer.sha256} {tokenizer.end_of_text}{begin}'


def _shards_dir(path: AnyPath, key: str) -> Path:
    """Where the finished shards are kept: next to the result, or on this machine if that is in a bucket."""
    if isinstance(path, Path):
        return path.parent / f'.{path.name}.{key[:12]}.pieces'
    place = hashlib.sha256(str(path).encode()).hexdigest()
    return cache_directory() / 'pieces' / f'.{path.name}.{place[:12]}.{key[:12]}.pieces'


def _locked(shards_dir: Path, say: Report) -> DirectoryLock:
    """Locks the directory of finished shards; waits for another process that works in it."""

    def warn(reason: str) -> None:
        say(f'tokens: {shards_dir} cannot be locked ({reason}); do not tokenize the same text twice at the same time')

    def before_waiting() -> None:
        say(f'tokens: another process works in {shards_dir}; waiting for it')

    with system_errors(f'{shards_dir.parent}: cannot write the tokens'):
        return lock_directory(shards_dir, warn, before_waiting)


def _is_reusable(path: AnyPath, named: bool, recipe: dict[str, Any], say: Report) -> bool:
    if isinstance(path, BucketPath):
        with refuse_unreadable():
            if not (result_at(path) / 'zarr.json').is_file():
                return False
            remove_unfinished(path)
    elif not path.exists():
        return False
    if named and (differs := _difference(path, recipe)):
        raise UserError(f'{path}: exists, and {differs}\n  write to another directory')
    say(f'tokens: reused from {path}: same text, tokenizer and validation')
    return True


def _report_others(path: Path, recipe: dict[str, Any], say: Report) -> None:
    for other in sorted(path.parent.glob('tokens-*')):
        say(f'tokens: {other} {_difference(other, recipe)}; it is kept, and the text is tokenized again')
    for other in sorted(path.parent.glob('.tokens-*.pieces')):
        if not other.name.startswith(f'.{path.name}.'):
            say(f'tokens: {other} is unfinished and has another recipe; remove it if you do not need it')


def _difference(other: AnyPath, recipe: dict[str, Any]) -> str:
    """How an existing directory differs from the recipe; '' if it does not."""
    try:
        theirs = open_split(other, TRAIN).manifest.source
    except UserError as error:
        return f'cannot be used ({first_line(error)})'
    different = [name for name in recipe if recipe[name] != theirs.get(name)]
    return 'has another ' + ' and another '.join(different) if different else ''


class _Preparation:
    """Writes one flat-tokens directory."""

    def __init__(self, corpus: Corpus, shards_dir: Path, say: Report, validation: float, work: Work):
        self.corpus, self.shards_dir, self.say, self.validation = corpus, shards_dir, say, validation
        self._n_shards = shards_for(corpus)
        self.engine = work.start(self._n_shards)
        self.n_documents: int | None = None  # None until they are counted

    @functools.cached_property
    def shards(self) -> list[Shard]:
        return shards(self.corpus, self._n_shards, map=self.engine.map, say=self.say)

    def _documents(self) -> Iterator[Document]:
        """All documents. `corpus.documents` would search for duplicates again."""
        return itertools.chain.from_iterable(shard.documents() for shard in self.shards)

    def make(self, path: AnyPath, tokenizer: Tokenizer | None, vocab_size: int, recipe: dict[str, Any]) -> None:
        with contextlib.closing(self.engine):
            tokenizer = tokenizer or self._trained(vocab_size)
            cut = self._cuts()
            encoder, reason = choose_encoder(tokenizer, (document.text for document in self._documents()))
            self.say(f'tokenizer: encodes with {encoder}: {reason}; by {self.engine.name}')
            assert tokenizer.end_of_text is not None  # `load_tokenizer` requires it
            begin = self._begin(tokenizer)
            job = Job(
                tokenizer.content, begin, tokenizer.end_of_text, encoder, self.validation, cut=cut, name=tokenizer.name
            )
            identity = TokenizerIdentity(
                sha256=tokenizer.sha256,
                vocab_size=tokenizer.vocab_size,
                end_of_text=tokenizer.end_of_text,
                begin_of_text=begin,
            )
            started = time.perf_counter()
            with create(path, identity, tokenizer.content, recipe) as writer:
                found = self._tokenize(job, writer)
                try:
                    self._check(found, writer)
                except UserError:
                    shutil.rmtree(self.shards_dir)  # another run would fail in the same way
                    raise
        self._report(path, writer, time.perf_counter() - started)

    def _trained(self, vocab_size: int) -> Tokenizer:
        """A tokenizer trained on the text; that of an interrupted run if there is one."""
        file = self.shards_dir / TOKENIZER_JSON
        if file.is_file():
            self.say('tokenizer: reused from the interrupted run')
            return Tokenizer(file.read_bytes(), str(file))
        tokenizer, self.n_documents = _train(self.engine, self.shards, self.say, vocab_size, 'bpe')
        write_file(file, tokenizer.content, sync=True)
        return tokenizer

    def _begin(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokens that begin a document. Those of a conversation are written by its template, or not at all."""
        begin = tokenizer.begin_of_text
        if self.corpus.selection.conversations is None or not begin:
            return begin
        first = next(self._documents(), None)
        written = [] if first is None else [token for _, _, token in first.special_tokens or ()]
        if tuple(written[: len(begin)]) == begin:
            return begin
        self.say(f'conversations: the chat template does not begin them with {tokenizer.shown_begin}, so nothing does')
        return ()

    def _cuts(self) -> bool:
        """Whether the text has too few documents to hold out whole documents. Conversations are never cut."""
        if not self.validation or self.corpus.selection.conversations is not None:
            return False
        enough = math.ceil(_MIN_HELD_OUT / self.validation)
        n = self.n_documents
        if n is None:
            n = sum(1 for _ in itertools.islice(self._documents(), enough))
        cut = n * self.validation < _MIN_HELD_OUT
        if cut and n:
            self.say(
                f'validation: {n:,} documents are too few to hold out whole documents, '
                f'so the last {self.validation:.1%} of each is held out'
            )
        return cut

    def _tokenize(self, job: Job, writer: Writer) -> list[TokenizedShard]:
        """Tokenizes the missing shards, and appends each shard as soon as all shards before it are appended."""
        with refuse_unreadable():
            made = {n: shard for n in range(len(self.shards)) if (shard := find_shard(self.shards_dir, n))}
        missing = [(n, shard) for n, shard in enumerate(self.shards) if n not in made]
        for n, _ in missing:  # a damaged directory would block the new one
            shutil.rmtree(self.shards_dir / shard_name(n), ignore_errors=True)
        if made:
            self.say(f'tokens: {len(made):,} of {len(self.shards):,} shards were finished by an earlier run')
        appended: list[TokenizedShard] = []

        def append_ready() -> None:
            while (shard := made.get(len(appended))) is not None:
                for documents in read_shard(self.shards_dir, len(appended), shard):
                    writer.append(
                        documents.split,
                        documents.encoded,
                        documents.mask,
                        n_bytes=documents.n_bytes,
                        predicted_bytes=documents.predicted_bytes,
                    )
                appended.append(shard)

        with TokenProgress(sum(shard.size for shard in self.shards), self.say) as progress:
            for number in made:
                progress.skip(self.shards[number].size)
            append_ready()
            for number, shard in self.engine.tokenize(job, self.shards_dir, missing, progress):
                made[number] = shard
                progress.finished(self.shards[number].size)
                append_ready()
        return appended

    def _check(self, found: list[TokenizedShard], writer: Writer) -> None:
        """Checks that the output has every kept document, and that no split is empty."""
        rows, cut = sum((shard.rows for shard in found), RowCounts()), sum(shard.cut for shard in found)
        assert len(found) == len(self.shards)
        assert rows.read == rows.kept + sum(rows.left_out.values()), rows
        assert rows.kept + cut == sum(counts.documents for counts in writer.counts.values()), (rows, cut)
        for line in rows.lines():
            self.say(line)
        _refuse_empty(rows)
        for split in (TRAIN, VALIDATION) if self.validation else (TRAIN,):
            if split not in writer.counts:
                raise UserError(
                    f'data.validation: {self.validation} of {rows.kept:,} documents leaves {split} empty\n'
                    '  change the fraction, give more text, or disable validation: data.validation=0'
                )
        left_out = dict(sorted(rows.left_out.items()))
        files = self.corpus.found.record() if self.corpus.found.left_out else None
        writer.account(read=rows.read, kept=rows.kept, cut=cut, left_out=left_out, files=files)

    def _report(self, path: AnyPath, writer: Writer, seconds: float) -> None:
        n_tokens = sum(counts.tokens for counts in writer.counts.values())
        for split, counts in writer.counts.items():
            masked = (
                f', {counts.targets:,} of them targets' if counts.targets != counts.tokens - counts.documents else ''
            )
            self.say(
                f'tokens: {split} {counts.documents:,} documents, {counts.tokens:,} tokens{masked}, '
                f'{(counts.bytes or 0) / counts.tokens:.2f} bytes per token'
            )
        self.say(f'prepared: {path} in {seconds:.1f} s, {n_tokens / seconds / 1e6:.2f} M tokens/s')


def train_on_corpus(corpus: Corpus, say: Report, vocab_size: int, model: ModelName, work: Work) -> Tokenizer:
    """Trains a tokenizer on a sample of a corpus."""
    n_shards = shards_for(corpus)
    with contextlib.closing(work.start(n_shards)) as engine:
        return _train(engine, shards(corpus, n_shards, map=engine.map, say=say), say, vocab_size, model)[0]


def _train(
    engine: Engine, shards: Sequence[Shard], say: Report, vocab_size: int, model: ModelName
) -> tuple[Tokenizer, int]:
    """Returns the tokenizer and the number of documents."""
    with TokenProgress(sum(shard.size for shard in shards), say, 'sample') as progress:
        rows, n_bytes, chosen = sample.sample(engine, shards, progress)
    _refuse_empty(rows)
    say(f'tokenizer: trains on {rows.kept:,} documents, {n_bytes / 1e6:,.1f} MB')
    return train_and_report(chosen, vocab_size, say, model), rows.kept


def shards_for(corpus: Corpus) -> int:
    """The number of shards of a corpus; depends only on the corpus."""
    return max(1, math.ceil(corpus.size / SHARD_BYTES))


def _refuse_empty(rows: RowCounts) -> None:
    if not rows.kept:
        raise UserError(f'data.text: no document has any text\n  {rows.lines()[0]}')
