"""Join several flat-tokens into one.

They must have the same tokenizer. Each split is joined in the given order.
"""

from typing import Annotated

import typer

from pretrax.cli.data._token_files import OutDirectory
from pretrax.storage import locate


def merge(
    paths: Annotated[tuple[str, ...], typer.Argument(metavar='PATH...', help='Directories of flat-tokens.')],
    out: OutDirectory,
) -> None:
    from pretrax.data.tokens import token_tools

    token_tools.merge([locate(path) for path in paths], locate(out), print)
