"""The data component `text`: tokenizes text if necessary, and opens the tokens for training."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import cast

from pretrax.data.batches.mixture import Member, Mixture, open_mixture
from pretrax.data.batches.source import DataRequest
from pretrax.data.batches.token_source import TokenSource, open_stores, open_tokens
from pretrax.data.corpus.corpus import Corpus
from pretrax.data.corpus.files import TextFile, find_files
from pretrax.data.corpus.hugging_face import HuggingFaceDataset, find_dataset
from pretrax.data.corpus.selection import Selection
from pretrax.data.corpus.stdlib import stdlib_files, stdlib_rule
from pretrax.data.options import PREFIX, STDLIB, HuggingFaceOptions, TextOptions
from pretrax.data.tokenize.prepare import Work, prepare
from pretrax.data.tokenizers.tokenizer_files import load_tokenizer
from pretrax.data.tokens.remote_path import token_path
from pretrax.data.tokens.token_files import is_flat_tokens, open_held_out, open_token_files
from pretrax.errors import UserError


def open_text(request: DataRequest, *, options: TextOptions) -> TokenSource | Mixture:
    """Opens the tokens that the options describe; tokenizes text if necessary. Raises UserError on bad input."""
    if options.mixture is not None:
        return _open_mixture(request, options)
    if options.tokens is not None:
        return _open_tokens(options, request)
    directory = tokenize_text(options, request.directory, request.say)
    return open_tokens(directory, request, options.packing)


def tokenize_text(options: TextOptions, directory: Path, say: Callable[[str], None], out: Path | None = None) -> Path:
    """Tokenizes the text unless this was done before; returns its directory, `out` or a new one in `directory`."""
    tokenizer = None
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer)
        _check_vocab_size(options, tokenizer.vocab_size, options.tokenizer)
        say(f'tokenizer: {options.tokenizer}, {tokenizer.vocab_size:,} tokens')
    return prepare(
        find_corpus(options, say),
        directory,
        say,
        tokenizer=tokenizer,
        vocab_size=_given(options.vocab_size) if tokenizer is None else tokenizer.vocab_size,
        validation=_given(options.validation),
        work=Work(_given(options.engine), options.workers),
        out=out,
    )


def _open_tokens(options: TextOptions, request: DataRequest) -> TokenSource:
    """Opens tokens that pretrax or another tool has prepared."""
    path = token_path(_given(options.tokens))
    directory, flat = request.directory, is_flat_tokens(path)
    files = open_token_files(
        path,
        request.say,
        tokenizer=None if options.tokenizer is None else load_tokenizer(options.tokenizer),
        vocab_size=options.vocab_size,
        end_of_text=options.end_of_text,
        directory=directory,
    )
    if flat or files.tokenizer:
        _check_vocab_size(options, files.identity.vocab_size, str(path) if flat else str(options.tokenizer))
    held_out = files.splits.get('validation')
    if options.validation_tokens is not None:
        if held_out is not None:
            request.say(f'validation: data.validation_tokens instead of the validation split of {path}')
        held_out_path = Path(options.validation_tokens).expanduser()
        held_out = open_held_out(
            held_out_path, files, request.say, end_of_text=options.end_of_text, directory=directory
        )
    if 'train' not in files.splits:
        raise UserError(f'{path}: no split train\n  it has {", ".join(files.splits)}')
    return open_stores(files.splits['train'], held_out, files.tokenizer, request, options.packing)


def _open_mixture(request: DataRequest, options: TextOptions) -> Mixture:
    members = []
    for item in _given(options.mixture):
        own = dataclasses.replace(
            request,
            directory=request.directory / item.name,
            say=lambda text, name=item.name: request.say(f'{name}: {text}'),
        )
        members.append(Member(item.name, item.schedule, cast(TokenSource, open_text(own, options=item))))
    return open_mixture(members, options.exhausted or 'repeat', request)


def find_corpus(options: TextOptions, say: Callable[[str], None]) -> Corpus:
    """The files and datasets that `text` names, with the selection of their rows."""
    found: dict[str, TextFile | HuggingFaceDataset] = {}
    for spec in options.specs:
        if spec.startswith(PREFIX):
            dataset = find_dataset(spec, options.hugging_face or HuggingFaceOptions.model_validate({}))
            found[str(dataset)] = dataset
            say(f'text: {dataset}, {dataset.description}')
            continue
        files = stdlib_files() if spec == STDLIB else find_files(spec)
        found |= {str(file.path): file for file in files}
        size = sum(file.size for file in files) / 1e6
        say(f'text: {stdlib_rule() if spec == STDLIB else spec}: {len(files):,} files, {size:,.1f} MB')
    selection = Selection(
        field=options.field or 'text',
        prompt_field=options.prompt_field,
        answer_field=options.answer_field,
        filters=tuple(options.filters or ()),
        deduplicate=_given(options.deduplicate),
        min_characters=options.min_characters or 0,
        max_characters=options.max_characters,
        on_error=_given(options.on_error),
    )
    corpus = Corpus(list(found.values()), selection)
    if selection.key_for_rows and not corpus.has_rows:
        raise UserError(f'data.{selection.key_for_rows} needs rows with fields, but every file is one document')
    if selection.deduplicate:
        say('text: all text is read twice, the first time to find duplicates')
    if corpus.known_by != 'content':
        say(f'text: changes are detected by {corpus.known_by}')
    return corpus


def _check_vocab_size(options: TextOptions, found: int, where: str) -> None:
    if options.vocab_size not in (None, found):
        raise UserError(
            f'data.vocab_size: {options.vocab_size:,} was given, but {where} has {found:,}\n'
            f'  set data.vocab_size={found} or remove it'
        )


def _given[T](value: T | None) -> T:
    assert value is not None  # TextOptions sets this unless `tokens` is given
    return value
