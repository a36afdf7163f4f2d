"""Convert token files to flat-tokens, or to nanoGPT's .bin."""

from pathlib import Path
from typing import Annotated

import typer

from pretrax.cli.data._token_files import EndOfText, OutDirectory, Tokenizer, TokenPath, VocabSize, opened
from pretrax.errors import UserError


def convert(
    path: TokenPath,
    out: OutDirectory,
    to: Annotated[
        str, typer.Option(metavar='FORMAT', help='flat-tokens, or nanogpt (train.bin and val.bin).')
    ] = 'flat-tokens',
    tokenizer: Tokenizer = None,
    vocab_size: VocabSize = None,
    end_of_text: EndOfText = None,
) -> None:
    from pretrax.data.tokens import token_tools
    from pretrax.data.tokens.token_copy import refuse_existing

    formats = {'flat-tokens': token_tools.convert, 'nanogpt': token_tools.convert_to_nanogpt}
    if to not in formats:
        raise UserError(f'--to {to}: no such format\n  expected {" or ".join(formats)}')
    refuse_existing(Path(out))
    files = opened(path, tokenizer, vocab_size, end_of_text)
    formats[to](files, Path(out).expanduser(), print)
