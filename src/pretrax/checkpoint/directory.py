"""Checkpoints on a disk: directories `<step>/`, written in the background and atomically.

A checkpoint is called `<token>.partial/<step>.partial` until all of it is on the disk, and
`<token>.partial/<step>.deleting` while it is deleted. `<token>.partial` belongs to the processes of one start, and the
next start moves it away. So a process that was taken over, for example because a file server lost its lock, can neither
publish nor remove a checkpoint: both rename a directory from or to a place that is gone.
"""

import concurrent.futures
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax

from pretrax.checkpoint.files import File
from pretrax.checkpoint.manifest import (
    DELETING,
    MANIFEST,
    PARTIAL,
    UNFINISHED,
    Array,
    partial_directory,
    place_of,
    publish,
    steps_in,
)
from pretrax.checkpoint.ocdbt import database
from pretrax.checkpoint.state_files import HostFiles, copy_to_host, tree_metadata, write_files
from pretrax.storage.index import INDEX
from pretrax.system.atomic import sync_file

_THREADS = 16  # files that are put on the disk at a time


class Directory:
    """The directory `<run_dir>/checkpoints`. Processes call `write` and `finish` together; process 0 calls the rest.

    Args:
        token: names the directory in which these processes write.
        confirm: raises an exception if another process has taken over the run. Called in process 0.
    """

    def __init__(self, path: pathlib.Path, token: str, confirm: Callable[[], None]):
        self.path, self._own, self._confirm = path, path / f'{token}{PARTIAL}', confirm
        self._files = HostFiles()  # what this process will write

    def begin(self) -> None:
        """Takes over the checkpoints: removes what earlier processes have left while writing or deleting."""
        left = [place for place in self.path.iterdir() if place.suffix in UNFINISHED] if self.path.is_dir() else []
        self._move_away(left)
        if (self.path / INDEX).is_file():
            _unwrap(self.path)

    def steps(self) -> list[int]:
        """The steps of the checkpoints, oldest first."""
        return steps_in(self.path)

    def prepare(self, step: int) -> None:
        """Creates the directory that a checkpoint is written in."""
        if self._own.is_dir():
            shutil.rmtree(self._own)  # leftovers of failed saves, including files they wrote after they were removed
        partial_directory(self._own, step).mkdir(parents=True)

    def write(self, step: int, state: Any) -> None:
        """Copies the state of a step off the devices."""
        del step
        metadata = [tree_metadata(state)] if jax.process_index() == 0 else []
        self._files = HostFiles(copy_to_host(state), unpacked=metadata)

    def finish(self, step: int) -> dict[str, File]:
        """Writes what this process has copied. Returns the digests."""
        partial = partial_directory(self._own, step)
        files = self._files.write(lambda name, content: _write(partial / name, content))
        with concurrent.futures.ThreadPoolExecutor(_THREADS, 'sync') as pool:
            list(pool.map(_sync, {partial / (file.pack or name) for name, file in files.items()}))
        return files

    def wait(self, has_ended: Callable[[], bool]) -> None:
        """Waits until most of the state is written if it shares its memory with the devices, as on CPUs.

        The next step copies the arrays that are not written, since it may not reuse their memory.
        """
        if jax.local_devices()[0].platform == 'cpu':
            self._files.wait_until_few(has_ended)

    def publish(self, step: int, description: dict[str, Any], arrays: dict[str, Array], files: dict[str, File]) -> None:
        """Makes what was written the checkpoint of its step, and removes the one that it replaces."""
        partial = partial_directory(self._own, step)
        self._confirm()  # this process may have created again what was moved away
        for name, values in database(files).items():
            own = write_files(name, [(name, values)], lambda name, content: write_synced(partial / name, content))
            files = files | own
        publish(partial, self.path, step, description, arrays, files)
        shutil.rmtree(self._own, ignore_errors=True)  # the next save removes what is left

    def discard(self, step: int) -> None:
        """Removes what a failed save has written, to free its space. The next save removes what is left."""
        shutil.rmtree(partial_directory(self._own, step), ignore_errors=True)

    def remove(self, step: int) -> None:
        """Removes a checkpoint."""
        self._move_away([self.path / str(step)])

    def _move_away(self, places: list[pathlib.Path]) -> None:
        """Removes directories. A process killed during the deletion leaves none that looks complete."""
        if places:
            self._own.mkdir(exist_ok=True)
            self._confirm()
            for place in places:
                place.rename(self._own / f'{place.name}{DELETING}')
            shutil.rmtree(self._own)


def write_synced(path: pathlib.Path, content: memoryview) -> None:
    """Writes a file of the state, and puts it on the disk. Raises OSError, also if the checkpoint was moved away."""
    _write(path, content)
    _sync(path)


def _write(path: pathlib.Path, content: memoryview) -> None:
    path.parent.parent.mkdir(exist_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)


def _sync(path: pathlib.Path) -> None:
    with path.open('rb') as stream:
        sync_file(stream)


def _unwrap(directory: pathlib.Path) -> None:
    """Moves the files of checkpoints that were copied from a bucket to where they are on a disk, the manifests last."""
    for step in steps_in(directory):
        attempt, place = pathlib.Path(str(place_of(directory, step))), directory / str(step)
        for path in sorted(attempt.iterdir(), key=lambda path: path.name == MANIFEST) if attempt != place else ():
            path.rename(place / path.name)
        if attempt != place:
            attempt.rmdir()
    (directory / INDEX).unlink()
