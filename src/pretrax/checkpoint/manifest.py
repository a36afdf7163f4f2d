"""The manifest of a checkpoint: `<run_dir>/checkpoints/<step>/manifest.json`, plain JSON that is read without JAX.

The manifest is written last and lists all other files with size and digest. On a disk, a directory whose name is a
number is a complete checkpoint: it has another name until its manifest is on disk. In a bucket, each attempt to save a
step has a prefix of its own, `<step>/<attempt>/`, and is the checkpoint of the step if the index of `checkpoints/`
names it (storage/index.py). Checkpoints that were copied from a disk are directly in `<step>/`.
"""

import concurrent.futures
import contextlib
import json
import math
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import pydantic
import xxhash

from pretrax.checkpoint.files import File, Place, names_in, open_file, raise_if_unreachable, read_file
from pretrax.errors import UserError
from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.index import Entries, read_entries
from pretrax.system.atomic import sync_directory, sync_file
from pretrax.system.digest import digest
from pretrax.system.json_file import parse_json

MANIFEST = 'manifest.json'
STATE = 'state'  # the subdirectory with the arrays
PARTIAL = '.partial'  # suffix of an incomplete checkpoint
DELETING = '.deleting'  # suffix of a checkpoint that is being deleted
UNFINISHED = (PARTIAL, DELETING)
# Arrays that only training uses: the map of a student's hidden states to those of its teacher
# (distill/hidden_states.py)
_OF_TRAINING = ('weights.hidden_projection', 'ema.hidden_projection')


class DamagedError(UserError):
    """A checkpoint differs from what was written."""


def damaged(place: Place, problem: str) -> DamagedError:
    """The error for a checkpoint with a file that differs from what was written."""
    return DamagedError(f'the checkpoint {place} is damaged\n{problem}')


def unreadable(place: Place, error: OSError) -> DamagedError:
    """The error for a file that cannot be read. Raises UserError or OSError as `raise_if_unreachable`."""
    raise_if_unreachable(place, error)
    if isinstance(place, pathlib.Path) and not place.is_dir():  # its run has newer ones, or somebody deleted it
        return DamagedError(
            f'there is no checkpoint {place} now: it may have been removed\nrun the same command again; '
            'a larger checkpoint.keep of its run leaves more time to read'
        )
    return DamagedError(f'the checkpoint {place} cannot be read\n{error.filename}: {error.strerror}')


LARGEST_ARRAY = 1 << 52  # numbers; a larger one is damage, and no arithmetic on it overflows


class Array(pydantic.BaseModel):
    """Shape and dtype of one array of the state."""

    shape: tuple[Annotated[int, pydantic.Field(ge=0, le=LARGEST_ARRAY)], ...]
    dtype: str

    @pydantic.field_validator('shape')
    @classmethod
    def _check_array(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) > 32 or math.prod(shape) > LARGEST_ARRAY:
            raise ValueError(f'{list(shape[:32])} is the shape of no array')
        return shape


class Manifest(pydantic.BaseModel):
    """Attributes: the step; the writer's description (versions, configuration, data); arrays by dotted name; files by
    path inside the checkpoint."""

    model_config = pydantic.ConfigDict(extra='forbid')
    _place: AnyPath = pydantic.PrivateAttr()

    @property
    def place(self) -> AnyPath:
        """The directory or prefix that it was read from, which has the files."""
        return self._place

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file on the disk, by path: files in packs are counted as their packs."""
        sizes: dict[str, int] = {}
        for name, file in self.files.items():
            sizes[file.pack or name] = max(sizes.get(file.pack or name, 0), file.offset + file.size)
        return sizes

    format: Literal['pretrax-checkpoint']
    version: Literal[1, 2]  # 2: some files are in packs
    step: int
    description: dict[str, Any]
    arrays: dict[str, Array]
    files: dict[str, File]

    @pydantic.field_validator('files')
    @classmethod
    def _inside(cls, files: dict[str, File]) -> dict[str, File]:
        names = [*files, *{file.pack for file in files.values() if file.pack}]
        if outside := [name for name in names if name.startswith('/') or '..' in name.split('/') or '\0' in name]:
            raise ValueError(f'the file {outside[0][:80]!r} is outside of the checkpoint')
        return files


def is_training_only(name: str) -> bool:
    """Whether only training uses an array. Readers of a model's weights skip it."""
    return name in _OF_TRAINING


