"""Checkpoints of a run: Orbax directories `checkpoints/<step>/`, written asynchronously and atomically.

A checkpoint holds the training state and a manifest with a digest of every file. Restoring shards every array for the
current mesh, whatever mesh wrote it. Arrays are stored uncompressed: random mantissas do not compress, and trying takes
most of the time (docs/lab-notes.md).
"""

import concurrent.futures
import contextlib
import json
import logging
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from pretrax.checkpoint.agreement import agree, gather
from pretrax.checkpoint.keep import Keep
from pretrax.checkpoint.manifest import (
    DELETING,
    STATE,
    UNFINISHED,
    Array,
    File,
    assign_to_processes,
    digests,
    named_arrays,
    partial_directory,
    publish,
    read_description,
    steps_in,
    written,
)
from pretrax.errors import UserError

_PROBE = 4096  # bytes
_EXISTS = 'there is one'

# Without OCDBT, Orbax warns at every save that there is nothing to merge. If a save fails, it logs pages of tracebacks and
# also raises. We report the error once, in one line.
_REDUNDANT = (
    'Skipping merge of OCDBT', 'Handler Commit operations', 'raised an exception', 'async_serialize',
    'Failed to write metadata',
)  # fmt: skip
for _name in ('absl', 'asyncio'):
    logging.getLogger(_name).addFilter(lambda record: not any(text in record.getMessage() for text in _REDUNDANT))


class SaveError(Exception):
    """A checkpoint could not be written, for example because the disk is full or the directory is not writable."""


