"""`pretrax data convert PATH --out DIR`: token files of any tool as flat-tokens, or as nanoGPT's .bin."""

from pathlib import Path

from pretrax.cli.token_files import opened
from pretrax.data.tokens import token_tools
from pretrax.data.tokens.token_copy import refuse_existing
from pretrax.errors import UserError


def convert(
    path: str, out: str, to: str, tokenizer: str | None, vocab_size: int | None, end_of_text: int | None
) -> None:
    """Writes DIR, whole or not at all."""
    formats = {'flat-tokens': token_tools.convert, 'nanogpt': token_tools.convert_to_nanogpt}
    if to not in formats:
        raise UserError(f'--to {to}: no such format\n  expected {" or ".join(formats)}')
    refuse_existing(Path(out))
    files = opened(path, tokenizer, vocab_size, end_of_text)
    formats[to](files, Path(out).expanduser(), print)
