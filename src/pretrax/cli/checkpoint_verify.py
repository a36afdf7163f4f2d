"""`pretrax checkpoint verify RUN_OR_CHECKPOINT...`: reads every file, and compares it with what was written."""

from pathlib import Path

from pretrax.checkpoint import DamagedError, checkpoints_of, find_checkpoint, is_checkpoint, steps_in, verify
from pretrax.errors import UserError
from pretrax.scale.memory import size


def verify_checkpoints(paths: list[str]) -> None:
    """Prints a line for each checkpoint, of a run all. Raises UserError at the end where one is damaged."""
    damaged: list[str] = []
    for path in map(Path, paths):
        directory, newest = find_checkpoint(path)
        for step in [newest] if is_checkpoint(path) else steps_in(checkpoints_of(path)):
            place = directory / str(step)
            try:
                manifest = verify(directory, step)
            except DamagedError as error:
                damaged.append('; '.join(str(error).splitlines()))
                print(f'{place}: DAMAGED')
            else:
                total = size(sum(file.size for file in manifest.files.values()))
                print(f'{place}: {len(manifest.files)} files, {total}, all as they were written')
    if damaged:
        raise UserError('\n'.join([*damaged[:8], 'train goes on from the newest that is not damaged']))
