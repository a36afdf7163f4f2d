"""The manifest of a checkpoint: `<run_dir>/checkpoints/<step>/manifest.json`, plain JSON that is read without JAX.

The manifest is written last and lists all other files with size and digest. A directory whose name is a number is a
complete checkpoint: it has another name until its manifest is on disk.
"""

import concurrent.futures
import json
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any, Literal

import pydantic
import xxhash

from pretrax.errors import UserError
from pretrax.machine.atomic import sync_directory, sync_file

MANIFEST = 'manifest.json'
STATE = 'state'  # the subdirectory that Orbax writes
PARTIAL = '.partial'  # suffix of an incomplete checkpoint
DELETING = '.deleting'  # suffix of a checkpoint that is being deleted
UNFINISHED = (PARTIAL, DELETING)
_BLOCK = 4 << 20  # bytes; small enough for the CPU cache


class DamagedError(UserError):
    """A checkpoint differs from what was written."""


class Array(pydantic.BaseModel):
    """Shape and dtype of one array of the state."""

    shape: tuple[int, ...]
    dtype: str


class File(pydantic.BaseModel):
    """Size in bytes and XXH3 digest (128 bits, hexadecimal) of one file."""

    size: int
    xxh3: str


class Manifest(pydantic.BaseModel):
    """Attributes: the step; the writer's description (versions, configuration, data); arrays by dotted name; files by
    path inside the checkpoint."""

    model_config = pydantic.ConfigDict(extra='forbid')

    format: Literal['pretrax-checkpoint']
    version: Literal[1]
    step: int
    description: dict[str, Any]
    arrays: dict[str, Array]
    files: dict[str, File]


def shape_text(shape: tuple[int, ...]) -> str:
    """The shape as text, such as '50257 x 768'."""
    return ' x '.join(map(str, shape)) or 'a scalar'


def steps_in(directory: pathlib.Path) -> list[int]:
    """The steps of the checkpoints in a directory, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdigit() and entry.is_dir())


def read_manifest(directory: pathlib.Path, step: int) -> Manifest:
    """Reads and checks a manifest. Raises DamagedError if it is missing or damaged."""
    path = directory / str(step) / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        said = content.pop('manifest_xxh3')
        manifest = Manifest.model_validate(content)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DamagedError(
            f'the checkpoint {directory / str(step)} has no readable description\n{path}: {reason}'
        ) from error
    if said != _self_digest(manifest):
        raise DamagedError(f'the checkpoint {directory / str(step)} is damaged\n{path}: its digest differs')
    if manifest.step != step:
        raise DamagedError(
            f'the checkpoint {directory / str(step)} is damaged\nits manifest is for step {manifest.step}'
        )
    return manifest


def read_description(directory: pathlib.Path, step: int) -> dict[str, Any]:
    """The writer's description of a checkpoint. Raises DamagedError if it is missing or damaged."""
    return read_manifest(directory, step).description


