"""Shuffle the documents of each split of flat-tokens."""

from pretrax.cli.data._token_files import FlatTokensPath, OutDirectory
from pretrax.option import option
from pretrax.storage import locate


def shuffle(
    path: FlatTokensPath,
    out: OutDirectory,
    seed: int = option('Seed of the random order.', default=0, min=0),
) -> None:
    from pretrax.data.tokens import token_tools

    token_tools.shuffle(locate(path), locate(out), print, seed=seed)
