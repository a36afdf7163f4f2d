"""What the files next to a nanoGPT .bin say about its ids.

`meta.pkl` is nanoGPT's: the character of each id, in data sets without a tokenizer. `tokens.json` and `tokenizer.json`
are written by `pretrax data convert --to nanogpt`.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pydantic

from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokenizers.tokenizer_files import TOKENIZER_JSON, character_tokenizer
from pretrax.data.tokens.flat_tokens import TokenizerIdentity
from pretrax.data.tokens.foreign_pickle import read_dict
from pretrax.errors import Report, UserError, first_line

META_PKL, TOKENS_JSON = 'meta.pkl', 'tokens.json'
_LARGEST = 64 << 20  # bytes of a meta.pkl


class Meta(NamedTuple):
    """The tokenizer of the ids, if known, and the rest of its identity."""

    tokenizer: Tokenizer | None
    identity: TokenizerIdentity


def find_meta(directory: Path, say: Report) -> Meta | None:
    """What a directory says about the ids of its .bin files; None if nothing.

    Raises UserError if tokens.json or tokenizer.json is damaged.
    """
    if (file := directory / TOKENS_JSON).is_file():
        return _pretrax_meta(file)
    if (file := directory / META_PKL).is_file():
        try:
            characters = _characters(file)
        except UserError as error:  # nanoGPT itself needs no meta.pkl, and other programs write others
            say(f'tokens: not used: {first_line(error)}')
            return None
        tokenizer = character_tokenizer(characters, str(file))
        say(f'tokenizer: the {len(characters):,} characters of {file}')
        identity = TokenizerIdentity(sha256=tokenizer.sha256, vocab_size=tokenizer.vocab_size, end_of_text=None)
        return Meta(tokenizer, identity)
    return None


def meta_files(identity: TokenizerIdentity, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """The files that `find_meta` reads, by name."""
    files = {TOKENS_JSON: json.dumps(identity.model_dump(), indent=2).encode() + b'\n'}
    return files if tokenizer is None else files | {TOKENIZER_JSON: tokenizer.content}


def _pretrax_meta(file: Path) -> Meta:
    try:
        identity = TokenizerIdentity.model_validate_json(file.read_bytes())
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = '.'.join(map(str, first['loc']))
        raise UserError(f'{file}: {where}: {first["msg"]}\n  restore it, or convert the tokens again') from None
    if identity.sha256 is None:
        return Meta(None, identity)
    path = file.with_name(TOKENIZER_JSON)
    tokenizer = identity.tokenizer(path.read_bytes(), str(path)) if path.is_file() else None
    if tokenizer is not None and (tokenizer.sha256, tokenizer.vocab_size) != (identity.sha256, identity.vocab_size):
        raise UserError(f'{path}: not the tokenizer that made these tokens (sha256 {identity.sha256[:12]}..)')
    return Meta(tokenizer, identity)


def _characters(file: Path) -> list[str]:
    """The character of each id. github.com/karpathy/nanoGPT data/shakespeare_char/prepare.py"""
    with file.open('rb') as stream:
        pickled = stream.read(_LARGEST + 1)
    if len(pickled) > _LARGEST:
        raise UserError(f'{file}: larger than {_LARGEST >> 20} MiB')
    found = read_dict(pickled, str(file))
    itos, stoi = found.get('itos'), found.get('stoi')
    if not isinstance(itos, dict) or not itos or set(itos) != set(range(len(itos))):
        raise UserError(f'{file}: itos has no string for each id from 0 on')
    characters = [itos[token] for token in range(len(itos))]
    if not all(isinstance(each, str) and len(each) == 1 and not '\ud800' <= each <= '\udfff' for each in characters):
        raise UserError(f'{file}: itos has something other than characters')
    if stoi != {each: token for token, each in enumerate(characters)} or found.get('vocab_size') != len(characters):
        raise UserError(f'{file}: itos, stoi and vocab_size disagree')
    return characters
