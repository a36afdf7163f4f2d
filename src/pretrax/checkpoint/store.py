"""Checkpoints of a run: Orbax directories `checkpoints/<step>/`, written behind the training, whole or not at all.

A checkpoint holds the training state and a JSON description of what made it. Restoring puts every array where the mesh
in force wants it, whatever mesh wrote it.
"""

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import orbax.checkpoint as ocp

from ..errors import UserError


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
        directory: `<run_dir>/checkpoints`.
        keep: how many of the newest stay, what a killed process left half-written does not; None writes and removes
            nothing.
    """

    def __init__(self, directory: pathlib.Path, keep: int | None = None):
        self.directory = directory.absolute()
        writes = keep is not None
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=writes, cleanup_tmp_directories=writes)
        handlers = {'state': ocp.StandardCheckpointHandler(), 'description': ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    def newest(self) -> int | None:
        """The step of the newest whole checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, description: dict[str, Any]) -> None:
        """Starts writing; returns when the state is copied off the devices. A step already saved is left as it is."""
        if step not in self._manager.all_steps():
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(state), description=ocp.args.JsonSave(description)
            )  # fmt: skip
            self._manager.save(step, args=items)

    def restore(self, step: int, like: Any) -> Any:
        """The state of a step as `like` has it: shapes, dtypes and shardings. Raises UserError where it cannot be read."""
        with self._told(step):
            restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))
        return restored['state']

    def restore_weights(self, step: int, like: Any) -> Any:
        """The weights alone, without the optimizer's state, as `like` has them."""
        with self._told(step), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            item = {'weights': like}
            args = ocp.args.PyTreeRestore(
                item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
            )
            return checkpointer.restore(self.directory / str(step) / 'state', args=args)['weights']

    @contextlib.contextmanager
    def _told(self, step: int) -> Iterator[None]:
        """What Orbax says of a checkpoint that it cannot read, in our words."""
        try:
            yield
        except Exception as error:
            # Where an array cannot be read Orbax raises a bare Exception, whose cause says why.
            if type(error) is not Exception and not isinstance(error, ValueError | KeyError | OSError):
                raise
            told = str(error.__cause__ if type(error) is Exception and error.__cause__ else error).strip()
            reason = told.splitlines()[0][:300] if told else type(error).__name__
            raise UserError(
                f'the checkpoint {self.directory / str(step)} cannot be restored\n{reason}\n'
                'it may be damaged, or the model in the configuration may not be the one that wrote it'
            ) from error

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.wait_until_finished()
        self._manager.close()


def steps_in(directory: pathlib.Path) -> list[int]:
    """The steps of the whole checkpoints in a directory, oldest first. (Half-written ones have another name.)"""
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdigit())


def read_description(directory: pathlib.Path, step: int) -> dict[str, Any]:
    """What made a checkpoint: versions and configuration. Plain JSON, read without JAX.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = directory / str(step) / 'description' / 'metadata'
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f'the checkpoint {directory / str(step)} has no readable description\n{path}: {error}'
        ) from error
