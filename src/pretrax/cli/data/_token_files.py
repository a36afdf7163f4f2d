"""Options of the verbs that read token files of any format, and how they open them."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pretrax.option import option
from pretrax.storage import locate

if TYPE_CHECKING:
    from pretrax.data.tokens.token_files import TokenFiles

TokenPath = Annotated[str, typer.Argument(metavar='PATH', help='Token files: flat-tokens, or those of another tool.')]
FlatTokensPath = Annotated[str, typer.Argument(metavar='PATH', help='A directory of flat-tokens.')]
OutDirectory = Annotated[str, typer.Option('--out', '-o', metavar='DIR', help='A new directory.')]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFileOptions:
    """Properties of another tool's token files that the files do not record."""

    tokenizer: str | None = option('The tokenizer, if the files do not name it.', metavar='FILE')
    vocab_size: int | None = option('The vocabulary size, if the files do not give it.', min=1)
    end_of_text: int | None = option('The token that ends a document in a nanoGPT .bin.', min=0)
    dtype: Literal['uint16', 'uint32'] | None = option('The type of the ids in a nanoGPT .bin.', show_default='uint16')

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `open_token_files`."""
        from pretrax.data.tokenizers.tokenizer_files import load_tokenizer

        return vars(self) | {'tokenizer': None if self.tokenizer is None else load_tokenizer(self.tokenizer)}

    def open(self, path: str) -> 'TokenFiles':
        """Opens token files of any format, and prints what it notices."""
        from pretrax.data.tokens.token_files import open_token_files

        return open_token_files(locate(path), print, **self.arguments())
