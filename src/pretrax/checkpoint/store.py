"""Checkpoints of a run: Orbax directories `checkpoints/<step>/`, written behind the training, whole or not at all.

A checkpoint holds the training state and a manifest with a digest of every file. Restoring puts every array where the
mesh in force wants it, whatever mesh wrote it. Arrays are stored as they are, uncompressed: random mantissas do not
compress, and trying costs most of the time (docs/lab-notes.md).
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
    digests,
    named_arrays,
    partial_place,
    publish,
    read_description,
    shared_out,
    steps_in,
    written,
)
from pretrax.errors import UserError

_PROBE = 4096  # bytes
_THERE = 'there is one'

# Orbax warns at every save that there is nothing to merge, which is how files that are not OCDBT are. What fails while it
# saves it prints with pages of traces, several times, and raises: once is enough, in a line.
_SAID_TWICE = (
    'Skipping merge of OCDBT', 'Handler Commit operations', 'raised an exception', 'async_serialize',
    'Failed to write metadata',
)  # fmt: skip
for _name in ('absl', 'asyncio'):
    logging.getLogger(_name).addFilter(lambda record: not any(text in record.getMessage() for text in _SAID_TWICE))


class SaveError(Exception):
    """A checkpoint could not be written: a full disk, a directory that is gone or may not be written."""


class Checkpoints:
    """Writes the checkpoints of one run directory.

    Args:
        directory: `<run_dir>/checkpoints`.
        keep: what stays; an integer for that many of the newest.

    Attributes:
        saved: the newest step that this wrote, or found written.
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
        self._told = ''  # why the save that is being written failed, in a process that heard it from another
        self._remove_partial()

    def save(self, step: int, state: Any, description: dict[str, Any]) -> None:
        """Starts writing; returns when the state is copied off the devices. A step already saved is left as it is.

        Raises:
            SaveError: this save, or the one that was still being written, did not succeed; in all processes alike.
        """
        self.wait()
        partial = partial_place(self.directory, step)
        if self._check_place(partial, step):
            self.saved = step
            return
        self._told = ''
        try:
            self._checkpointer.save(partial / STATE, args=ocp.args.PyTreeSave(state))
        except Exception as error:  # OSError, ValueError, RuntimeError and bare Exceptions were all seen
            raise self._failed(partial, self._told or agree('save', _reason(error))) from error
        self._writing = self._thread.submit(self._finish, step, description, named_arrays(state))

    def wait(self) -> None:
        """Waits until what was begun is written, and removes what need not stay. Raises SaveError if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, which will be trained again. Raises UserError where it cannot."""
        with contextlib.suppress(SaveError):  # what was being written goes as well
            self.wait()
        self.saved = None

        def remove() -> None:
            for later in steps_in(self.directory):
                if later > step:
                    self._remove(later)

        if problem := _first_does('remove', remove):
            raise UserError(
                f'checkpoints after step {step} cannot be removed: {problem}\nmake {self.directory} writable'
            )

    def __enter__(self) -> 'Checkpoints':
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After an error in one of several processes the others may be gone, and writing would wait for them for ever.
        if kind is None or jax.process_count() == 1:
            self.close()

    def close(self) -> None:
        """Waits until everything is written. Raises SaveError if that failed."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            with contextlib.suppress(OSError):  # of a save that failed, which has been told
                self._checkpointer.close()

    def _check_place(self, partial: pathlib.Path, step: int) -> bool:
        """Makes the directory of a checkpoint, and sees in every process that it can be written, before any begins.
        True where the step is saved already."""

        def make() -> str:
            if step in steps_in(self.directory):
                return _THERE
            self._clear()  # what saves that failed left, and went on to write after it was removed
            partial.mkdir(parents=True)
            return ''

        problem = _first_does('save', make)
        if not problem and jax.process_count() > 1:
            probe = partial / f'probe-{jax.process_index()}'
            try:
                probe.write_bytes(bytes(_PROBE))
                probe.unlink()
            except OSError as error:
                problem = _reason(error)
            problem = agree('save', problem)
        if problem and problem != _THERE:
            raise self._failed(partial, problem)
        return problem == _THERE

    def _meet(self, key: str, timeout_ms: int) -> None:
        """Where Orbax has the processes wait for each other: a process that fails tells those that wait for it."""
        del key, timeout_ms
        self._told = agree('save', '')
        if self._told:
            raise SaveError(self._told)

    def _finish(self, step: int, description: dict[str, Any], arrays: dict[str, Array]) -> None:
        """Behind the training: waits for Orbax, describes what it wrote, and gives it its name."""
        partial, found, problem = partial_place(self.directory, step), {}, ''
        try:
            self._checkpointer.wait_until_finished()
            readers = shared_out(written(partial), jax.process_count())
            found = digests(partial, [name for name, reader in readers.items() if reader == jax.process_index()])
        except Exception as error:
            problem = _reason(error)
        if problem := self._told or agree('save', problem):
            raise self._failed(partial, problem)
        told = gather('save', json.dumps({name: file.model_dump() for name, file in found.items()}))

        def name_it() -> None:
            files = {name: File(**said) for text in told for name, said in json.loads(text).items()}
            files |= digests(partial, written(partial) - files.keys())  # which a process did not see yet
            publish(self.directory, step, description, arrays, files)

        if problem := _first_does('save', name_it):
            raise self._failed(partial, problem)
        self.saved = step
        if problem := _first_does('save', self._remove_superfluous):
            raise SaveError(f'checkpoint {step} is written, but older ones in {self.directory} stay: {problem}')

    def _failed(self, partial: pathlib.Path, problem: str) -> SaveError:
        if jax.process_index() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # room for the next one, which removes what stays
        return SaveError(f'no checkpoint could be written to {self.directory}: {problem}')

    def _remove_superfluous(self) -> None:
        losses = {}
        for step in steps_in(self.directory):
            try:
                losses[step] = read_description(self.directory, step).get('val_loss')
            except UserError:
                losses[step] = None  # damaged since: it is for `restore` to say so, and ages out like the others
        for step in losses.keys() - self._keep.chosen(losses):
            self._remove(step)

    def _remove(self, step: int) -> None:
        # Another name first: a process that is killed while it deletes leaves nothing that looks whole.
        doomed = self.directory / f'{step}{DELETING}'
        (self.directory / str(step)).rename(doomed)
        shutil.rmtree(doomed)

    def _remove_partial(self) -> None:
        """What processes that were killed while writing or deleting have left."""
        if problem := _first_does('begin', self._clear):
            raise UserError(
                f'{self.directory} cannot be written: {problem}\nmake it writable, or give another run_dir='
            )

    def _clear(self) -> None:
        for place in self.directory.iterdir() if self.directory.is_dir() else ():
            if place.suffix in UNFINISHED:
                shutil.rmtree(place)


def _first_does(about: str, work: Callable[[], str | None]) -> str:
    """Has the first process work on the files that all share. What is in the way, in all processes alike: what `work`
    tells or raises, or ''."""
    problem = ''
    try:
        if jax.process_index() == 0:
            problem = work() or ''
    except Exception as error:  # whatever it is, the others wait to hear of it
        problem = _reason(error)
    return agree(about, problem)


def _reason(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        text if len(text) <= 300 else f'{text[:150]} ... {text[-150:]}'
    )  # paths are long, and what is wrong comes last
