"""Split flat-tokens into train and validation.

A hash of each document decides which split it goes to.
"""

from pretrax.cli.data._token_files import FlatTokensPath, OutDirectory
from pretrax.errors import UserError
from pretrax.option import option
from pretrax.storage import locate


def split(
    path: FlatTokensPath,
    out: OutDirectory,
    fraction: float | None = option('Fraction of the documents to hold out.', min=0, max=1),
    count: int | None = option('Number of documents to hold out.', min=1),
    seed: int = option('Seed of the choice of documents.', default=0, min=0),
) -> None:
    if (fraction is None) == (count is None):
        raise UserError('expected either --fraction or --count, the documents to hold out')
    from pretrax.data.tokens import token_tools

    token_tools.split(locate(path), locate(out), print, fraction=fraction, count=count, seed=seed)
