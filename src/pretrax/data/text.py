"""The data component `text`: from what a configuration says about text to a source of batches.

    data: {text: stdlib}                               # the standard library's sources
    data: {text: 'books/*.txt', validation: 0.01}      # files, directories, globs, or a list of them
    data: {tokens: runs/mine/data/tokens-0a1b2c3d4e5f} # already tokenised
    data: {tokens: train.bin}                          # by another tool: nanoGPT, Modalities, Megatron, seqax

The libraries behind it are imported when a source is opened, so that reading a configuration costs none of them.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pretrax.data.selection import Selection
from pretrax.errors import UserError

if TYPE_CHECKING:
    from pretrax.data.corpus import Corpus
    from pretrax.data.source import DataRequest
    from pretrax.data.token_source import TokenSource

STDLIB = 'stdlib'
_OF_TOKENS = ('validation_tokens', 'end_of_text')  # keys that mean nothing without `tokens`


class TextOptions(BaseModel):
    """Text to train on, or tokens made of it before. null means: not given."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    text: str | list[str] | None = Field(
        STDLIB, description="'stdlib' (the Python standard library's sources), a file, a directory, a glob, or a list"
    )
    tokens: str | None = Field(
        None, description='a prepared flat-tokens directory, or the token file of another tool, instead of text'
    )
    validation_tokens: str | None = Field(None, description='tokens to hold out, where those of `tokens` come without')
    end_of_text: int | None = Field(None, ge=0, description='the id that ends a document in a nanoGPT .bin')
    field: str | None = Field('text', description='the field of a .jsonl line that holds the text')
    tokenizer: str | None = Field(
        None,
        description="a tokenizer.json, a directory that holds one, 'tiktoken:NAME' or 'bytes'; null trains a "
        'byte-level BPE on the text',
    )
    vocab_size: int | None = Field(
        4096, ge=257, description='tokens of the tokenizer to train; of a given tokenizer: what it must have'
    )
    validation: float | None = Field(0.05, ge=0, lt=1, description='fraction of the documents to hold out; 0: none')

    packing: Literal['concatenate', 'whole', 'best_fit'] = Field(
        'concatenate',
        description='rows: windows of all the text; whole documents in order, with padding; or fitted best into rows',
    )

    @model_validator(mode='before')
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """Defaults depend on what is given: prepared tokens have no text, and a given tokenizer has its own size."""
        if not isinstance(given, dict):
            return given
        given = {name: value for name, value in given.items() if value is not None}
        if 'tokens' in given:
            return dict.fromkeys(set(cls.model_fields) - {'packing'}) | given
        return {'vocab_size': None} | given if 'tokenizer' in given else given

    @model_validator(mode='after')
    def _exclusive(self) -> Self:
        ignored = [name for name in ('text', 'field', 'validation') if getattr(self, name) is not None]
        if self.tokens is not None and ignored:
            raise ValueError(
                f'data.tokens is already tokenised text, and {", ".join(ignored)} would change nothing; '
                + ' '.join(f'data.{name}=null' for name in ignored)
                + ' removes what the configuration says'
            )
        if self.tokens is None and (given := [name for name in _OF_TOKENS if getattr(self, name) is not None]):
            raise ValueError(f'{", ".join(given)} is of token files, and data.tokens names none')
        if self.text is not None and not (self.text and all([self.text] if isinstance(self.text, str) else self.text)):
            raise ValueError("text names nothing; expected 'stdlib', a path, or a list of paths")
        return self


def open_text(request: 'DataRequest', *, options: TextOptions) -> 'TokenSource':
    """Tokenise the text unless that was done before, and open the tokens. Raises UserError for what cannot be read."""
    from pretrax.data.prepare import prepare
    from pretrax.data.token_source import open_tokens
    from pretrax.data.tokenizer_files import load_tokenizer

    if options.tokens is not None:
        return _open_tokens(options, request)
    tokenizer = None
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer)
        _check_vocab_size(options, tokenizer.vocab_size, options.tokenizer)
        request.say(f'tokenizer: {options.tokenizer}, {tokenizer.vocab_size:,} tokens')
    corpus = _find_corpus(options, request)
    directory = prepare(
        corpus,
        request.directory,
        request.say,
        tokenizer=tokenizer,
        vocab_size=_given(options.vocab_size) if tokenizer is None else tokenizer.vocab_size,
        validation=_given(options.validation),
    )
    return open_tokens(directory, request, options.packing)


def _open_tokens(options: TextOptions, request: 'DataRequest') -> 'TokenSource':
    """Tokens made before, by pretrax or another tool."""
    from pretrax.data.token_files import is_flat_tokens, open_held_out, open_token_files
    from pretrax.data.token_source import open_stores
    from pretrax.data.tokenizer_files import load_tokenizer

    path = Path(_given(options.tokens)).expanduser()
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
            request.say(f'validation: data.validation_tokens, and not the validation split of {path}')
        told, place = options.end_of_text, Path(options.validation_tokens).expanduser()
        held_out = open_held_out(place, files, request.say, end_of_text=told, directory=directory)
    if 'train' not in files.splits:
        raise UserError(f'{path}: no split train\n  it has {", ".join(files.splits)}')
    return open_stores(files.splits['train'], held_out, files.tokenizer, request, options.packing)


def _find_corpus(options: TextOptions, request: 'DataRequest') -> 'Corpus':
    from pretrax.data.corpus import Corpus
    from pretrax.data.files import TextFile, find_files
    from pretrax.data.stdlib import stdlib_files, stdlib_rule

    found: dict[str, TextFile] = {}
    specs = _given(options.text)
    for spec in [specs] if isinstance(specs, str) else specs:
        files = stdlib_files() if spec == STDLIB else find_files(spec)
        found |= {str(file.path): file for file in files}
        size = sum(file.size for file in files) / 1e6
        request.say(f'text: {stdlib_rule() if spec == STDLIB else spec}: {len(files):,} files, {size:,.1f} MB')
    if options.field != 'text' and all(file.kind in ('text', 'python') for file in found.values()):
        raise UserError(f'data.field: {options.field!r} names a field of rows, and every file is one document')
    return Corpus(list(found.values()), Selection(field=_given(options.field)))


def _check_vocab_size(options: TextOptions, found: int, where: str) -> None:
    if options.vocab_size not in (None, found):
        raise UserError(
            f'data.vocab_size: {options.vocab_size:,} was given, and {where} has {found:,}\n'
            f'  write data.vocab_size={found} or leave it out'
        )


def _given[T](value: T | None) -> T:
    assert value is not None  # TextOptions leaves these out only where `tokens` is given
    return value
