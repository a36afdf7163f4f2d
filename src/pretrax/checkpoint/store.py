"""Checkpoints of a run: Orbax directories `checkpoints/<step>/`, written behind the training, whole or not at all.

A checkpoint holds the training state and a manifest with a digest of every file. Restoring puts every array where the
mesh in force wants it, whatever mesh wrote it. Arrays are stored as they are, uncompressed: random mantissas do not
compress, and trying costs most of the time (docs/lab-notes.md).
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from ..errors import UserError
from .manifest import (
    PARTIAL,
    STATE,
    Array,
    named_arrays,
    partial_place,
    publish,
    read_description,
    steps_in,
    verify,
)

_DELETING = '.deleting'  # ends the name of what is no checkpoint any more

# Orbax warns at every save that there is nothing to merge, which is how files that are not OCDBT are.
logging.getLogger('absl').addFilter(lambda record: 'Skipping merge of OCDBT' not in record.getMessage())


class SaveError(Exception):
    """A checkpoint could not be written: a full disk, a directory that is gone or may not be written."""


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which checkpoints stay when a new one is whole: the union of what each field asks for.

    Attributes:
        last: the newest ones.
        every: those of steps that it divides; 0 for none.
        best: those with the lowest `val_loss` in their description; 0 for none.
    """

    last: int = 3
    every: int = 0
    best: int = 0

    def chosen(self, losses: dict[int, float | None]) -> set[int]:
        """The steps that stay, of steps and their validation losses (None: not evaluated there)."""
        steps = sorted(losses)
        rated = sorted((loss, step) for step, loss in losses.items() if loss is not None)
        return {
            *steps[-self.last :],
            *(step for step in steps if self.every and step % self.every == 0),
            *(step for _, step in rated[: self.best]),
        }


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
        directory: `<run_dir>/checkpoints`.
        keep: what stays; an integer for that many of the newest; None: this writes nothing.
    """

    def __init__(self, directory: pathlib.Path, keep: Keep | int | None = None):
        self.directory = directory.absolute()
        self._keep = Keep(keep) if isinstance(keep, int) else keep
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
        self._checkpointer = ocp.AsyncCheckpointer(handler)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='checkpoint')
        self._writing: concurrent.futures.Future[None] | None = None
        if self._keep is not None:
            self._remove_partial()

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint."""
        return max(steps_in(self.directory), default=None)

    def save(self, step: int, state: Any, description: dict[str, Any]) -> None:
        """Starts writing; returns when the state is copied off the devices. A step already saved is left as it is.

        Raises:
            SaveError: this save, or the one that was still being written, did not succeed.
        """
        self.wait()
        if step in steps_in(self.directory):
            return
        partial = partial_place(self.directory, step)
        with _save_errors(self.directory):
            if jax.process_index() == 0:
                if partial.exists():  # left by a save that failed
                    shutil.rmtree(partial)
                partial.mkdir(parents=True)
            self._checkpointer.save(partial / STATE, args=ocp.args.PyTreeSave(state))
            self._writing = self._thread.submit(self._finish, step, description, named_arrays(state))

    def wait(self) -> None:
        """Waits until what was begun is written, and removes what need not stay. Raises SaveError if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with _save_errors(self.directory):
                writing.result()

    def restore(self, step: int, like: Any) -> Any:
        """The state of a step as `like` has it: shapes, dtypes and shardings. Part of a state may be asked for: a dict
        with some of its fields, such as {'weights': ...}.

        Raises:
            UserError: a file is not what was written, or the arrays are not those of `like`.
        """
        manifest = verify(self.directory, step)
        place = self.directory / str(step)
        _check_arrays(place, manifest.arrays, named_arrays(like))
        arguments = ocp.args.PyTreeRestore(
            item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
        )
        return self._checkpointer.restore(place / STATE, args=arguments)

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, which will be trained again."""
        with contextlib.suppress(SaveError):  # what was being written goes as well
            self.wait()
        if jax.process_index() == 0:
            for later in steps_in(self.directory):
                if later > step:
                    self._remove(later)
        if jax.process_count() > 1:
            from jax.experimental.multihost_utils import sync_global_devices

            sync_global_devices('later checkpoints are removed')

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
            self._checkpointer.close()

    def _finish(self, step: int, description: dict[str, Any], arrays: dict[str, Array]) -> None:
        """Behind the training: waits for Orbax, describes what it wrote, and gives it its name."""
        assert self._keep is not None
        self._checkpointer.wait_until_finished()
        if jax.process_index() != 0:
            return
        publish(self.directory, step, description, arrays)
        self._remove_superfluous(self._keep)

    def _remove_superfluous(self, keep: Keep) -> None:
        losses = {}
        for step in steps_in(self.directory):
            try:
                losses[step] = read_description(self.directory, step).get('val_loss')
            except UserError:
                losses[step] = None  # damaged since: it is for `restore` to say so, and ages out like the others
        for step in losses.keys() - keep.chosen(losses):
            self._remove(step)

    def _remove(self, step: int) -> None:
        # Another name first: a process that is killed while it deletes leaves nothing that looks whole.
        doomed = self.directory / f'{step}{_DELETING}'
        (self.directory / str(step)).rename(doomed)
        shutil.rmtree(doomed)

    def _remove_partial(self) -> None:
        """What processes that were killed while writing or deleting have left."""
        if jax.process_index() == 0 and self.directory.is_dir():
            for place in self.directory.iterdir():
                if place.suffix in (PARTIAL, _DELETING):
                    shutil.rmtree(place)


