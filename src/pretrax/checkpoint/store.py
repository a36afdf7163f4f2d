"""Saves the checkpoints of a run in the background, keeps some of them, and removes the others.

A checkpoint holds the training state and a manifest with a digest of every file. Restoring shards every array for the
current mesh, whatever mesh wrote it. The order of all changes is explored by tests/checkpoint/test_keep.py.
"""

import concurrent.futures
import contextlib
import secrets
from collections.abc import Callable
from typing import Any

import jax

from pretrax.checkpoint.agreement import broadcast, decide, first_problem, from_process_0
from pretrax.checkpoint.bucket import Bucket
from pretrax.checkpoint.directory import Directory
from pretrax.checkpoint.files import File
from pretrax.checkpoint.keep import Keep
from pretrax.checkpoint.manifest import Array, DamagedError, named_arrays, read_description
from pretrax.errors import OF_THE_SYSTEM, UnavailableError, UserError
from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.connection import BucketError, as_os_error
from pretrax.system.process_memory import return_free_memory

_EXISTS = 'there is one'


class SaveError(Exception):
    """A checkpoint could not be written, for example because the disk is full or the directory is not writable."""


class Checkpoints(contextlib.AbstractContextManager['Checkpoints']):
    """Writes the checkpoints of one run directory.

    Args (functions are called in process 0):
        directory: `<run_dir>/checkpoints`.
        keep: the checkpoints to keep; an integer keeps the newest `keep`.
        record: receives the step of the newest checkpoint whenever that changes; 0: there is none.
        before_publish: receives the step of a checkpoint before it becomes valid; the save fails if it raises.
        confirm: makes a request, and raises an exception if another process has taken over the run.

    Attributes:
        saved: the newest step that was written, or that had been written before.
        problem: why the last save that failed did; '': none did.
    """

    def __init__(
        self,
        directory: AnyPath,
        keep: Keep | int,
        record: Callable[[int], None] = lambda step: None,
        before_publish: Callable[[int], None] = lambda step: None,
        confirm: Callable[[], None] = lambda: None,
    ):
        self.directory = directory.absolute()
        self.saved: int | None = None
        self.problem = ''
        self._keep = Keep(keep) if isinstance(keep, int) else keep
        self._record, self._before_publish = record, before_publish
        token = broadcast('begin', secrets.token_hex(4))
        if isinstance(self.directory, BucketPath):
            self._place = Bucket(self.directory, token, confirm)
        else:
            self._place = Directory(self.directory, token, confirm)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='checkpoint')
        self._writing: concurrent.futures.Future[None] | None = None
        self._start: int | None = None  # the step that training continues from; later checkpoints are replaced
        if problem := _in_first_process('begin', self._place.begin):
            kind = UnavailableError if isinstance(self.directory, BucketPath) else UserError
            raise kind(f'{self.directory} is not writable: {problem}\nmake it writable, or choose another run_dir=')

    def save(self, step: int, state: Any, description: dict[str, Any]) -> None:
        """Starts a save and returns when the next step may reuse the memory of the state.

        A checkpoint of this step that is already there stays unchanged, unless `continue_from` said otherwise.

        Raises SaveError if this save or the previous one failed. Raised in all processes.
        """
        self.wait()
        if self._prepare(step):
            self.saved = step
            return
        try:
            self._place.write(step, state)
        except Exception as error:  # the devices or the memory of the host
            raise self._failed(step, self._publish(step, {}, _one_line(error), description, {})) from error
        self._writing = self._thread.submit(self._finish, step, description, named_arrays(state))
        self._place.wait(self._writing.done)

    def wait(self) -> None:
        """Waits for the current save and removes superseded checkpoints. Raises SaveError if the save failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def continue_from(self, step: int) -> None:
        """Training continues from this step: a later checkpoint, which could not be restored, will be replaced."""
        self._start = step

    def roll_back_to(self, step: int) -> None:
        """Removes the checkpoints of later steps, which will be trained again.

        Raises SaveError if they cannot be removed now; the next good checkpoint removes them.
        """
        with contextlib.suppress(SaveError):  # the current save is removed too
            self.wait()
        self.saved = None
        self.continue_from(step)

        def remove() -> None:
            self._record(step)
            for later in self._place.steps():
                if later > step:
                    self._place.remove(later)

        if problem := _in_first_process('remove', remove):
            raise SaveError(f'checkpoints after step {step} in {self.directory} could not be removed: {problem}')

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

    def _prepare(self, step: int) -> bool:
        """Prepares a save. Returns whether the step is already saved."""

        def prepare() -> str:
            is_new = self._start is not None and step > self._start
            if not is_new and step in self._place.steps():
                return _EXISTS
            self._place.prepare(step)
            return ''

        problem = _in_first_process('save', prepare)
        if problem and problem != _EXISTS:
            raise self._failed(step, problem)
        return problem == _EXISTS

    def _finish(self, step: int, description: dict[str, Any], arrays: dict[str, Array]) -> None:
        """Runs in the background: waits for the arrays, publishes the checkpoint and removes superfluous ones."""
        found, problem = {}, ''
        try:
            found = self._place.finish(step)
        except Exception as error:
            problem = _one_line(error)
        if problem := self._publish(step, found, problem, description, arrays):
            raise self._failed(step, problem)
        self.saved = step
        return_free_memory()  # the next step has copied arrays that were not written
        if problem := _in_first_process('save', lambda: self._clean_up(step)):
            raise SaveError(
                f'checkpoint {step} is written, but older ones in {self.directory} could not be removed: {problem}'
            )

    def _publish(
        self, step: int, found: dict[str, File], problem: str, description: dict[str, Any], arrays: dict[str, Array]
    ) -> str:
        """Publishes what all processes have written, unless one reports a problem. Returns, in all, the problem or ''.

        Args:
            found: what this process has written.
        """

        def publish(parts: list[tuple[str, dict[str, Any]]]) -> str:
            if failure := first_problem([problem for problem, _ in parts]):
                return failure
            files = {name: File(**values) for _, wrote in parts for name, values in wrote.items()}
            self._before_publish(step)
            self._place.publish(step, description, arrays, files)
            return ''

        own = [problem, {name: file.model_dump() for name, file in found.items()}]
        return decide('save', own, lambda parts: _problem_of(lambda: publish(parts)))

    def _failed(self, step: int, problem: str) -> SaveError:
        if jax.process_index() == 0:
            self._place.discard(step)
        self.problem = problem
        return SaveError(f'no checkpoint could be written to {self.directory}: {problem}')

    def _clean_up(self, saved: int) -> None:
        descriptions: dict[int, dict[str, Any] | None] = {}
        for step in self._place.steps():
            try:
                descriptions[step] = read_description(self.directory, step)
            except DamagedError:  # `restore_newest` reports it
                descriptions[step] = None
        for step in self._keep.superfluous(saved, descriptions):
            self._place.remove(step)
        self._record(saved)


def _in_first_process(about: str, work: Callable[[], str | None]) -> str:
    """Runs `work` in process 0. Returns, in all processes, the problem that it returns or raises, or ''."""
    return from_process_0(about, lambda: _problem_of(work))


def _problem_of(work: Callable[[], str | None]) -> str:
    """The problem that some work returns or raises; '': none."""
    try:
        return work() or ''
    except Exception as error:
        return _one_line(error)


def _one_line(error: Exception) -> str:
    found = error if isinstance(error, OSError) else as_os_error(error, '')
    if found.errno in OF_THE_SYSTEM and not isinstance(found, BucketError):
        return str(found.strerror)
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if len(text) <= 300 else f'{text[:150]} ... {text[-150:]}'  # paths are long, and the cause comes last