class Checkpoints:
    """Writes the checkpoints of one run directory.

    Args:
        directory: `<run_dir>/checkpoints`.
        keep: the checkpoints to keep; an integer keeps the newest `keep`.

    Attributes:
        saved: the newest step that was written, or that had been written before.
    """

    def __init__(self, directory: pathlib.Path, keep: Keep | int):
        self.directory = directory.absolute()
        self.saved: int | None = None
        self._keep = Keep(keep) if isinstance(keep, int) else keep
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
        options = ocp.options.AsyncOptions(barrier_sync_fn=self._meet)
        self._checkpointer = ocp.AsyncCheckpointer(handler, async_options=options)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='checkpoint')
        self._writing: concurrent.futures.Future[None] | None = None
        self._remote_problem = ''  # why the current save failed, if another process reported it
        self._remove_partial()

    def save(self, step: int, state: Any, description: dict[str, Any]) -> None:
        """Starts a save and returns when the state is copied off the devices. A step that is already saved stays unchanged.

        Raises:
            SaveError: this save or the previous one failed. Raised in all processes.
        """
        self.wait()
        partial = partial_directory(self.directory, step)
        if self._check_place(partial, step):
            self.saved = step
            return
        self._remote_problem = ''
        try:
            self._checkpointer.save(partial / STATE, args=ocp.args.PyTreeSave(state))
        except Exception as error:  # Orbax raises OSError, ValueError, RuntimeError and Exception
            raise self._failed(partial, self._remote_problem or agree('save', _one_line(error))) from error
        self._writing = self._thread.submit(self._finish, step, description, named_arrays(state))

    def wait(self) -> None:
        """Waits for the current save and removes superseded checkpoints. Raises SaveError if the save failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, which will be trained again. Raises UserError if that fails."""
        with contextlib.suppress(SaveError):  # the current save is removed too
            self.wait()
        self.saved = None

        def remove() -> None:
            for later in steps_in(self.directory):
                if later > step:
                    self._remove(later)

        if problem := _in_first_process('remove', remove):
            raise UserError(
                f'checkpoints after step {step} cannot be removed: {problem}\nmake {self.directory} writable'
            )

    def __enter__(self) -> 'Checkpoints':
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After an error in one of several processes the others may be gone, and a save would wait for them forever.
        if kind is None or jax.process_count() == 1:
            self.close()

    def close(self) -> None:
        """Waits until everything is written. Raises SaveError if a save failed."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            with contextlib.suppress(OSError):  # a failed save has already been reported
                self._checkpointer.close()

    def _check_place(self, partial: pathlib.Path, step: int) -> bool:
        """Creates the directory of a checkpoint and checks that every process can write to it. Returns whether the step
        is already saved."""

        def make() -> str:
            if step in steps_in(self.directory):
                return _EXISTS
            self._clear()  # leftovers of failed saves, including files they wrote after they were removed
            partial.mkdir(parents=True)
            return ''

        problem = _in_first_process('save', make)
        if not problem and jax.process_count() > 1:
            probe = partial / f'probe-{jax.process_index()}'
            try:
                probe.write_bytes(bytes(_PROBE))
                probe.unlink()
            except OSError as error:
                problem = _one_line(error)
            problem = agree('save', problem)
        if problem and problem != _EXISTS:
            raise self._failed(partial, problem)
        return problem == _EXISTS

    def _meet(self, key: str, timeout_ms: int) -> None:
        """Orbax's barrier. A process that failed reports its problem to those that wait for it."""
        del key, timeout_ms
        self._remote_problem = agree('save', '')
        if self._remote_problem:
            raise SaveError(self._remote_problem)

    def _finish(self, step: int, description: dict[str, Any], arrays: dict[str, Array]) -> None:
        """Runs in the background: waits for Orbax, writes the manifest and renames the checkpoint."""
        partial, found, problem = partial_directory(self.directory, step), {}, ''
        try:
            self._checkpointer.wait_until_finished()
            readers = assign_to_processes(written(partial), jax.process_count())
            found = digests(partial, [name for name, reader in readers.items() if reader == jax.process_index()])
        except Exception as error:
            problem = _one_line(error)
        if problem := self._remote_problem or agree('save', problem):
            raise self._failed(partial, problem)
        told = gather('save', json.dumps({name: file.model_dump() for name, file in found.items()}))

        def complete() -> None:
            files = {name: File(**said) for text in told for name, said in json.loads(text).items()}
            files |= digests(partial, written(partial) - files.keys())  # files that their process did not see yet
            publish(self.directory, step, description, arrays, files)

        if problem := _in_first_process('save', complete):
            raise self._failed(partial, problem)
        self.saved = step
        if problem := _in_first_process('save', self._remove_superfluous):
            raise SaveError(
                f'checkpoint {step} is written, but older ones in {self.directory} could not be removed: {problem}'
            )

    def _failed(self, partial: pathlib.Path, problem: str) -> SaveError:
        if jax.process_index() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # frees space; the next save removes what is left
        return SaveError(f'no checkpoint could be written to {self.directory}: {problem}')

    def _remove_superfluous(self) -> None:
        losses = {}
        for step in steps_in(self.directory):
            try:
                losses[step] = read_description(self.directory, step).get('val_loss')
            except UserError:
                losses[step] = None  # damaged: `restore` reports it, and it is removed like the others
        for step in losses.keys() - self._keep.chosen(losses):
            self._remove(step)

    def _remove(self, step: int) -> None:
        # Rename first: a process killed during deletion must not leave a directory that looks complete.
        doomed = self.directory / f'{step}{DELETING}'
        (self.directory / str(step)).rename(doomed)
        shutil.rmtree(doomed)

    def _remove_partial(self) -> None:
        """Removes what processes left that were killed while writing or deleting."""
        if problem := _in_first_process('begin', self._clear):
            raise UserError(
                f'{self.directory} is not writable: {problem}\nmake it writable, or choose another run_dir='
            )

    def _clear(self) -> None:
        for place in self.directory.iterdir() if self.directory.is_dir() else ():
            if place.suffix in UNFINISHED:
                shutil.rmtree(place)


def _in_first_process(about: str, work: Callable[[], str | None]) -> str:
    """Runs `work` in process 0. Returns, in all processes, the problem that it returns or raises, or ''."""
    problem = ''
    try:
        if jax.process_index() == 0:
            problem = work() or ''
    except Exception as error:  # the other processes wait for the outcome
        problem = _one_line(error)
    return agree(about, problem)


def _one_line(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if len(text) <= 300 else f'{text[:150]} ... {text[-150:]}'  # paths are long, and the cause comes last
