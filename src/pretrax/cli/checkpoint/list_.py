"""List the checkpoints of a run, and why each is kept."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from pretrax.option import argument

if TYPE_CHECKING:
    from pretrax.checkpoint import Keep, Manifest

_HEAD = ('step', 'size', 'written', 'val_loss', 'kept as', 'files')


def list_(run: str = argument('The directory of a run: runs/NAME.', metavar='RUN')) -> None:
    from pretrax.amounts import age, size
    from pretrax.checkpoint import DamagedError, Manifest, check_sizes, checkpoints_of, steps_in
    from pretrax.checkpoint.keep import is_good
    from pretrax.checkpoint.manifest import MANIFEST, UNFINISHED
    from pretrax.storage import locate_run
    from pretrax.view.tables import text_table

    directory = checkpoints_of(locate_run(run))
    found: dict[int, Manifest | str] = {}
    for step in steps_in(directory):
        try:
            found[step] = check_sizes(directory, step)
        except DamagedError as error:
            found[step] = ' '.join(str(error).splitlines()[1:])
    whole = {step: manifest for step, manifest in found.items() if isinstance(manifest, Manifest)}
    losses = {step: m.description.get('val_loss') for step, m in whole.items()}
    doubtful = {step for step, m in whole.items() if not is_good(m.description)}
    reasons = _keep(whole).reasons(losses, doubtful)
    rows: list[tuple[str, ...]] = [_HEAD]
    for step, manifest in found.items():
        if isinstance(manifest, str):
            rows.append((f'{step:,}', '', '', '', '', f'DAMAGED: {manifest}'))
            continue
        loss, file = manifest.description.get('val_loss'), manifest.place / MANIFEST
        rows.append(
            (
                f'{step:,}',
                size(sum(file.size for file in manifest.files.values())),
                f'{age(time.time() - file.stat().st_mtime)} ago' if isinstance(file, Path) else '-',
                '-' if loss is None else f'{loss:.4f}',
                ', '.join(reasons[step]) or '(deleted next)',
                f'{len(manifest.sizes)}, all present',
            )
        )
    print('\n'.join(text_table(rows, left=(len(_HEAD) - 1,), drop=('size', 'written'))))
    for entry in sorted(directory.iterdir()):
        if entry.suffix in UNFINISHED:
            print(f'{entry.name}: being written or deleted, or left by a process that was killed; the run removes it')


def _keep(whole: dict[int, 'Manifest']) -> 'Keep':
    """The rule in the newest checkpoint's configuration."""
    from pretrax.checkpoint import Keep

    newest = whole[max(whole)].description if whole else {}
    section = (newest.get('config') or {}).get('checkpoint') or {}
    return Keep(section.get('keep', 3), section.get('keep_every', 0), section.get('keep_best', 0))
