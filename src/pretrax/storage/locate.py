"""Finds out whether a text names a path on a disk or in a bucket, and writes whole files in either."""

import difflib
import hashlib
import os
import posixpath
import re
import socket
import urllib.parse
from pathlib import Path

from pretrax.errors import UserError
from pretrax.storage.bucket_path import SCHEMES, BucketPath
from pretrax.system.atomic import write_file
from pretrax.system.cache import cache_directory

type AnyPath = Path | BucketPath

LONGEST_NAME = 100  # characters

# `Path('gs://bucket/run')` is `gs:/bucket/run`: the second form is refused too, so that no run lands in a directory
# `gs:`.
_URL = re.compile(r'([A-Za-z][A-Za-z0-9+.-]*):/(/?)')


def locate(text: str, directory: AnyPath | None = None) -> AnyPath:
    """The BucketPath of gs://BUCKET/KEY and s3://BUCKET/KEY; else the path of file:///PATH or a text, without `..`.

    In file:///PATH, %20 is a space.

    Args:
        text: what a user wrote.
        directory: where a relative path begins; None: the current directory.

    Raises:
        UserError: another scheme, a malformed URL, a NUL character, a backslash, which TensorStore takes for a slash,
            or a home directory that nobody has.
    """
    if '\0' in text:
        raise UserError(f'{text!r} is not a path: it has a NUL character')
    match = _URL.match(text)
    if match is None:
        return _below(directory, text)
    scheme, slash = match[1].lower(), match[2]
    if len(scheme) == 1:
        raise UserError(f'{text}: a path of Windows\nexpected a path such as /mnt/{scheme}/{text[match.end() :]}')
    if not slash:
        raise UserError(f'{text}: a URL has two slashes after the scheme\nwrite {scheme}://{text[match.end() :]}')
    if scheme == 'file':
        path = urllib.parse.unquote(text[match.end() :].removeprefix('localhost'))
        if '\0' in path:
            raise UserError(f'{text!r} is not a path: it has a NUL character')
        if not path.startswith('/'):
            raise UserError(f'{text}: a file URL has an absolute path\nwrite file:///{path}, or only {path}')
        return _without_dots(Path(path))
    if scheme not in SCHEMES:
        near = difflib.get_close_matches(scheme, [*SCHEMES, 'file'], 1, 0.5)
        known = ', '.join(f'{name}://' for name in (*SCHEMES, 'file'))
        hint = f'; did you mean {near[0]}://?' if near else ''
        raise UserError(f'{text}: {scheme}:// is not supported here{hint}\nexpected a local path, or one of {known}')
    return BucketPath(f'{scheme}://{text[match.end() :]}')


def locate_run(text: str) -> AnyPath:
    """The path of a text, as `locate`. A name without a path that does not exist here may be that of `runs/NAME`."""
    path = locate(text)
    named = Path('runs') / text if path == Path(text) and path.name == text else None
    return named if named is not None and named.is_dir() and not path.exists() else path


def locate_local(text: str) -> Path:
    """The path of a text, as `locate`. Raises UserError as it does, and for a bucket."""
    path = locate(text)
    if isinstance(path, BucketPath):
        raise UserError(f'{path} is in a bucket; expected a local path\ncopy it to this machine')
    return path


def _below(directory: AnyPath | None, text: str) -> AnyPath:
    if '\\' in text:
        raise UserError(f'{text}: a path has no backslash here\nwrite {text.replace(chr(92), "/")}')
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise UserError(f'{text}: there is no such home directory\nwrite the whole path') from None
    if path.is_absolute() or directory is None:
        return _without_dots(path)
    if isinstance(directory, BucketPath):
        key = posixpath.normpath(f'/{directory.key}/{path.as_posix()}')
        return BucketPath(f'{directory.scheme}://{directory.bucket}{key}')
    return _without_dots(directory / path)


def _without_dots(path: Path) -> Path:
    """Removes `..` and `//`, which TensorStore refuses. A link before a `..` is followed, as the system does."""
    parts = path.parts
    if '..' in parts:
        end = len(parts) - parts[::-1].index('..')
        whole = Path(os.path.realpath(Path(*parts[:end])), *parts[end:])
        is_here = not path.is_absolute() and whole.is_relative_to(Path.cwd())
        path = whole.relative_to(Path.cwd()) if is_here else whole
    return Path(str(path)[1:]) if str(path).startswith('//') else path


def write_whole(path: AnyPath, content: bytes, sync: bool = False) -> None:
    """Writes a file or an object, or leaves the old one. Raises OSError.

    Args:
        path: its directory exists.
        content: replaces the old content.
        sync: puts a file on the disk too; an object is durable in any case.
    """
    if isinstance(path, Path):
        write_file(path, content, sync)
    else:
        path.write_bytes(content)


def working_directory(run_dir: AnyPath, index: int = 0) -> Path:
    """The run directory itself if it is on a disk; else a directory below the user's cache.

    Its name has a digest of the URL, the machine and the process, so that no two processes share it by accident:
    machines often have the same home directory.
    """
    if isinstance(run_dir, Path):
        return run_dir
    digest = hashlib.sha256(f'{run_dir} {socket.gethostname()} {index}'.encode()).hexdigest()
    return cache_directory() / 'runs' / f'{run_dir.name}-{digest[:16]}'


def plain_name(text: str) -> str:
    """The text, or the nearest one, that is safe in paths and keys on every system: '' if there is none.

    It has ASCII letters, digits, '.', '_' and '-', and begins and ends with none of '.' and '-'.
    """
    plain = ''.join(c if c.isascii() and (c.isalnum() or c in '._-') else '-' for c in text)
    return plain.strip('.-')[:LONGEST_NAME].rstrip('.-')
