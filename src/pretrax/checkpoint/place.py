"""Finds the checkpoint that a path refers to."""

from pretrax.checkpoint.manifest import is_step, steps_in
from pretrax.errors import UserError
from pretrax.storage import AnyPath, BucketPath


def checkpoints_of(path: AnyPath) -> AnyPath:
    """The `checkpoints` directory of a run. The path may also be that directory.

    Raises UserError if there is no such directory, or it has no checkpoint.
    """
    if not path.is_dir():
        beside = [] if isinstance(path, BucketPath) or not path.parent.is_dir() else list(path.parent.iterdir())
        beside = sorted(entry.name for entry in beside if entry.is_dir())
        raise UserError(f'{path}: no such run or checkpoint' + (f'\nfound: {", ".join(beside[:8])}' if beside else ''))
    directory = path if path.name == 'checkpoints' else path / 'checkpoints'
    if not steps_in(directory):
        raise UserError(f'{path} has no checkpoint yet\ntrain it first, or give a run such as runs/quickstart')
    return directory


def is_checkpoint(path: AnyPath) -> bool:
    """Whether a path is a single checkpoint, not a run or its `checkpoints` directory."""
    return path.is_dir() and is_step(path.name) and path.parent.name == 'checkpoints'


def find_checkpoint(path: AnyPath) -> tuple[AnyPath, int]:
    """The `checkpoints` directory and the step of a path: a checkpoint, or the newest one of a run or its
    `checkpoints`.

    Raises UserError if there is no checkpoint at this path.
    """
    if is_checkpoint(path):
        return path.parent, int(path.name)
    directory = checkpoints_of(path)
    return directory, steps_in(directory)[-1]
