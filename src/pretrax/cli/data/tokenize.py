"""Tokenize the text of a configuration, or text itself, into flat-tokens."""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from pretrax.cli._output import next_command
from pretrax.errors import UserError
from pretrax.option import argument, option
from pretrax.storage import locate

if TYPE_CHECKING:
    from pretrax.data.options import StreamOptions, TextOptions


def tokenize(
    source: str = argument(
        'A YAML file, a packaged configuration, or a value of data.text: files or stdlib.', metavar='CONFIG|TEXT'
    ),
    overrides: tuple[str, ...] = argument(
        'Changes to the configuration, such as data.tokenizer=bytes.', default=(), metavar='KEY=VALUE'
    ),
    out: str | None = option('A new directory. [default: where the run looks for it]', '-o', metavar='DIR'),
) -> None:
    from pretrax.config import load
    from pretrax.config.packaged import find_packaged
    from pretrax.data.options import keys_of_text, options_of_text
    from pretrax.data.text import tokenize_text

    if not (Path(source).suffix in ('.yaml', '.yml') or (find_packaged(source) and not Path(source).exists())):
        place = tokenize_text(_options_of(source, overrides), Path(), print, locate(out or _name_for(source)))
        print('next: ' + next_command(f'pretrax train CONFIG data.tokens={shlex.quote(str(place))}'))
        return
    loaded = load(source, overrides)
    options = options_of_text(loaded.data.name, loaded.data.options)
    place = tokenize_text(options, loaded.run_dir / 'data', print, None if out is None else locate(out))
    more = [] if out is None else [f'data.tokens={place}', *(f'data.{key}=null' for key in keys_of_text(options))]
    print('next: ' + next_command(shlex.join(['pretrax', 'train', source, *overrides, *more])))


def _options_of(text: str, overrides: tuple[str, ...]) -> 'TextOptions | StreamOptions':
    """The options of a text without a configuration; the rest of the configuration does not matter."""
    from pretrax.config import from_values
    from pretrax.data.options import options_of_text

    if other := [each for each in overrides if not each.startswith('data.')]:
        raise UserError(f'{other[0]}: changes a training configuration, but {text} is text\n  expected data.KEY=VALUE')
    unused = {
        'name': 'tokenize',
        'steps': 1,
        'model': {'family': 'llama', 'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 2}},
        'batch': {'tokens': 16, 'sequence_length': 16},
        'optimizer': {'learning_rate': 1e-3},
    }
    section = from_values(unused | {'data': {'text': text}}, overrides).data
    return options_of_text(section.name, section.options)


def _name_for(text: str) -> str:
    name = re.sub(r'\.\w+', '', text.rstrip('/').rpartition('/')[2].removeprefix('hf:'))
    if not re.fullmatch(r'[\w-]+', name):
        raise UserError(f'{text}: expected a directory for the tokens: --out DIR')
    return f'{name}-tokens'
