"""Token files of any format by their path: the splits in it, what the ids mean, and how both came to be known."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokens.flat_tokens import FORMAT, VERSION, TokenizerIdentity, open_split, read_tokenizer_json, splits
from pretrax.data.tokens.foreign import find_layouts, open_layouts
from pretrax.data.tokens.remote_path import RemotePath
from pretrax.data.tokens.token_store import TokenStore
from pretrax.errors import UserError

type Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class TokenFiles:
    """The splits of a path, each open for reading: 'train' first, and usually 'validation'."""

    path: Path | RemotePath
    format: str
    splits: dict[str, TokenStore]
    identity: TokenizerIdentity
    tokenizer: Tokenizer | None


def is_flat_tokens(path: Path | RemotePath) -> bool:
    """Whether a path is to be read as flat-tokens: a directory with zarr version 3 in it, or any URL."""
    return isinstance(path, RemotePath) or (path / 'zarr.json').is_file()


def open_token_files(
    path: Path | RemotePath,
    say: Say,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
    directory: Path | None = None,
) -> TokenFiles:
    """Open what lies at a path, whichever tool wrote it, and say which that was.

    Args:
        tokenizer: what the ids mean, for files that do not have their tokenizer with them.
        vocab_size: of files that do not say; None takes that of the tokenizer, or the largest id and one.
        end_of_text: the id that ends documents in a nanoGPT .bin; None takes that of the tokenizer, or of GPT-2.
        directory: where to keep what reading a file of another tool once found; None keeps nothing.

    Raises UserError for what is no token file, or damaged as far as opening tells, or does not fit the tokenizer.
    """
    if isinstance(path, RemotePath) or is_flat_tokens(path):
        return _flat_tokens(path, say, tokenizer, end_of_text)
    layouts = find_layouts(path, end_of_text)
    if tokenizer is not None:
        vocab_size = tokenizer.vocab_size
        layouts = {
            split: dataclasses.replace(layout, end_of_text=tokenizer.end_of_text, assumed=False)
            if layout.assumed
            else layout
            for split, layout in layouts.items()
        }
    stores = open_layouts(layouts, directory, say, vocab_size)
    train = stores['train']
    identity = TokenizerIdentity(
        sha256=tokenizer.sha256 if tokenizer else None,
        vocab_size=train.vocab_size,
        # One split may hold a single document, or too few to tell.
        end_of_text=train.end_of_text if all(s.end_of_text == train.end_of_text for s in stores.values()) else None,
    )
    return TokenFiles(path, train.format, dict(stores), identity, tokenizer)


def open_held_out(
    path: Path, train: TokenFiles, say: Say, *, end_of_text: int | None = None, directory: Path | None = None
) -> TokenStore:
    """What is held out, from a path of its own: its split 'validation', or else 'train'. Raises UserError where its ids
    do not mean the same as those that train."""
    if is_flat_tokens(path):
        files = open_token_files(path, say)
        known = {of.identity.sha256 for of in (files, train)} - {None}
        if len(known) > 1 or files.identity.vocab_size > train.identity.vocab_size:
            raise UserError(f'{path}: made by another tokenizer than {train.path}\n  the two cannot be compared')
    else:
        files = open_token_files(
            path, say, tokenizer=train.tokenizer, vocab_size=train.identity.vocab_size, end_of_text=end_of_text,
            directory=directory,
        )  # fmt: skip
    return files.splits.get('validation') or files.splits['train']


def _flat_tokens(path: Path | RemotePath, say: Say, tokenizer: Tokenizer | None, end_of_text: int | None) -> TokenFiles:
    opened = {split: open_split(path, split) for split in splits(path)}
    first = next(iter(opened.values())).manifest.tokenizer
    if any(split.manifest.tokenizer != first for split in opened.values()):
        raise UserError(f'{path}: its splits were made by different tokenizers\n  tokenise again')
    content = read_tokenizer_json(path, first)
    if content is not None and tokenizer is not None:
        raise UserError(
            f'{path}: flat-tokens have their tokenizer with them, and another would change nothing\n  leave it out'
        )
    if end_of_text is not None:
        raise UserError(f'{path}: flat-tokens say themselves where documents end\n  leave end_of_text out')
    if tokenizer is not None and tokenizer.vocab_size != first.vocab_size:
        raise UserError(
            f'{path}: tokens of a vocabulary of {first.vocab_size:,}, and the tokenizer has {tokenizer.vocab_size:,}\n'
            '  give the one that made them'
        )
    own = tokenizer if content is None else Tokenizer(content, str(path), first.end_of_text)
    for name, split in opened.items():
        masked = f', {split.manifest.counts.targets:,} of them targets' if split.has_mask else ''
        say(
            f'tokens: {name} {split.n_tokens:,} tokens{masked}, {split.n_documents:,} documents, from {path} ({FORMAT})'
        )
    return TokenFiles(path, f'{FORMAT} {VERSION}', dict(opened), first, own)
