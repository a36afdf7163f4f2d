"""`pretrax data merge PATH... --out DIR`: several flat-tokens as one."""

from pathlib import Path

from pretrax.data.tokens import token_tools


def merge(paths: list[str], out: str) -> None:
    """Writes DIR, whole or not at all."""
    token_tools.merge([Path(path).expanduser() for path in paths], Path(out).expanduser(), print)
