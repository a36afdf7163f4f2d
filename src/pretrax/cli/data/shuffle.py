"""Shuffle the documents of each split of flat-tokens."""

from typing import Annotated

import typer

from pretrax.cli.data._token_files import FlatTokensPath, OutDirectory
from pretrax.storage import locate


def shuffle(
    path: FlatTokensPath,
    out: OutDirectory,
    seed: Annotated[int, typer.Option(min=0, help='Seed of the random order.')] = 0,
) -> None:
    from pretrax.data.tokens import token_tools

    token_tools.shuffle(locate(path), locate(out), print, seed=seed)