def shape_text(shape: tuple[int, ...]) -> str:
    """The shape as text, such as '50257 x 768'."""
    return ' x '.join(map(str, shape)) or 'a scalar'


def steps_in(directory: AnyPath) -> list[int]:
    """The steps of the checkpoints in a directory, oldest first. In a bucket these are the steps with a manifest."""
    if isinstance(directory, BucketPath):
        files = directory.files()
        return sorted(map(int, published(files, read_entries(directory) if files else None)))
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if is_step(entry.name) and entry.is_dir())


def is_step(name: str) -> bool:
    """Whether a directory of this name is a checkpoint: a step in ASCII digits, as pretrax writes it."""
    return re.fullmatch('0|[1-9][0-9]{0,17}', name) is not None


def published(files: Iterable[str], entries: Entries | None) -> dict[str, str]:
    """The prefix of each checkpoint in a bucket, by its step.

    Args:
        files: all objects below `checkpoints/`.
        entries: of the index. Steps that it does not name were copied from a disk; None: there is no index.
    """
    found: dict[str, str] = {}
    for file in sorted(files, key=lambda file: (-file.count('/'), file)):  # without an index, the copy from a disk wins
        prefix, _, name = file.rpartition('/')
        step, _, attempt = prefix.partition('/')
        listed = prefix if entries is None else entries.get(step, step)
        if name == MANIFEST and is_step(step) and '/' not in attempt and prefix == listed:
            found[step] = prefix
    return found


def place_of(directory: AnyPath, step: int) -> AnyPath:
    """The directory or prefix with the files of a checkpoint, which may be missing. Raises OSError."""
    place, name = directory / str(step), str(step)
    if not isinstance(place, BucketPath) and (place / MANIFEST).exists():
        return place
    entries = read_entries(directory)
    if entries is not None and entries.get(name):
        return directory / str(entries[name])
    if entries is None and not (place / MANIFEST).is_file():  # one that was copied without its index
        return directory / published([f'{name}/{file}' for file in names_in(place)], None).get(name, name)
    return place


def read_manifest(directory: AnyPath, step: int) -> Manifest:
    """Reads and checks a manifest. Raises DamagedError if it is missing or damaged."""
    path = directory / str(step) / MANIFEST
    try:
        path = place_of(directory, step) / MANIFEST
        manifest = parse_manifest(path.read_bytes(), path.parent.absolute())
    except DamagedError as error:
        raise damaged(directory / str(step), f'{path}: {error}') from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        if isinstance(error, OSError) and not path.parent.is_dir():
            raise unreadable(path.parent, error) from error
        if isinstance(error, OSError):
            raise_if_unreachable(path, error)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DamagedError(
            f'the checkpoint {directory / str(step)} has no readable description\n{path}: {reason}'
        ) from error
    if manifest.step != step:
        raise damaged(directory / str(step), f'its manifest is for step {manifest.step}')
    return manifest


def parse_manifest(content: bytes, place: AnyPath) -> Manifest:
    """The manifest of this content, which was read from a place.

    Raises:
        DamagedError: its digest differs. ValueError, KeyError, AttributeError or TypeError: it is not a manifest.
    """
    said = parse_json(content)
    digest = said.pop('manifest_xxh3')
    manifest = Manifest.model_validate(said)
    if digest != _self_digest(manifest):
        raise DamagedError('its digest differs')
    manifest._place = place
    return manifest


def read_description(directory: AnyPath, step: int) -> dict[str, Any]:
    """The writer's description of a checkpoint. Raises DamagedError if it is missing or damaged."""
    return read_manifest(directory, step).description


def named_arrays(state: Any) -> dict[str, Array]:
    """Shape and dtype of every array of a state by its dotted name."""
    return {name: Array(shape=tuple(leaf.shape), dtype=str(leaf.dtype)) for name, leaf in named_leaves(state)}


