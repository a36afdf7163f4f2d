"""Write a commented configuration to start from.

Beside it, pretrax-schema.json is written, with which editors complete keys and mark mistakes.
"""

import re
from pathlib import Path

from pretrax.cli._output import next_command, write_new
from pretrax.errors import UserError
from pretrax.option import argument


def init(
    name: str = argument('Name of the run; NAME.yaml is written.', metavar='NAME'),
) -> None:
    from pretrax.config.packaged import SCHEMA, find_packaged, packaged_schema
    from pretrax.storage import BucketPath, locate

    file = locate(name if name.endswith(('.yaml', '.yml')) else f'{name}.yaml')
    if not re.fullmatch(r'[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}', file.stem):
        raise UserError(f'{name}: expected a name of letters, digits, ".", "_" and "-", such as my-run')
    starter = find_packaged('starter')
    assert starter is not None, 'the package holds configs/starter.yaml'
    text = starter.read_text().replace('starter.yaml', str(file)).replace('starter', file.stem)
    if isinstance(file, BucketPath):  # editors read a schema beside a file on a disk
        text = text.partition('\n')[2]
    write_new(file, text.encode())
    if not isinstance(file, BucketPath):
        _write_schema(file.with_name(SCHEMA), packaged_schema().read_text())
    print('next: ' + next_command(f'pretrax train {file}'))


def _write_schema(file: Path, text: str) -> None:
    try:
        with file.open('x') as new:
            new.write(text)
        print(f'wrote {file}: editors complete keys with it')
    except FileExistsError:  # it may have the components of plugins
        if file.read_bytes() != text.encode():
            print(f'{file} differs from that of this version; to renew it: pretrax config schema > {file}')
    except OSError as error:
        raise UserError(f'{file} cannot be written: {error.strerror}') from error
