"""`pretrax data verify PATH`: read a token file whole, and compare it with its checksums and the rules of its format."""

from pathlib import Path

from pretrax.data import flat_tokens


def verify(path: str) -> None:
    """Prints the counts of every split that is as it was written."""
    for name, counts in flat_tokens.verify(Path(path).expanduser()).items():
        print(f'{name}: {counts.documents:,} documents, {counts.tokens:,} tokens, every checksum is right')
