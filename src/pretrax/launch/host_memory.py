"""The directory in the memory of this host that keeps the newest state of a run between its attempts.

Its launcher holds a lock on it, so that the next one on this host removes what a killed launcher has left.
"""

import contextlib
import os
import pathlib
import secrets
import shutil

from pretrax.checkpoint.memory_pieces import VARIABLE, newest_in
from pretrax.system.locks import holder_of, lock_directory

_ROOT = pathlib.Path('/dev/shm')  # a file system in memory, on Linux


class HostMemory(contextlib.AbstractContextManager['HostMemory']):
    """The directory, from `with` on; there is none if the system has no file system in memory.

    Attributes:
        environment: tells the training where it is.
    """

    def __init__(self, root: pathlib.Path = _ROOT):
        self._root, self._held = root, contextlib.ExitStack()
        self._place: pathlib.Path | None = None
        self.environment: dict[str, str] = {}

    def __enter__(self) -> 'HostMemory':
        name = f'pretrax-{os.getuid()}-'
        with contextlib.suppress(OSError):
            for left in self._root.glob(f'{name}*'):
                if holder_of(left) is None:
                    shutil.rmtree(left, ignore_errors=True)
            if self._root.is_dir():
                place = self._root / f'{name}{secrets.token_hex(8)}'
                self._held.enter_context(lock_directory(place, lambda reason: None))
                place.chmod(0o700)
                self._place, self.environment = place, {VARIABLE: str(place)}
        return self

    def __exit__(self, *_: object) -> None:
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
        self._held.close()

    def newest(self) -> int:
        """The newest step whose whole state is there; 0: none."""
        return newest_in(self._place)
