"""Opens token files of any format: their splits and their tokenizer."""

import dataclasses
from pathlib import Path

from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokens.flat_tokens import FORMAT, VERSION, TokenizerIdentity, open_split, read_tokenizer_json, splits
from pretrax.data.tokens.foreign import find_layouts, open_layouts
from pretrax.data.tokens.remote_path import RemotePath
from pretrax.data.tokens.token_store import TokenStore
from pretrax.errors import Report, UserError


@dataclasses.dataclass(frozen=True)
class TokenFiles:
    """The splits of a path, open for reading: 'train' first, then usually 'validation'."""

    path: Path | RemotePath
    format: str
    splits: dict[str, TokenStore]
    identity: TokenizerIdentity
    tokenizer: Tokenizer | None


def is_flat_tokens(path: Path | RemotePath) -> bool:
    """Whether a path is read as flat-tokens: a directory with a zarr.json (zarr version 3), or any URL."""
    return isinstance(path, RemotePath) or (path / 'zarr.json').is_file()


def open_token_files(
    path: Path | RemotePath,
    say: Report,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
    directory: Path | None = None,
) -> TokenFiles:
    """Opens token files of any known format, and prints the format.

    Args:
        path: a file, a directory or a URL.
        say: prints a line.
        tokenizer: for files that come without their tokenizer.
        vocab_size: for files that do not have it; None: that of the tokenizer, otherwise the largest id plus 1.
        end_of_text: the id that ends documents in a nanoGPT .bin; None: that of the tokenizer, otherwise GPT-2's.
        directory: caches the survey of files of other tools; None: no cache.

    Raises:
        UserError: the path is not a token file, is damaged, or does not fit the tokenizer.
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
        # A split may have too few documents to find the token.
        end_of_text=train.end_of_text if all(s.end_of_text == train.end_of_text for s in stores.values()) else None,
    )
    return TokenFiles(path, train.format, dict(stores), identity, tokenizer)


def open_held_out(
    path: Path, train: TokenFiles, say: Report, *, end_of_text: int | None = None, directory: Path | None = None
) -> TokenStore:
    """Opens a separate path for validation: its split 'validation', otherwise 'train'.

    Raises:
        UserError: its tokenizer differs from that of the training tokens.
    """
    if is_flat_tokens(path):
        files = open_token_files(path, say)
        known = {each.identity.sha256 for each in (files, train)} - {None}
        if len(known) > 1 or files.identity.vocab_size > train.identity.vocab_size:
            raise UserError(f'{path}: made by another tokenizer than {train.path}\n  tokenize both with the same one')
    else:
        files = open_token_files(
            path, say, tokenizer=train.tokenizer, vocab_size=train.identity.vocab_size, end_of_text=end_of_text,
            directory=directory,
        )  # fmt: skip
    return files.splits.get('validation') or files.splits['train']


def _flat_tokens(
    path: Path | RemotePath, say: Report, tokenizer: Tokenizer | None, end_of_text: int | None
) -> TokenFiles:
    opened = {split: open_split(path, split) for split in splits(path)}
    first = next(iter(opened.values())).manifest.tokenizer
    if any(split.manifest.tokenizer != first for split in opened.values()):
        raise UserError(f'{path}: its splits were made by different tokenizers\n  tokenize the text again')
    content = read_tokenizer_json(path, first)
    if content is not None and tokenizer is not None:
        raise UserError(f'{path}: flat-tokens include their tokenizer\n  remove the other tokenizer')
    if end_of_text is not None:
        raise UserError(f'{path}: flat-tokens store document boundaries\n  remove end_of_text')
    if tokenizer is not None and tokenizer.vocab_size != first.vocab_size:
        raise UserError(
            f'{path}: the tokens have a vocabulary of {first.vocab_size:,}, the tokenizer {tokenizer.vocab_size:,}\n'
            '  use the tokenizer that made the tokens'
        )
    own = tokenizer if content is None else Tokenizer(content, str(path), first.end_of_text)
    for name, split in opened.items():
        masked = f', {split.manifest.counts.targets:,} of them targets' if split.has_mask else ''
        say(
            f'tokens: {name} {split.n_tokens:,} tokens{masked}, {split.n_documents:,} documents, from {path} ({FORMAT})'
        )
    return TokenFiles(path, f'{FORMAT} {VERSION}', dict(opened), first, own)
