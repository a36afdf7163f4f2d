"""Files at a path of the user, and commands to type next: the output of verbs."""

import importlib.util
import os
from collections.abc import Collection
from pathlib import PurePath

from pretrax.errors import UserError, system_errors
from pretrax.storage import AnyPath, BucketPath, locate
from pretrax.storage.locate import write_whole


def suffix_of(out: str | None, suffixes: Collection[str]) -> str:
    """The suffix of a file to write, in lower case; '' if there is none. Raises UserError if it is another one."""
    suffix = PurePath(out or '').suffix.lower()
    if out is not None and suffix not in suffixes:
        raise UserError(f'cannot write {out}: expected a name that ends in {", ".join(suffixes)}')
    return suffix


def write_output(out: str, content: str | bytes) -> None:
    """Writes a file, on a disk with its directories or in a bucket. Raises UserError."""
    path = locate(out)
    with system_errors(f'cannot write {out}'):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content if isinstance(content, bytes) else content.encode())


def write_new(path: AnyPath, content: bytes) -> None:
    """Writes a file that does not exist yet, with its directories. Raises UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(path, BucketPath):
            if path.exists() or not path.create(content):
                raise FileExistsError
        else:
            with path.open('xb') as new:
                new.write(content)
    except FileExistsError:
        raise UserError(f'{path} already exists and is not overwritten\n  choose another name') from None
    except OSError as error:
        raise UserError(f'{path} cannot be written: {error.strerror}') from error
    print(f'wrote {path}')


def next_command(command: str) -> str:
    """The command, with `uv run` before it if uv started this one: the user's shell may not know `pretrax` itself.

    It installs nothing more: without the tools for the tests, it leaves them out as the first command did.
    """
    if 'UV' not in os.environ:
        return command
    is_small = importlib.util.find_spec('pytest') is None and 'UV_NO_DEV' not in os.environ
    return f'uv run {"--no-dev " if is_small else ""}{command}'
