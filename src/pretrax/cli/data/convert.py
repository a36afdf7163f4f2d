"""Convert token files to flat-tokens, or to nanoGPT's .bin."""

import dataclasses

from pretrax.cli.data._token_files import OutDirectory, TokenFileOptions, TokenPath
from pretrax.errors import UserError
from pretrax.option import option
from pretrax.storage import locate

_FORMATS = ('flat-tokens', 'nanogpt')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    path: TokenPath
    out: OutDirectory
    to: str = option('flat-tokens, or nanogpt (train.bin and val.bin).', default='flat-tokens', metavar='FORMAT')
    files: TokenFileOptions
    added_end: int | None = option(
        'To nanogpt: a token to write after each document.', '--add-end-of-text', min=0, metavar='ID'
    )


def convert(options: Options) -> None:
    from pretrax.data.tokens import token_tools
    from pretrax.data.tokens.flat_tokens_writer import refuse_existing

    to, out, added_end = options.to, locate(options.out), options.added_end
    if to not in _FORMATS:
        raise UserError(f'--to {to}: no such format\n  expected {" or ".join(_FORMATS)}')
    refuse_existing(out)
    if added_end is not None and to != 'nanogpt':
        raise UserError(f'--add-end-of-text applies to --to nanogpt, but this is --to {to}')
    files = options.files.open(options.path)
    if to == 'nanogpt':
        token_tools.convert_to_nanogpt(files, out, print, added_end)
    else:
        token_tools.convert(files, out, print)
