"""`pretrax data shuffle PATH --out DIR`: the documents of flat-tokens in a random order."""

from pathlib import Path

from pretrax.data.tokens import token_tools


def shuffle(path: str, out: str, seed: int) -> None:
    """Writes DIR, whole or not at all."""
    token_tools.shuffle(Path(path).expanduser(), Path(out).expanduser(), print, seed=seed)
