"""Options of the verbs that read token files of any format, and how they open them."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pretrax.storage import locate

if TYPE_CHECKING:
    from pretrax.data.tokens.token_files import TokenFiles

TokenPath = Annotated[str, typer.Argument(metavar='PATH', help='Token files: flat-tokens, or those of another tool.')]
FlatTokensPath = Annotated[str, typer.Argument(metavar='PATH', help='A directory of flat-tokens.')]
OutDirectory = Annotated[str, typer.Option('--out', '-o', metavar='DIR', help='A new directory.')]
Tokenizer = Annotated[
    str | None, typer.Option('--tokenizer', metavar='FILE', help='The tokenizer, if the files do not name it.')
]
EndOfText = Annotated[
    int | None, typer.Option('--end-of-text', min=0, help='The token that ends a document in a nanoGPT .bin.')
]
VocabSize = Annotated[
    int | None, typer.Option('--vocab-size', min=1, help='The vocabulary size, if the files do not give it.')
]

DType = Annotated[
    Literal['uint16', 'uint32'] | None,
    typer.Option('--dtype', help='The type of the ids in a nanoGPT .bin.', show_default='uint16'),
]


def opened(
    path: str,
    tokenizer: str | None,
    vocab_size: int | None,
    end_of_text: int | None,
    dtype: Literal['uint16', 'uint32'] | None,
) -> 'TokenFiles':
    """Opens token files of any format, and prints what it notices."""
    from pretrax.data.tokenizers.tokenizer_files import load_tokenizer
    from pretrax.data.tokens.token_files import open_token_files

    named = None if tokenizer is None else load_tokenizer(tokenizer)
    return open_token_files(
        locate(path), print, tokenizer=named, vocab_size=vocab_size, end_of_text=end_of_text, dtype=dtype
    )
