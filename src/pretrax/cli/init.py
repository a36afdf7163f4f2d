"""Write a commented configuration to start from."""

import re
from pathlib import Path
from typing import Annotated

import typer

from pretrax.errors import UserError


def init(
    name: Annotated[str, typer.Argument(metavar='NAME', help='Name of the run; NAME.yaml is written.')],
) -> None:
    from pretrax.config.packaged import find_packaged

    file = Path(name) if name.endswith(('.yaml', '.yml')) else Path(f'{name}.yaml')
    if not re.fullmatch(r'[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}', file.stem):
        raise UserError(f'{name}: expected a name of letters, digits, ".", "_" and "-", such as my-run')
    starter = find_packaged('starter')
    assert starter is not None, 'the package holds configs/starter.yaml'
    text = starter.read_text().replace('starter.yaml', str(file)).replace('starter', file.stem)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open('x') as new:
            new.write(text)
    except FileExistsError:
        raise UserError(f'{file} already exists and is not overwritten\n  choose another name') from None
    except OSError as error:
        raise UserError(f'{file} cannot be written: {error.strerror}') from error
    print(f'wrote {file}\nnext: pretrax train {file}')
