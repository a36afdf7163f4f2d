"""A directory in a bucket that appears whole or not at all, whoever else writes it.

Each writer writes below a prefix that no other writer uses, `written-TOKEN/`. The index of the directory names the
prefix that is the result:

    {"entries": {"result": "written-5f2c..."}}

It is created, and never replaced. So the first writer that ends makes the result, and a writer that was stopped for a
while changes nothing of it. Objects below other prefixes can never become the result once the index exists: they are
removed then.
"""

import contextlib
import json
import re
import secrets
from collections.abc import Iterator
from typing import overload

from pretrax.storage.bucket_path import BucketPath
from pretrax.storage.index import INDEX, read_entries
from pretrax.storage.locate import AnyPath

_RESULT = 'result'
_WRITTEN = re.compile(r'written-[0-9a-f]{16}')


@contextlib.contextmanager
def new_result(place: BucketPath) -> Iterator[BucketPath]:
    """A prefix to write below, which becomes the result at a place when the block ends without an error.

    If another process makes the result first, that one stays, and what this process has written is removed. Raises
    OSError.
    """
    prefix = place / f'written-{secrets.token_hex(8)}'
    try:
        yield prefix
    except BaseException:
        with contextlib.suppress(OSError):  # the bucket may be the reason; the next writer removes the rest
            prefix.remove_tree()
        raise
    (place / INDEX).create(json.dumps({'entries': {_RESULT: prefix.name}}).encode())
    remove_unfinished(place)


@overload
def result_at(place: BucketPath) -> BucketPath: ...
@overload
def result_at(place: AnyPath) -> AnyPath: ...
def result_at(place: AnyPath) -> AnyPath:
    """Where the files of a result are, in a bucket or in a copy of it; the place itself if it has no index.

    Raises OSError if the index cannot be read.
    """
    name = (read_entries(place) or {}).get(_RESULT)
    return place / name if name is not None and _WRITTEN.fullmatch(name) else place


def is_unfinished(file: str) -> bool:
    """Whether a file, relative to its place, is below the prefix of a writer."""
    return _WRITTEN.fullmatch(file.partition('/')[0]) is not None


def remove_unfinished(place: BucketPath) -> None:
    """Removes what other writers have left, if there is a result. Raises OSError."""
    result = result_at(place)
    if result != place:
        left = [file for file in place.files() if is_unfinished(file) and not file.startswith(f'{result.name}/')]
        place.unlink_below(left)
