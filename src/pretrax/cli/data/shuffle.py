"""Shuffle the documents of each split of flat-tokens."""

from pathlib import Path
from typing import Annotated

import typer

from pretrax.cli.data._token_files import FlatTokensPath, OutDirectory


def shuffle(
    path: FlatTokensPath,
    out: OutDirectory,
    seed: Annotated[int, typer.Option(min=0, help='Seed of the random order.')] = 0,
) -> None:
    from pretrax.data.tokens import token_tools

    token_tools.shuffle(Path(path).expanduser(), Path(out).expanduser(), print, seed=seed)
