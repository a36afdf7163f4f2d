"""The directory on this machine's disk in which a run in a bucket writes what it uploads."""

import hashlib
import socket
from pathlib import Path

from pretrax.storage.locate import AnyPath
from pretrax.system.cache import cache_directory


def working_directory(run_dir: AnyPath, index: int = 0) -> Path:
    """The run directory itself if it is on a disk; else a directory below the user's cache.

    Its name has a digest of the URL, the machine and the process, so that no two processes share it by accident:
    machines often have the same home directory.
    """
    if isinstance(run_dir, Path):
        return run_dir
    digest = hashlib.sha256(f'{run_dir} {socket.gethostname()} {index}'.encode()).hexdigest()
    return cache_directory() / 'runs' / f'{run_dir.name}-{digest[:16]}'
