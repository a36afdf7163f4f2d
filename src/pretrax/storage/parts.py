"""Files that are appended to, in a bucket: objects `NAME/000000`, `NAME/000001`, ... of one size, the last one smaller.

A growing file is uploaded by writing its last part again. The parts in the order of their names are the file.
"""

import io
from pathlib import Path
from typing import BinaryIO

from pretrax.storage.locate import AnyPath

PART = 512 * 1024  # bytes


def open_joined(path: AnyPath) -> BinaryIO:
    """Opens a file, or the parts of one in a bucket.

    Raises:
        FileNotFoundError: there is neither.
        OSError: it cannot be read.
    """
    if isinstance(path, Path):
        return path.open('rb')
    names = path.files()
    if not names:
        return io.BytesIO(path.read_bytes())
    return io.BytesIO(b''.join((path / name).read_bytes() for name in names))
