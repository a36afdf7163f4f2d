"""Where a run and its caches are written: free space, and the bucket."""

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from pretrax.amounts import size
from pretrax.doctor.findings import Context, Finding, failure, warning
from pretrax.errors import first_line
from pretrax.storage import BucketPath
from pretrax.storage.locate import working_directory
from pretrax.system.cache import cache_directory

_CACHE = 2**30  # bytes: compiled programs, and what a run in a bucket has not uploaded yet
_SLOW = 2.0  # seconds for a small request


def run_directory(context: Context) -> Iterator[Finding]:
    """Whether the run directory can be written. Whether checkpoints fit there: see `checkpoints`."""
    if context.config is None or not isinstance(context.config.run_dir, Path):
        return
    parent = existing_parent(context.config.run_dir)
    try:
        with tempfile.TemporaryFile(dir=parent) as file:  # permissions are not enough: the disk may be full
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield failure(
            'run directory',
            f'{parent} cannot be written: {error.strerror}',
            'make room, or choose another: run_dir=PATH',
        )
        return
    free = shutil.disk_usage(parent).free
    yield Finding('run directory', f'{size(free)} free for {context.config.run_dir}', amount=free)


def cache(context: Context) -> Iterator[Finding]:
    """The user's cache directory: compiled programs, data from the Web, and files on their way to a bucket."""
    parent = existing_parent(cache_directory())
    try:
        tempfile.TemporaryFile(dir=parent).close()
        free = shutil.disk_usage(parent).free
    except OSError as error:
        yield warning('cache', f'{parent} cannot be written: {error.strerror}', 'export XDG_CACHE_HOME=PATH')
        return
    if free < _CACHE:
        yield warning('cache', f'{size(free)} free in {parent}', 'make room, or export XDG_CACHE_HOME=PATH')
    else:
        yield Finding('cache', f'{size(free)} free', amount=free)


def bucket(context: Context) -> Iterator[Finding]:
    """Writes, reads and deletes an object in the run's bucket."""
    if context.config is None or not isinstance(context.config.run_dir, BucketPath):
        return
    remote = context.config.run_dir / f'.doctor-{uuid.uuid4().hex}'
    content, began = os.urandom(1024), time.monotonic()
    try:
        remote.write_bytes(content)
        found = remote.read_bytes()
        remote.unlink()
    except OSError as error:
        fix = (
            'check the name, the credentials of this node, their permission to write, and the network (docs/storage.md)'
        )
        yield failure('bucket', f'{context.config.run_dir}: {error.strerror or first_line(error)}', fix)
        return
    seconds = (time.monotonic() - began) / 3
    if found != content:
        yield failure('bucket', 'an object that was written is read with other content', 'use another service')
    elif seconds > _SLOW:
        fix = 'use a bucket in the region of the nodes; check the network of this node'
        yield warning('bucket', f'{seconds * 1e3:.0f} ms per request', fix)
    else:
        text = f'written, read, deleted; {seconds * 1e3:.0f} ms per request'
        yield Finding('bucket', text, amount=-seconds)


def checkpoints(context: Context, needed: int, note: str) -> Iterator[Finding]:
    """Whether checkpoints of a run fit on its disk.

    Args:
        note: how that was found.
    """
    assert context.config is not None
    remote = isinstance(context.config.run_dir, BucketPath)
    free = shutil.disk_usage(existing_parent(working_directory(context.config.run_dir))).free
    kept = context.config.checkpoint.keep
    each = f'{size(needed)} each{note}'
    if remote:
        yield Finding('checkpoints', f'{each}, in a bucket')
    elif free < needed:
        yield failure(
            'checkpoints', f'{each}, and {size(free)} free', 'make room, or choose another disk: run_dir=PATH'
        )
    elif free < needed * (kept + 1):  # the next one is complete before the oldest is removed
        fix = f'make room, or keep fewer: checkpoint.keep={max(1, int(free / needed) - 1)}'
        yield warning('checkpoints', f'{each}, {kept} are kept, and {size(free)} free', fix)
    else:
        yield Finding('checkpoints', f'{each}, {kept} kept; they fit')


def existing_parent(path: Path) -> Path:
    """The nearest parent of a path, or the path itself, that exists."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.is_dir())
