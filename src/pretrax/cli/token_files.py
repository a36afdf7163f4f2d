"""Token files as the `pretrax data` verbs take them: a path, and what the files do not say of themselves."""

from pathlib import Path

from pretrax.data.tokenizers.tokenizer_files import load_tokenizer
from pretrax.data.tokens.token_files import TokenFiles, open_token_files


def opened(path: str, tokenizer: str | None, vocab_size: int | None, end_of_text: int | None) -> TokenFiles:
    """Opens token files of any format; what is noticed is printed."""
    named = None if tokenizer is None else load_tokenizer(tokenizer)
    return open_token_files(
        Path(path).expanduser(), print, tokenizer=named, vocab_size=vocab_size, end_of_text=end_of_text
    )