def named_leaves(state: Any) -> list[tuple[str, Any]]:
    """Every array of a state with its dotted name."""
    import jax  # the rest of this file does not need JAX

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [(jax.tree_util.keystr(path, simple=True, separator='.'), leaf) for path, leaf in leaves]


def partial_directory(directory: pathlib.Path, step: int) -> pathlib.Path:
    """The directory in which a checkpoint is written, until `publish` renames it."""
    return directory / f'{step}{PARTIAL}'


def manifest_content(step: int, description: dict[str, Any], arrays: dict[str, Array], files: dict[str, File]) -> bytes:
    """The content of the manifest of a checkpoint."""
    version = 2 if any(file.pack for file in files.values()) else 1
    manifest = Manifest(
        format='pretrax-checkpoint', version=version, step=step, description=description, arrays=arrays, files=files
    )
    content = manifest.model_dump(mode='json') | {'manifest_xxh3': _self_digest(manifest)}
    return json.dumps(content, indent=1).encode()


def publish(
    place: pathlib.Path,
    directory: pathlib.Path,
    step: int,
    description: dict[str, Any],
    arrays: dict[str, Array],
    files: dict[str, File],
) -> None:
    """Completes a checkpoint: writes its manifest and renames it to `<directory>/<step>`. Raises OSError.

    A checkpoint of the same step gets the name of one that is being deleted, next to `place`.

    Args:
        place: the `partial_directory` with its files.
    """
    with (place / MANIFEST).open('wb') as stream:
        stream.write(manifest_content(step, description, arrays, files))
        sync_file(stream)
    for folder, _, _ in place.walk(top_down=False):
        sync_directory(folder)
    with contextlib.suppress(FileNotFoundError):  # a checkpoint of this step, which is replaced
        (directory / str(step)).rename(place.with_suffix(DELETING))
    place.rename(directory / str(step))
    sync_directory(directory)


def check_sizes(directory: AnyPath, step: int) -> Manifest:
    """Compares the names of a checkpoint's files with its manifest, on a disk also sizes. Reads only the manifest.

    Raises DamagedError if something differs; the message names it.
    """
    manifest = read_manifest(directory, step)
    place = manifest.place
    found = names_in(place) - {MANIFEST}
    missing, extra = sorted(manifest.sizes.keys() - found), sorted(found - manifest.sizes.keys())
    if missing or extra:
        what = f'{missing[0]} is missing' if missing else f'{extra[0]} does not belong to it'
        raise damaged(place, what)
    if isinstance(place, BucketPath):
        return manifest
    for name, expected in manifest.sizes.items():
        size = (place / name).stat().st_size
        if size != expected:
            raise damaged(place, f'{name} has {size} bytes, not {expected}')
    return manifest


def verify(directory: AnyPath, step: int, prefix: str = '') -> Manifest:
    """Reads the files of a checkpoint whose names start with `prefix` and compares them with the manifest.

    Raises DamagedError if something differs; the message names it.
    """
    manifest = check_sizes(directory, step)
    place = manifest.place
    files = {name: file for name, file in manifest.files.items() if name.startswith(prefix)}
    for name, found in digests_of(place, files).items():
        if found != manifest.files[name].xxh3:
            raise damaged(place, f'{name} differs from what was written')
    return manifest


def _self_digest(manifest: Manifest) -> str:
    return xxhash.xxh3_128_hexdigest(manifest.model_dump_json().encode())


def digests_of(place: AnyPath, files: Mapping[str, File]) -> dict[str, str]:
    """The digests of these files, which are read in parallel."""

    def read(name: str) -> str:
        if files[name].pack:
            return xxhash.xxh3_128_hexdigest(read_file(place, name, files[name]))
        with open_file(place, name, files[name]) as stream:
            return digest(stream)[1]

    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            return dict(zip(files, pool.map(read, files), strict=True))
    except OSError as error:
        raise unreadable(place, error) from error


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
    """The `checkpoints` directory and the step of a path: a checkpoint, or the newest of a run or of `checkpoints`.

    Raises UserError if there is no checkpoint at this path.
    """
    if is_checkpoint(path):
        return path.parent, int(path.name)
    directory = checkpoints_of(path)
    return directory, steps_in(directory)[-1]
