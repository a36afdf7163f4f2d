"""Writes a whole file, on a disk or in a bucket. If two processes write one, that of the last stays."""

from pathlib import Path

from pretrax.storage.locate import AnyPath
from pretrax.system.atomic import write_file


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
