"""The data component `text`: tokenizes text if necessary, and opens the tokens for training."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from pretrax.data.batches.mixture import Member, Mixture, open_mixture
from pretrax.data.batches.source import DataRequest
from pretrax.data.batches.token_source import TokenSource, open_stores, open_tokens
from pretrax.data.chat.templates import read_chat_template
from pretrax.data.corpus.conversations import Conversations
from pretrax.data.corpus.corpus import Corpus
from pretrax.data.corpus.files import TextFile, nearest
from pretrax.data.corpus.hugging_face import HuggingFaceDataset, find_dataset
from pretrax.data.corpus.listing import Listing, check_files
from pretrax.data.corpus.selection import Selection
from pretrax.data.corpus.stdlib import add_stdlib, stdlib_rule
from pretrax.data.options import (
    PREFIX,
    STDLIB,
    DataOptions,
    HuggingFaceOptions,
    MixtureOptions,
    StreamOptions,
    TextOptions,
    TokenOptions,
)
from pretrax.data.stream.open_stream import open_stream
from pretrax.data.stream.stream_source import StreamSource
from pretrax.data.tokenize.prepare import Work, prepare
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokenizers.tokenizer_files import BYTES, TIKTOKEN, contradiction, load_tokenizer
from pretrax.data.tokens.block_files import BlockFiles
from pretrax.data.tokens.token_files import is_flat_tokens, open_held_out, open_token_files
from pretrax.errors import UserError
from pretrax.storage import AnyPath, locate, locate_local
from pretrax.system.software import need_extra


def open_text(request: DataRequest, *, options: DataOptions) -> TokenSource | Mixture | StreamSource:
    """Text, which is tokenized if necessary, or tokens; or a mixture of several sources.

    Raises UserError if the options, the text or the tokens are wrong.
    """
    if isinstance(options, MixtureOptions):
        return _open_mixture(request, options)
    if isinstance(options, TokenOptions):
        return _open_tokens(options, request)
    if isinstance(options, StreamOptions):
        return _open_stream(options, request)
    return _open_text(options, request)


def check_text(options: DataOptions) -> int | None:
    """Checks that the tokenizer can be used, and then that the text or the tokens exist. Reads none of them.

    Returns the number of token ids; None: only the text or the tokens tell.

    Raises UserError as `open_text` does.
    """
    if isinstance(options, MixtureOptions):
        sizes = {check_text(item) for item in options.mixture}
        return sizes.pop() if len(sizes) == 1 else None
    tokenizer = None
    if options.tokenizer is not None:
        begin = None if isinstance(options, TokenOptions) else options.begin_of_text
        tokenizer = load_tokenizer(options.tokenizer, begin)
    if isinstance(options, TokenOptions):
        for path in map(locate, filter(None, (options.tokens, options.validation_tokens))):
            if isinstance(path, Path) and not path.exists():
                raise UserError(f'{path}: no such file or directory\n  {nearest(path)}')
        return options.vocab_size if tokenizer is None else tokenizer.vocab_size
    if tokenizer is not None:
        _check_vocab_size(options, tokenizer.vocab_size, str(options.tokenizer))
    if isinstance(options, TextOptions):
        _conversations(options)
    for spec in options.specs:
        if spec.startswith(PREFIX):
            need_extra('datasets', spec, 'datasets')
        elif spec != STDLIB:
            check_files(spec)
    return options.vocab_size if tokenizer is None else tokenizer.vocab_size


def _open_text(options: TextOptions, request: DataRequest, corpus: Corpus | None = None) -> TokenSource:
    directory = tokenize_text(options, request.directory, request.say, corpus=corpus)
    return open_tokens(directory, request, options.packing, _cache(options, request))


def tokenize_text(
    options: TextOptions | StreamOptions,
    directory: AnyPath,
    say: Callable[[str], None],
    out: AnyPath | None = None,
    corpus: Corpus | None = None,
) -> AnyPath:
    """Tokenizes the text unless this was done before; returns its directory, `out` or a new one in `directory`.

    `corpus` is the text, if it was found before.
    """
    if isinstance(options, StreamOptions):
        raise UserError(
            'data.streaming: true tokenizes the text while the run trains\n'
            '  to tokenize it before, set data.streaming=false'
        )
    tokenizer = None if options.tokenizer is None else _load_tokenizer(options, options.tokenizer, say)
    return prepare(
        corpus or find_corpus(options, say),
        directory,
        say,
        tokenizer=tokenizer,
        vocab_size=options.vocab_size or 0 if tokenizer is None else tokenizer.vocab_size,
        validation=options.validation,
        work=Work(options.engine, options.workers),
        out=out,
    )


def _load_tokenizer(options: TextOptions | StreamOptions, name: str, say: Callable[[str], None]) -> Tokenizer:
    tokenizer = load_tokenizer(name, options.begin_of_text)
    _check_vocab_size(options, tokenizer.vocab_size, name)
    end, chosen = tokenizer.end_of_text, options.begin_of_text is not None
    begins = f'{tokenizer.shown_begin} begins documents'
    begins += (
        ', as data.begin_of_text says' if chosen else ', as tokenizer.json says' if tokenizer.begin_of_text else ''
    )
    if not chosen and name != BYTES and not name.startswith(TIKTOKEN):
        place = locate_local(name)
        begins += contradiction(place if place.is_dir() else place.parent, tokenizer)
    ends = '' if end is None else f'; {tokenizer.decode([end])} (id {end}, from {tokenizer.end_from}) ends documents'
    say(f'tokenizer: {name}, {tokenizer.vocab_size:,} tokens; {begins}{ends}')
    return tokenizer


def _open_stream(options: StreamOptions, request: DataRequest) -> StreamSource:
    """Opens text that is tokenized while the run trains."""
    assert options.tokenizer is not None
    tokenizer = _load_tokenizer(options, options.tokenizer, request.say)
    split = options.validation_split
    held_out = None
    if split is not None:
        rows = options.hugging_face or HuggingFaceOptions.model_validate({})
        if rows.split == split:
            request.say(f'validation: split {split} is also the text to train on, so its loss is not that of new text')
        rows = rows.model_copy(update={'split': split})
        held_out = find_corpus(options.model_copy(update={'text': options.datasets, 'hugging_face': rows}), request.say)
    return open_stream(
        find_corpus(options, request.say),
        held_out,
        tokenizer,
        request,
        shuffle_buffer=options.shuffle_buffer,
        validation_documents=options.validation_documents,
    )


def _open_tokens(options: TokenOptions, request: DataRequest) -> TokenSource:
    """Opens tokens that pretrax or another tool has prepared."""
    path = locate(options.tokens)
    flat = is_flat_tokens(path)
    open_files = functools.partial(
        open_token_files,
        say=request.say,
        end_of_text=options.end_of_text,
        dtype=options.dtype,
        directory=request.directory,
        cache=_cache(options, request),
    )
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    files = open_files(path, tokenizer=tokenizer, vocab_size=options.vocab_size)
    if flat or files.tokenizer:
        _check_vocab_size(options, files.identity.vocab_size, str(path) if flat else str(options.tokenizer))
    held_out = files.splits.get('validation')
    if options.validation_tokens is not None:
        if held_out is not None:
            request.say(f'validation: data.validation_tokens instead of the validation split of {path}')
        held_out = open_held_out(locate(options.validation_tokens), files, open_files)
    if 'train' not in files.splits:
        raise UserError(f'{path}: no split train\n  it has {", ".join(files.splits)}')
    return open_stores(files.splits['train'], held_out, files.tokenizer, request, options.packing)


def _cache(options: TextOptions | TokenOptions, request: DataRequest) -> BlockFiles | None:
    """Keeps tokens that are read from a bucket on this machine."""
    return BlockFiles(int(options.cache_gib * 2**30), request.say) if options.cache_gib else None


def _open_mixture(request: DataRequest, options: MixtureOptions) -> Mixture:
    members, corpora = [], dict[str, tuple[Corpus, float]]()
    for item in options.mixture:
        own = dataclasses.replace(
            request,
            directory=request.directory / item.name,
            say=lambda text, name=item.name: request.say(f'{name}: {text}'),
        )
        if isinstance(item, TextOptions):
            corpus = find_corpus(item, own.say)
            corpora[item.name] = corpus, item.validation
            source = _open_text(item, own, corpus)
        else:
            source = _open_tokens(item, own)
        members.append(Member(item.name, item.schedule, source))
    for (name, (one, held_out)), (other, (second, fraction)) in itertools.combinations(corpora.items(), 2):
        if n := one.shared_files(second):
            leak = '' if held_out == fraction else ', and trains on documents that the other holds out for validation'
            request.say(f'mixture: {name} and {other} have {n:,} files in common; each reads them{leak}')
    return open_mixture(members, options.exhausted, request)


def find_corpus(options: TextOptions | StreamOptions, say: Callable[[str], None]) -> Corpus:
    """The files and datasets that `text` names, each once, with the selection of their rows."""
    sources: dict[str, Sequence[TextFile | HuggingFaceDataset]] = {}
    listing = Listing()
    for spec in dict.fromkeys(options.specs):
        if spec.startswith(PREFIX):
            rows = options.hugging_face or HuggingFaceOptions.model_validate({})
            dataset = find_dataset(spec, rows.model_copy(update={'streaming': True}) if options.streaming else rows)
            say(f'text: {dataset}, {dataset.description}' + '; it is read once' * (str(dataset) in sources))
            sources[str(dataset)] = [dataset]
            continue
        sources[spec], counts = add_stdlib(listing) if spec == STDLIB else listing.add(spec)
        size = sum(file.size for file in sources[spec]) / 1e6
        say(f'text: {stdlib_rule() if spec == STDLIB else spec}: {len(sources[spec]):,} files, {size:,.1f} MB')
        for line in counts.lines(f'text: {spec}'):
            say(line)
    selection = Selection(
        field=options.field or 'text',
        prompt_field=options.prompt_field,
        answer_field=options.answer_field,
        filters=tuple(options.filters or ()),
        min_characters=options.min_characters or 0,
        max_characters=options.max_characters,
        on_error=options.on_error,
    )
    if isinstance(options, TextOptions):
        selection = dataclasses.replace(
            selection,
            deduplicate=options.deduplicate,
            near_duplicates=options.near_duplicates,
            conversations=_conversations(options),
        )
    corpus = Corpus([file for files in sources.values() for file in files], selection, listing.counts)
    if selection.key_for_rows and not corpus.has_rows:
        raise UserError(f'data.{selection.key_for_rows} needs rows with fields, but every file is one document')
    if selection.deduplicate:
        say('text: all text is read twice, the first time to find duplicates')
    if selection.near_duplicates:
        say('text: all text is read once more, to find near-duplicates')
    if corpus.known_by != 'content':
        say(f'text: changes are detected by {corpus.known_by}')
    return corpus


def _conversations(options: TextOptions) -> Conversations | None:
    """How the messages of a row are rendered; None if rows have text."""
    if options.messages_field is None:
        return None
    name = options.tokenizer
    assert name is not None
    tokenizer, file = load_tokenizer(name), options.chat_template
    place = locate_local(name)
    directory = place if place.is_dir() else place.parent
    template = read_chat_template(directory, cast(Any, tokenizer), None if file is None else locate(file))
    if template is None:
        raise UserError(f'data.tokenizer: {name} has no chat template\n  give one: data.chat_template=FILE')
    return Conversations(
        options.messages_field,
        template.source,
        tuple(sorted(template.variables.items())),
        tuple(sorted(tokenizer.special_tokens.items())),
        template.name,
    )


def _check_vocab_size(options: TextOptions | StreamOptions | TokenOptions, found: int, where: str) -> None:
    if options.vocab_size not in (None, found):
        raise UserError(
            f'data.vocab_size: {options.vocab_size:,} was given, but {where} has {found:,}\n'
            f'  set data.vocab_size={found} or remove it'
        )
