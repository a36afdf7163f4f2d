"""Convert token files to flat-tokens, or to nanoGPT's .bin."""

from typing import Annotated

import typer

from pretrax.cli.data._token_files import DType, EndOfText, OutDirectory, Tokenizer, TokenPath, VocabSize, opened
from pretrax.errors import UserError
from pretrax.storage import locate

_FORMATS = ('flat-tokens', 'nanogpt')


def convert(
    path: TokenPath,
    out: OutDirectory,
    to: Annotated[
        str, typer.Option(metavar='FORMAT', help='flat-tokens, or nanogpt (train.bin and val.bin).')
    ] = 'flat-tokens',
    tokenizer: Tokenizer = None,
    vocab_size: VocabSize = None,
    end_of_text: EndOfText = None,
    dtype: DType = None,
    added_end: Annotated[
        int | None,
        typer.Option(
            '--add-end-of-text', min=0, metavar='ID', help='To nanogpt: a token to write after each document.'
        ),
    ] = None,
) -> None:
    from pretrax.data.tokens import token_tools
    from pretrax.data.tokens.flat_tokens_writer import refuse_existing

    if to not in _FORMATS:
        raise UserError(f'--to {to}: no such format\n  expected {" or ".join(_FORMATS)}')
    refuse_existing(locate(out))
    if added_end is not None and to != 'nanogpt':
        raise UserError(f'--add-end-of-text applies to --to nanogpt, and this is --to {to}')
    files = opened(path, tokenizer, vocab_size, end_of_text, dtype)
    if to == 'nanogpt':
        token_tools.convert_to_nanogpt(files, locate(out), print, added_end)
    else:
        token_tools.convert(files, locate(out), print)
