"""The checkpoints of a run, from their manifests."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from pretrax.checkpoint.manifest import MANIFEST, place_of, steps_in
from pretrax.machine.json_file import parse_json
from pretrax.storage import AnyPath


class SavedCheckpoint(NamedTuple):
    """A checkpoint."""

    step: int
    size: int  # size of its files, bytes
    files: int
    written: float | None  # when its manifest was written, seconds since 1970; None in a bucket
    val_loss: float | None  # validation loss of its step, if there was an evaluation
    finite: bool | None  # whether all weights and the optimizer state are finite; None: not known


def saved_checkpoints(directory: AnyPath, warnings: list[str]) -> list[SavedCheckpoint]:
    """The checkpoints in a directory, oldest first. `warnings` receives those whose manifest cannot be read."""
    steps = steps_in(directory)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda step: _checkpoint(place_of(directory, step), step), steps))
    missing = [step for step, one in zip(steps, found, strict=True) if one is None]
    warnings += [f'{directory / str(step)} has no readable manifest' for step in missing]
    return [one for one in found if one is not None]


def _checkpoint(place: AnyPath, step: int) -> SavedCheckpoint | None:
    path = place / MANIFEST
    try:
        manifest: dict[str, Any] = parse_json(path.read_bytes())
        sizes = [int(file['size']) for file in manifest['files'].values()]
        about = manifest['description']
        val_loss, finite = about.get('val_loss'), about.get('finite_state')
        written = path.stat().st_mtime if isinstance(path, Path) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    is_number = type(val_loss) in (int, float)
    return SavedCheckpoint(
        step, sum(sizes), len(sizes), written, val_loss if is_number else None, finite if type(finite) is bool else None
    )
