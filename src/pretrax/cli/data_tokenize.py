"""`pretrax data tokenize CONFIG [key=value ...]`: the text of a configuration as flat-tokens, without training."""

import shlex
from pathlib import Path

from pretrax.config import RunConfig
from pretrax.data.options import TextOptions, keys_of_text
from pretrax.data.text import tokenise_text
from pretrax.errors import UserError


def tokenize(config: RunConfig, arguments: list[str], out: str | None) -> None:
    """Prints the directory and the next command.

    Args:
        arguments: the configuration file and overrides, as they were given.
        out: the directory to make; None takes the one where `pretrax train` looks.
    """
    options = text_options(config)
    place = tokenise_text(options, config.run_dir / 'data', print, None if out is None else Path(out).expanduser())
    more = [] if out is None else [f'data.tokens={place}', *(f'data.{key}=null' for key in keys_of_text(options))]
    print(f'next: {shlex.join(["pretrax", "train", *arguments, *more])}')


def text_options(config: RunConfig) -> TextOptions:
    """What a configuration says about text. Raises UserError where it is about something else."""
    options = config.data.options
    if not isinstance(options, TextOptions):
        raise UserError(f'data.name: {config.data.name} makes batches without text\n  expected data.name=text')
    if options.tokens is not None:
        raise UserError(
            f'data.tokens: {options.tokens} are tokens already\n  data.tokens=null data.text=... reads text'
        )
    return options
