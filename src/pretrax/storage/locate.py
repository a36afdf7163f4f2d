"""Finds out whether a text names a path on a disk or in a bucket."""

import difflib
import re
from pathlib import Path

from pretrax.errors import UserError
from pretrax.storage.bucket_path import SCHEMES, BucketPath

type AnyPath = Path | BucketPath

# `Path('gs://bucket/run')` is `gs:/bucket/run`: the second form is refused too, so that no run lands in a directory `gs:`.
_URL = re.compile(r'([A-Za-z][A-Za-z0-9+.-]*):/(/?)')


def locate(text: str) -> AnyPath:
    """The BucketPath of gs://BUCKET/KEY and s3://BUCKET/KEY; the path of file:///PATH and of any other text.

    Raises:
        UserError: another scheme, a malformed URL, or a NUL character.
    """
    if '\0' in text:
        raise UserError(f'{text!r} is not a path: it has a NUL character')
    match = _URL.match(text)
    if match is None:
        return Path(text).expanduser()
    scheme, slash = match[1].lower(), match[2]
    if not slash:
        raise UserError(f'{text}: a URL has two slashes after the scheme\nwrite {scheme}://{text[match.end() :]}')
    if scheme == 'file':
        path = text[match.end() :].removeprefix('localhost')
        if not path.startswith('/'):
            raise UserError(f'{text}: a file URL has an absolute path\nwrite file:///{path}, or only {path}')
        return Path(path)
    if scheme not in SCHEMES:
        near = difflib.get_close_matches(scheme, [*SCHEMES, 'file'], 1, 0.5)
        known = ', '.join(f'{name}://' for name in (*SCHEMES, 'file'))
        hint = f'; did you mean {near[0]}://?' if near else ''
        raise UserError(f'{text}: {scheme}:// is not supported here{hint}\nexpected a local path, or one of {known}')
    return BucketPath(f'{scheme}://{text[match.end() :]}')
