"""Tokenize the text of a configuration into flat-tokens."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from pretrax.cli._arguments import ConfigFile, Overrides


def tokenize(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Annotated[
        str | None,
        typer.Option('--out', '-o', metavar='DIR', help='A new directory. [default: where the run looks for it]'),
    ] = None,
) -> None:
    from pretrax.config import load
    from pretrax.data.options import keys_of_text, options_of_text
    from pretrax.data.text import tokenize_text

    loaded = load(config, overrides or [])
    options = options_of_text(loaded.data.name, loaded.data.options)
    place = tokenize_text(options, loaded.run_dir / 'data', print, None if out is None else Path(out).expanduser())
    more = [] if out is None else [f'data.tokens={place}', *(f'data.{key}=null' for key in keys_of_text(options))]
    print(f'next: {shlex.join(["pretrax", "train", config, *(overrides or []), *more])}')