def newest_readable(directory: pathlib.Path, say: Callable[[str], None]) -> int | None:
    """The newest checkpoint that is as it was written, or None where there is none at all. Says what it passes over.

    Raises:
        UserError: there are checkpoints, and none is readable. Training from step 0 over them would lose the run.
    """
    steps = steps_in(directory)
    for step in reversed(steps):
        try:
            verify(directory, step)
        except UserError as error:
            say('WARNING: ' + '; '.join(str(error).splitlines()))
        else:
            return step
    if steps:
        raise UserError(
            f'none of the {len(steps)} checkpoints in {directory} is readable\n'
            'restore one from a copy, or move the directory away to begin at step 0'
        )
    return None


def _check_arrays(place: pathlib.Path, stored: dict[str, Array], wanted: dict[str, Array]) -> None:
    fields = {name.split('.')[0] for name in wanted}  # of a state of which a part is asked for, that part
    missing = sorted(wanted.keys() - stored)
    surplus = sorted(name for name in stored.keys() - wanted if name.split('.')[0] in fields)
    other = [name for name in sorted(wanted.keys() & stored) if wanted[name].shape != stored[name].shape]
    if not missing and not surplus and not other:
        return
    missing, surplus, other = (
        sorted(x, key=lambda name: not name.startswith('weights')) for x in (missing, surplus, other)
    )
    lines = [f'{name}: the checkpoint has none' for name in missing]
    lines += [f'{name}: only the checkpoint has it' for name in surplus]
    lines += [
        f'{name}: {_shape(stored[name])} in the checkpoint, {_shape(wanted[name])} in the model' for name in other
    ]
    more = [f'and {len(lines) - 4} more'] if len(lines) > 4 else []
    raise UserError(
        '\n'.join(
            [f'the checkpoint {place} is of another model or optimizer than the configuration:', *lines[:4], *more]
        )
    )


def _shape(array: Array) -> str:
    return ' x '.join(map(str, array.shape)) or 'a scalar'


@contextlib.contextmanager
def _save_errors(directory: pathlib.Path) -> Iterator[None]:
    """What goes wrong while writing reaches the caller as a SaveError, whatever type Orbax and TensorStore chose."""
    try:
        yield
    except Exception as error:  # OSError, ValueError, RuntimeError and bare Exceptions were all seen
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise SaveError(f'no checkpoint could be written to {directory}: {reason}') from error
