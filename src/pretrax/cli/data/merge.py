"""Join several flat-tokens into one.

They must have the same tokenizer. Each split is joined in the given order.
"""

from pretrax.cli.data._token_files import OutDirectory
from pretrax.option import argument
from pretrax.storage import locate


def merge(
    out: OutDirectory,
    paths: tuple[str, ...] = argument('Directories of flat-tokens.', metavar='PATH...'),
) -> None:
    from pretrax.data.tokens import token_tools

    token_tools.merge([locate(path) for path in paths], locate(out), print)
