"""Join several flat-tokens into one.

They must have the same tokenizer. Each split is joined in the given order.
"""

from pathlib import Path
from typing import Annotated

import typer

from pretrax.cli.data._token_files import OutDirectory


def merge(
    paths: Annotated[list[str], typer.Argument(metavar='PATH...', help='Directories of flat-tokens.')],
    out: OutDirectory,
) -> None:
    from pretrax.data.tokens import token_tools

    token_tools.merge([Path(path).expanduser() for path in paths], Path(out).expanduser(), print)
