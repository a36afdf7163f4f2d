"""Compare every file of checkpoints with its digest.

The exit code is 2 if a file differs.
"""

from pretrax.errors import UserError
from pretrax.option import argument


def verify(
    paths: tuple[str, ...] = argument('For a run, all of its checkpoints are read.', metavar='RUN_OR_CHECKPOINT...'),
) -> None:
    from pretrax.amounts import size
    from pretrax.checkpoint import DamagedError, checkpoints_of, find_checkpoint, is_checkpoint, steps_in
    from pretrax.checkpoint import verify as read_and_compare
    from pretrax.storage import locate_run

    damaged: list[str] = []
    for path in map(locate_run, paths):
        directory, newest = find_checkpoint(path)
        for step in [newest] if is_checkpoint(path) else steps_in(checkpoints_of(path)):
            place = directory / str(step)
            try:
                manifest = read_and_compare(directory, step)
            except DamagedError as error:
                damaged.append('; '.join(str(error).splitlines()))
                print(f'{place}: DAMAGED')
            else:
                total = size(sum(file.size for file in manifest.files.values()))
                print(f'{place}: {len(manifest.sizes)} files, {total}, all as they were written')
    if damaged:
        raise UserError('\n'.join([*damaged[:8], 'train resumes from the newest checkpoint that is not damaged']))
