"""`pretrax data split PATH --out DIR`: the documents of flat-tokens divided anew into train and validation."""

from pathlib import Path

from pretrax.data.tokens import token_tools
from pretrax.errors import UserError


def split(path: str, out: str, fraction: float | None, count: int | None, seed: int) -> None:
    """Writes DIR, whole or not at all."""
    if (fraction is None) == (count is None):
        raise UserError('expected either --fraction or --count: how much to hold out')
    token_tools.split(Path(path).expanduser(), Path(out).expanduser(), print, fraction=fraction, count=count, seed=seed)
