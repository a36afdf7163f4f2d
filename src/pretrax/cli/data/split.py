"""Split flat-tokens into train and validation.

A hash of each document decides which split it goes to.
"""

from typing import Annotated

import typer

from pretrax.cli.data._token_files import FlatTokensPath, OutDirectory
from pretrax.errors import UserError
from pretrax.storage import locate


def split(
    path: FlatTokensPath,
    out: OutDirectory,
    fraction: Annotated[float | None, typer.Option(min=0, max=1, help='Fraction of the documents to hold out.')] = None,
    count: Annotated[int | None, typer.Option(min=1, help='Number of documents to hold out.')] = None,
    seed: Annotated[int, typer.Option(min=0, help='Seed of the choice of documents.')] = 0,
) -> None:
    if (fraction is None) == (count is None):
        raise UserError('expected either --fraction or --count, the documents to hold out')
    from pretrax.data.tokens import token_tools

    token_tools.split(locate(path), locate(out), print, fraction=fraction, count=count, seed=seed)
