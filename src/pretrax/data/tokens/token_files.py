"""Opens token files of any format: their splits and their tokenizer."""

import dataclasses
from collections.abc import Callable

from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokens.block_files import BlockFiles
from pretrax.data.tokens.flat_tokens import (
    FORMAT,
    TOKENIZER_FILE,
    VERSION,
    TokenizerIdentity,
    open_split,
    read_tokenizer_json,
    refuse_unreadable,
    splits,
)
from pretrax.data.tokens.foreign import find_layouts, open_layouts
from pretrax.data.tokens.foreign_layout import NANOGPT, IdType
from pretrax.data.tokens.nanogpt_meta import find_meta
from pretrax.data.tokens.token_store import TokenStore
from pretrax.errors import Report, UserError
from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.result import result_at

_LOOKED_AT = 32  # documents, to see what begins them


@dataclasses.dataclass(frozen=True)
class TokenFiles:
    """The splits of a path, open for reading: 'train' first, then usually 'validation'."""

    path: AnyPath
    format: str
    splits: dict[str, TokenStore]
    identity: TokenizerIdentity
    tokenizer: Tokenizer | None


@refuse_unreadable()
def is_flat_tokens(path: AnyPath) -> bool:
    """Whether a path is read as flat-tokens: a directory with a zarr.json (zarr version 3), or any path in a bucket."""
    return isinstance(path, BucketPath) or (result_at(path) / 'zarr.json').is_file()


@refuse_unreadable()
def open_token_files(
    path: AnyPath,
    say: Report,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
    dtype: IdType | None = None,
    directory: AnyPath | None = None,
    cache: BlockFiles | None = None,
) -> TokenFiles:
    """Opens token files of any known format, and prints the format.

    Args:
        path: a file, a directory, or flat-tokens in a bucket.
        tokenizer: for files that come without their tokenizer.
        vocab_size: for files that do not have it; None: that of the tokenizer, otherwise the largest id plus 1.
        end_of_text: the id that ends documents in a nanoGPT .bin; None: that of the tokenizer or of the files next to
            it, otherwise GPT-2's.
        dtype: the type of the ids of a nanoGPT .bin; None: uint16.
        directory: caches the survey of files of other tools; None: no cache.
        cache: keeps what is read from a bucket; None: nothing is kept.

    Raises:
        UserError: the path is not a token file, is damaged, or does not fit the tokenizer.
    """
    if isinstance(path, BucketPath) or is_flat_tokens(path):
        return _flat_tokens(path, say, tokenizer, end_of_text, dtype, cache)
    layouts = find_layouts(path, end_of_text, dtype)
    end = None if tokenizer is None else tokenizer.end_of_text
    known = tokenizer is not None
    if tokenizer is None and vocab_size is None and layouts['train'].format.startswith(NANOGPT):
        meta = find_meta(layouts['train'].path.parent, say)
        if meta is not None:
            known, tokenizer = True, meta.tokenizer
            end, vocab_size = meta.identity.end_of_text, meta.identity.vocab_size
    if tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    if known:
        layouts = {
            split: dataclasses.replace(layout, end_of_text=end, assumed=False) if layout.assumed else layout
            for split, layout in layouts.items()
        }
    stores = open_layouts(layouts, directory, say, vocab_size)
    train = stores['train']
    if tokenizer is not None:
        tokenizer.begin_of_text = _begin_of(train, tokenizer.begin_of_text)
        _say_begin(path, tokenizer, say)
    identity = TokenizerIdentity(
        sha256=tokenizer.sha256 if tokenizer else None,
        begin_of_text=tokenizer.begin_of_text if tokenizer else (),
        vocab_size=train.vocab_size,
        # A split may have too few documents to find the token.
        end_of_text=train.end_of_text if all(s.end_of_text == train.end_of_text for s in stores.values()) else None,
    )
    return TokenFiles(path, train.format, dict(stores), identity, tokenizer)


