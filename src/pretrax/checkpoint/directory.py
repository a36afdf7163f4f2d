"""Checkpoints on a disk: Orbax directories `<step>/`, written asynchronously and atomically.

A checkpoint is called `<token>.partial/<step>.partial` until all of it is on the disk, and
`<token>.partial/<step>.deleting` while it is deleted. `<token>.partial` belongs to the processes of one start, and the
next start moves it away. So a process that was taken over, for example because a file server lost its lock, can neither
publish nor remove a checkpoint: both rename a directory from or to a place that is gone.

Arrays are stored uncompressed: random mantissas do not compress, and trying takes most of the time
(benchmarks/lab-notes.md).
"""

import contextlib
import functools
import logging
import pathlib
import shutil
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from pretrax.checkpoint.manifest import (
    DELETING,
    MANIFEST,
    PARTIAL,
    STATE,
    UNFINISHED,
    Array,
    File,
    assign_to_processes,
    digests,
    partial_directory,
    place_of,
    publish,
    steps_in,
    written,
)
from pretrax.storage.index import INDEX

_PROBE = 4096  # bytes

# Without OCDBT, Orbax warns at every save that there is nothing to merge. If a save fails, it logs pages of tracebacks
# and also raises. We report the error once, in one line. Later errors of the same save, which name Orbax's temporary
# directory, reach asyncio's log when their futures are collected.
_REDUNDANT = (
    'Skipping merge of OCDBT', 'Handler Commit operations', 'raised an exception', 'async_serialize',
    'Failed to write metadata', 'GatheringFuture exception was never retrieved', '.orbax-checkpoint-tmp',
)  # fmt: skip


class Directory:
    """The directory `<run_dir>/checkpoints`. Processes call `write` and `finish` together; process 0 calls the rest.

    Args:
        path: the directory.
        token: names the directory in which these processes write.
        confirm: raises an exception if another process has taken over the run. Called in process 0.
        meet: barrier of all processes, for Orbax.
    """

    def __init__(self, path: pathlib.Path, token: str, confirm: Callable[[], None], meet: Callable[..., None]):
        self.path, self._own, self._confirm, self._meet = path, path / f'{token}{PARTIAL}', confirm, meet

    @functools.cached_property
    def _checkpointer(self) -> ocp.AsyncCheckpointer:
        _silence_orbax()
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
        return ocp.AsyncCheckpointer(handler, async_options=ocp.options.AsyncOptions(barrier_sync_fn=self._meet))

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

    def check(self, step: int) -> None:
        """Checks that this process can write to the directory. Raises OSError."""
        probe = partial_directory(self._own, step) / f'probe-{jax.process_index()}'
        probe.write_bytes(bytes(_PROBE))
        probe.unlink()

    def write(self, step: int, state: Any) -> None:
        """Starts to write the state of a step. Returns when it is copied off the devices."""
        self._checkpointer.save(partial_directory(self._own, step) / STATE, args=ocp.args.PyTreeSave(state))

    def finish(self, step: int) -> dict[str, File]:
        """Waits until the state is written. Returns the digests of this process's share of the files."""
        self._checkpointer.wait_until_finished()
        partial = partial_directory(self._own, step)
        readers = assign_to_processes(written(partial), jax.process_count())
        return digests(partial, [name for name, reader in readers.items() if reader == jax.process_index()])

    def publish(self, step: int, description: dict[str, Any], arrays: dict[str, Array], files: dict[str, File]) -> None:
        """Makes what was written the checkpoint of its step, and removes the one that it replaces."""
        partial = partial_directory(self._own, step)
        unseen = digests(partial, written(partial) - files.keys())  # files that their process did not see yet
        self._confirm()  # this process, or TensorStore, may have created again what was moved away
        publish(partial, self.path, step, description, arrays, files | unseen)
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

    def close(self) -> None:
        """Ends Orbax's threads."""
        if '_checkpointer' in vars(self):
            with contextlib.suppress(OSError):  # a failed save has already been reported
                self._checkpointer.close()


def _unwrap(directory: pathlib.Path) -> None:
    """Moves the files of checkpoints that were copied from a bucket to where they are on a disk, the manifests last."""
    for step in steps_in(directory):
        attempt, place = pathlib.Path(str(place_of(directory, step))), directory / str(step)
        for path in sorted(attempt.iterdir(), key=lambda path: path.name == MANIFEST) if attempt != place else ():
            path.rename(place / path.name)
        if attempt != place:
            attempt.rmdir()
    (directory / INDEX).unlink()


@functools.cache
def _silence_orbax() -> None:
    """Installs the filters for `_REDUNDANT` in this process, once."""
    for name in ('absl', 'asyncio'):
        logging.getLogger(name).addFilter(lambda record: not any(text in record.getMessage() for text in _REDUNDANT))
    warnings.filterwarnings('ignore', "coroutine 'async_serialize.*' was never awaited", RuntimeWarning)
    report = sys.unraisablehook

    def report_others(unraisable: 'sys.UnraisableHookArgs') -> None:
        """When one array cannot be written, Orbax does not wait for the others:
        they end after its event loop is closed.
        """
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == 'Event loop is closed'):
            report(unraisable)

    sys.unraisablehook = report_others
