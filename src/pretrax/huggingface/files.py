"""The files of a Hugging Face checkpoint: found, checked, and read one tensor at a time. Nothing is ever unpickled.

A checkpoint is a directory with `config.json` and `model.safetensors`, or several such files and an index. Every file is
opened by the `safetensors` library, which checks it whole; a tensor is then read from its place, into memory of its own
size (a mapped file would count as memory that is in use).
"""

import json
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pretrax.errors import UserError

INDEX, SINGLE = 'model.safetensors.index.json', 'model.safetensors'
PICKLES = ('.bin', '.pt', '.pth', '.ckpt', '.pkl', '.pickle')
DTYPES = {'F32': np.dtype(np.float32), 'BF16': np.dtype(ml_dtypes.bfloat16), 'F16': np.dtype(np.float16)}
# What a snapshot of a hub repository is asked for: no pickles, no other frameworks' files, no code.
DOWNLOADED = ('*.safetensors', '*.json', '*.jinja')


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies."""

    file: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    start: int  # in the file, bytes

    def read(self) -> np.ndarray:
        """The tensor, in memory of its own."""
        dtype = DTYPES[self.dtype]
        count = int(np.prod(self.shape, dtype=np.int64))
        flat = np.fromfile(self.file, dtype, count, offset=self.start)
        if flat.size != count:
            raise UserError(f'{self.file}: cut short since it was opened; copy or download it again')
        return flat.reshape(self.shape)


@dataclass(frozen=True)
class HuggingFaceCheckpoint:
    """An open checkpoint: its directory, its config.json, and the place of every tensor by name."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def dtype(self) -> str | None:
        """The dtype that all tensors have, or None where they differ."""
        dtypes = {tensor.dtype for tensor in self.tensors.values()}
        return dtypes.pop() if len(dtypes) == 1 else None


def find(place: str) -> Path:
    """The directory that a path or the id of a hub repository (org/name, org/name@revision) means.

    Raises:
        UserError: nothing is there, or the hub cannot be reached and has not left a copy.
    """
    path = Path(place).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise UserError(f'{place} is a file\ngive the directory that holds it, config.json and the tokenizer')
    if not re.fullmatch(r'[\w-][\w.-]*(/[\w-][\w.-]*)?(@[\w./-]+)?', place):
        raise UserError(f'{place}: no such directory, and no id of the hub (org/name, or org/name@revision)')
    return _download(place)


def _download(place: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    name, _, revision = place.partition('@')
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(DOWNLOADED)))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, HfHubHTTPError, HFValidationError) as error:
        offline = '; HF_HUB_OFFLINE is set' if os.environ.get('HF_HUB_OFFLINE', '0') not in ('', '0') else ''
        said = ' '.join(str(error).split())[:200]
        raise UserError(
            f'{place}: no such directory, and the hub has not given it{offline}\n{type(error).__name__}: {said}\n'
            'download it where there is a network (hf download ID --local-dir DIR), and give the directory'
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises UserError where the file is missing or holds something else."""
    try:
        found = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise UserError(f'{path}: not readable as JSON: {error}') from error
    if not isinstance(found, dict):
        raise UserError(f'{path}: expected a JSON object, not {type(found).__name__}')
    return found


def open_checkpoint(directory: Path) -> HuggingFaceCheckpoint:
    """Opens a checkpoint and checks its files; reads no tensor.

    Raises:
        UserError: config.json, a shard or all weights are missing, a file is damaged, or there are pickles only.
    """
    if not (directory / 'config.json').is_file():
        raise UserError(f'{directory}: no config.json, so it is no Hugging Face checkpoint')
    config = read_json(directory / 'config.json')
    tensors: dict[str, Tensor] = {}
    for path in _files(directory):
        for name, tensor in _tensors(path).items():
            if name in tensors:
                raise UserError(f'{name} is in two files, {tensors[name].file.name} and {path.name}, of {directory}')
            tensors[name] = tensor
    if (directory / INDEX).is_file():
        listed = _weight_map(directory)
        if missing := sorted(set(listed) - set(tensors)):
            raise UserError(f'{directory / INDEX} lists {_some(missing)}, which the files do not hold')
        if more := sorted(set(tensors) - set(listed)):
            raise UserError(f'{directory}: the files hold {_some(more)}, which {INDEX} does not list')
    return HuggingFaceCheckpoint(directory, config, tensors)


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = read_json(directory / INDEX).get('weight_map')
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f'{directory / INDEX}: expected a weight_map from tensors to files')
    return weight_map


def _files(directory: Path) -> list[Path]:
    if (directory / INDEX).is_file():
        names = sorted(set(_weight_map(directory).values()))
        if outside := [name for name in names if Path(name).name != name or not name.endswith('.safetensors')]:
            raise UserError(f'{directory / INDEX} names {outside[0]!r}, which is no .safetensors file beside it')
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise UserError(
                f'{directory}: {len(missing)} of {len(names)} files are missing: {_some(missing)}\n'
                'copy or download them into that directory'
            )
        return [directory / name for name in names]
    found = sorted(directory.glob('*.safetensors'))
    if gone := [path.name for path in found if not path.is_file()]:  # as in a cache of the hub, links to blobs
        raise UserError(f'{directory}: {_some(gone)} leads to no file\ncopy or download it again')
    if (directory / SINGLE) in found:
        return [directory / SINGLE]
    if len(found) == 1:
        return found
    if found:
        raise UserError(f'{directory}: several .safetensors files, {_some([f.name for f in found])}, and no {INDEX}')
    if pickles := sorted(path.name for path in directory.iterdir() if path.suffix in PICKLES):
        raise UserError(
            f'{directory}: the weights are in {_some(pickles)}, pickled: opening such a file runs code from it\n'
            'pretrax does not. Where you trust the file, write it as safetensors, with transformers installed:\n'
            f'  model = transformers.AutoModelForCausalLM.from_pretrained({str(directory)!r})\n'
            "  model.save_pretrained('DIR')"
        )
    raise UserError(f'{directory}: no .safetensors file')


def _tensors(path: Path) -> dict[str, Tensor]:
    import safetensors

    try:
        with safetensors.safe_open(path, framework='numpy'):  # refuses a header that does not fit the file
            pass
        with path.open('rb') as file:
            (length,) = struct.unpack('<Q', file.read(8))
            header = json.loads(file.read(length))
    except (safetensors.SafetensorError, OSError, ValueError, struct.error) as error:
        raise UserError(
            f'{path}: damaged or cut short: {error}\ncopy or download it again ({path.stat().st_size:,} bytes are there)'
        ) from error
    header.pop('__metadata__', None)
    found = {}
    for name, entry in header.items():
        if entry['dtype'] not in DTYPES:
            raise UserError(
                f'{path}: {name} is {entry["dtype"]}; expected {", ".join(DTYPES)}\n'
                'quantised weights cannot be trained: take the checkpoint that they were made of'
            )
        found[name] = Tensor(path, entry['dtype'], tuple(entry['shape']), 8 + length + entry['data_offsets'][0])
    return found


def _some(names: list[str], most: int = 3) -> str:
    return ', '.join(names[:most]) + (f' and {len(names) - most} more' if len(names) > most else '')