def _begin_of(store: TokenStore, begin: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens, if the first documents begin with them."""
    starts = store.read_starts(0, min(store.n_documents, _LOOKED_AT)).astype(int).tolist()
    found = store.read([(start, min(start + len(begin), store.n_tokens)) for start in starts])
    return begin if all(tuple((ids >> 1).tolist()) == begin for ids in found) else ()


def _say_begin(path: AnyPath, tokenizer: Tokenizer, say: Report) -> None:
    begin, adds = tokenizer.begin_of_text, tokenizer.adds.before
    if begin:
        say(f'tokens: {tokenizer.shown_begin} begins each document')
    elif adds:
        say(
            f'tokens: nothing begins a document of {path}, though tokenizer.json adds {tokenizer.shown(adds)}: '
            'data.begin_of_text was false, or an older pretrax or another tool wrote it. Prompts, scores and exports '
            'of this run begin with nothing too; to change that, tokenize the text again'
        )


def open_held_out(path: AnyPath, train: TokenFiles, open_files: Callable[..., TokenFiles]) -> TokenStore:
    """Opens a separate path for validation: its split 'validation', otherwise 'train'.

    `open_files` is `open_token_files` with the arguments that the training tokens were opened with.

    Raises UserError if its tokenizer differs from that of the training tokens.
    """
    if is_flat_tokens(path):
        files = open_files(path, end_of_text=None, dtype=None)  # it has its own
        known = {each.identity.sha256 for each in (files, train)} - {None}
        if len(known) > 1 or files.identity.vocab_size > train.identity.vocab_size:
            raise UserError(f'{path}: made by another tokenizer than {train.path}\n  tokenize both with the same one')
        if files.identity.begin_of_text != train.identity.begin_of_text:
            raise UserError(
                f'{path}: documents begin with {list(files.identity.begin_of_text)}, and those of {train.path} with '
                f'{list(train.identity.begin_of_text)}\n  tokenize both with the same data.begin_of_text'
            )
    else:
        files = open_files(path, tokenizer=train.tokenizer, vocab_size=train.identity.vocab_size)
    return files.splits.get('validation') or files.splits['train']


def _flat_tokens(
    path: AnyPath,
    say: Report,
    tokenizer: Tokenizer | None,
    end_of_text: int | None,
    dtype: IdType | None,
    cache: BlockFiles | None,
) -> TokenFiles:
    opened = {split: open_split(path, split, cache) for split in splits(path)}
    first = next(iter(opened.values())).manifest.tokenizer
    if any(split.manifest.tokenizer != first for split in opened.values()):
        raise UserError(f'{path}: its splits were made by different tokenizers\n  tokenize the text again')
    content = read_tokenizer_json(path, first)
    if content is not None and tokenizer is not None:
        raise UserError(f'{path}: flat-tokens include their tokenizer\n  remove the other tokenizer')
    if end_of_text is not None:
        raise UserError(f'{path}: flat-tokens store document boundaries\n  remove end_of_text')
    if dtype is not None:
        raise UserError(f'{path}: flat-tokens store the type of their ids\n  remove dtype={dtype}')
    if tokenizer is not None and tokenizer.vocab_size != first.vocab_size:
        raise UserError(
            f'{path}: the tokens have a vocabulary of {first.vocab_size:,}, the tokenizer {tokenizer.vocab_size:,}\n'
            '  use the tokenizer that made the tokens'
        )
    own = tokenizer if content is None else first.tokenizer(content, str(path))
    if own is not None and own.vocab_size != first.vocab_size:
        raise UserError(
            f'{path / "zarr.json"}: a vocabulary of {first.vocab_size:,}, but {TOKENIZER_FILE} has {own.vocab_size:,}\n'
            '  a file was changed; restore it, or tokenize the text again'
        )
    if own is not None:
        _say_begin(path, own, say)
    for name, split in opened.items():
        masked = f', {split.manifest.counts.targets:,} of them targets' if split.has_mask else ''
        say(
            f'tokens: {name} {split.n_tokens:,} tokens{masked}, {split.n_documents:,} documents, from {path} ({FORMAT})'
        )
    return TokenFiles(path, f'{FORMAT} {VERSION}', dict(opened), first, own)