def named_arrays(state: Any) -> dict[str, Array]:
    """Shape and dtype of every array of a state by its dotted name."""
    import jax  # the rest of this file does not need JAX

    return {
        jax.tree_util.keystr(path, simple=True, separator='.'): Array(shape=tuple(leaf.shape), dtype=str(leaf.dtype))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def partial_directory(directory: pathlib.Path, step: int) -> pathlib.Path:
    """The directory in which a checkpoint is written, until `publish` renames it."""
    return directory / f'{step}{PARTIAL}'


def assign_to_processes(files: Iterable[str], processes: int) -> dict[str, int]:
    """Assigns each file to the process that digests it. Chunks of an array are assigned in order, as shards mostly
    are, so that a process digests what it writes or reads anyway."""
    folders: dict[str, list[str]] = {}
    found = {}
    for number, file in enumerate(sorted(files, key=_by_number)):
        folder, _, name = file.rpartition('/')
        if name.replace('.', '').isdigit():
            folders.setdefault(folder, []).append(file)
        else:
            found[file] = number % processes
    for number, chunks in enumerate(folders.values()):
        n = len(chunks)
        found |= {c: i * processes // n if n >= processes else (i + number) % processes for i, c in enumerate(chunks)}
    return found


def written(place: pathlib.Path) -> set[str]:
    """The files in a directory that will become a checkpoint."""
    return set(_files(place))


def digests(place: pathlib.Path, names: Iterable[str]) -> dict[str, File]:
    """Syncs these files to disk. Returns their sizes and digests. Raises OSError."""
    found = _digests(place, names, sync=True)
    return {name: File(size=size, xxh3=digest) for name, (size, digest) in found.items()}


def publish(
    directory: pathlib.Path, step: int, description: dict[str, Any], arrays: dict[str, Array], files: dict[str, File]
) -> None:
    """Completes the checkpoint in `partial_directory`: writes its manifest and renames it. Raises OSError."""
    place = partial_directory(directory, step)
    manifest = Manifest(
        format='pretrax-checkpoint', version=1, step=step, description=description, arrays=arrays, files=files
    )
    content = manifest.model_dump(mode='json') | {'manifest_xxh3': _self_digest(manifest)}
    with (place / MANIFEST).open('w') as stream:
        json.dump(content, stream, indent=1)
        sync_file(stream)
    sync_directory(place)
    place.rename(directory / str(step))
    sync_directory(directory)


def check_sizes(directory: pathlib.Path, step: int) -> Manifest:
    """Compares the names and sizes of a checkpoint's files with its manifest. Reads only the manifest.

    Raises:
        DamagedError: something differs; the message names it.
    """
    manifest = read_manifest(directory, step)
    place = directory / str(step)
    found = _files(place)
    missing, extra = sorted(manifest.files.keys() - found), sorted(found.keys() - manifest.files)
    if missing or extra:
        what = f'{missing[0]} is missing' if missing else f'{extra[0]} does not belong to it'
        raise DamagedError(f'the checkpoint {place} is damaged\n{what}')
    for name, said in manifest.files.items():
        size = found[name].stat().st_size
        if size != said.size:
            raise DamagedError(f'the checkpoint {place} is damaged\n{name} has {size} bytes, not {said.size}')
    return manifest


def verify(directory: pathlib.Path, step: int, prefix: str = '') -> Manifest:
    """Reads the files of a checkpoint whose names start with `prefix` and compares them with the manifest.

    Raises:
        DamagedError: something differs; the message names it.
    """
    manifest = check_sizes(directory, step)
    place = directory / str(step)
    for name, (_, digest) in _digests(place, [name for name in manifest.files if name.startswith(prefix)]).items():
        if digest != manifest.files[name].xxh3:
            raise DamagedError(f'the checkpoint {place} is damaged\n{name} differs from what was written')
    return manifest


def _self_digest(manifest: Manifest) -> str:
    return xxhash.xxh3_128_hexdigest(manifest.model_dump_json().encode())


def _by_number(file: str) -> list[tuple[bool, int, str]]:
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r'(\d+)', file)]


def _files(place: pathlib.Path) -> dict[str, pathlib.Path]:
    found = {str(path.relative_to(place)): path for path in sorted(place.rglob('*')) if path.is_file()}
    return {name: path for name, path in found.items() if name != MANIFEST}


def _digests(place: pathlib.Path, names: Iterable[str], sync: bool = False) -> dict[str, tuple[int, str]]:
    """Size and digest of these files, which are read in parallel."""

    def digest(name: str) -> tuple[int, str]:
        total, size = xxhash.xxh3_128(), 0
        block = memoryview(bytearray(_BLOCK))
        with (place / name).open('rb', buffering=0) as stream:
            while n := stream.readinto(block):
                total.update(block[:n])
                size += n
            if sync:
                os.fsync(stream.fileno())
        return size, total.hexdigest()

    names = list(names)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            return dict(zip(names, pool.map(digest, names), strict=True))
    except OSError as error:
        if sync:
            raise  # raised while writing
        raise DamagedError(f'the checkpoint {place} cannot be read\n{error.filename}: {error.strerror}') from error
