"""Finds, checks and reads the files of a Hugging Face checkpoint, one tensor at a time. Never unpickles.

A checkpoint is a directory with `config.json` and `model.safetensors`, or several such files and an index. The
`safetensors` library checks each file. A tensor is then read from its offset into memory of its own size, since a
mapped file would count as used memory.
"""

import atexit
import contextlib
import math
import os
import re
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pretrax.errors import UserError
from pretrax.storage import BucketPath, locate
from pretrax.storage.staging import download
from pretrax.system.json_file import parse_json, read_json
from pretrax.tables import read_table

INDEX, SINGLE = 'model.safetensors.index.json', 'model.safetensors'
PICKLES = ('.bin', '.pt', '.pth', '.ckpt', '.pkl', '.pickle')
# Of quantized weights (quantized.py); they mean nothing without their scales
BYTES = {'U8': np.dtype(np.uint8), 'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn)}
WRITTEN = {'F32': np.dtype(np.float32), 'BF16': np.dtype(ml_dtypes.bfloat16), 'F16': np.dtype(np.float16)}
DTYPES = {**WRITTEN, 'F64': np.dtype(np.float64)}  # of weights
FILES: dict[str, list[str]] = read_table(Path(__file__).with_suffix('.yaml'))
QUANTIZED = 'quantized weights cannot be trained: use the checkpoint that they were made from'
_until_exit = contextlib.ExitStack()
atexit.register(_until_exit.close)


@dataclass(frozen=True)
class Tensor:
    """The location of a tensor in a file."""

    file: Path
    dtype: str  # the name in safetensors
    shape: tuple[int, ...]
    start: int  # offset in the file, in bytes
    why_not: str = ''  # a reason why it cannot be a weight

    def read(self, index: int | None = None) -> np.ndarray:
        """Reads the tensor, or only `tensor[index]`."""
        dtype = (DTYPES | BYTES)[self.dtype]
        shape = self.shape if index is None else self.shape[1:]
        count = math.prod(shape)
        flat = np.fromfile(self.file, dtype, count, offset=self.start + (index or 0) * count * dtype.itemsize)
        if flat.size != count:
            raise UserError(f'{self.file}: truncated since it was opened; copy or download it again')
        return flat.reshape(shape)


@dataclass(frozen=True)
class HuggingFaceCheckpoint:
    """An open checkpoint: its directory, its config.json, and the location of every tensor by name."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def find(place: str) -> Path:
    """The directory of a checkpoint, given a path or the id of a hub repository (org/name, org/name@revision).

    One in a bucket is downloaded to a temporary directory, which is removed when the program ends.

    Raises:
        UserError: there is no checkpoint, or the hub cannot be reached and no copy is cached.
    """
    path = locate(place)
    if isinstance(path, BucketPath):
        local = Path(_until_exit.enter_context(tempfile.TemporaryDirectory(prefix='pretrax-')))
        download(path, local)
        return local
    if path.is_dir():
        return path
    if path.is_file():
        raise UserError(f'{place} is a file\ngive the directory that contains it, config.json and the tokenizer')
    if not re.fullmatch(r'[\w-][\w.-]*(/[\w-][\w.-]*)?(@[\w./-]+)?', place):
        raise UserError(f'{place}: neither a directory nor the id of a hub repository (org/name, or org/name@revision)')
    return _download(place)


def _download(place: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    name, _, revision = place.partition('@')
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=FILES['downloaded']))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, HfHubHTTPError, HFValidationError) as error:
        offline = '; HF_HUB_OFFLINE is set' if os.environ.get('HF_HUB_OFFLINE', '0') not in ('', '0') else ''
        said = ' '.join(str(error).split())[:200]
        raise UserError(
            f'{place}: no such directory, and it cannot be downloaded from the hub{offline}\n'
            f'{type(error).__name__}: {said}\n'
            'download it on a machine with a network (hf download ID --local-dir DIR) and give the directory'
        ) from error


def open_checkpoint(directory: Path) -> HuggingFaceCheckpoint:
    """Opens a checkpoint and checks its files. Reads no tensor.

    Raises:
        UserError: config.json, a shard or all weights are missing, a file is damaged, or there are only pickles.
    """
    if not (directory / 'config.json').is_file():
        raise UserError(f'{directory} is not a Hugging Face checkpoint: it has no config.json')
    config = read_json(directory / 'config.json')
    tensors: dict[str, Tensor] = {}
    for path in _files(directory):
        for name, tensor in _tensors(path).items():
            if name in tensors:
                raise UserError(f'{name} is in two files, {tensors[name].file.name} and {path.name}, of {directory}')
            tensors[name] = tensor
    return HuggingFaceCheckpoint(directory, config, tensors)


def _files(directory: Path) -> list[Path]:
    if (directory / INDEX).is_file():
        weight_map = read_json(directory / INDEX).get('weight_map')
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(f'{directory / INDEX}: expected a weight_map from tensors to files')
        names = sorted(set(weight_map.values()))
        if outside := [name for name in names if Path(name).name != name or not name.endswith('.safetensors')]:
            raise UserError(
                f'{directory / INDEX} names {outside[0]!r}, which is not a .safetensors file in the same directory'
            )
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise UserError(
                f'{directory}: {len(missing)} of {len(names)} files are missing: {some(missing)}\n'
                'copy or download them into that directory'
            )
        return [directory / name for name in names]
    found = sorted(directory.glob('*.safetensors'))
    if gone := [path.name for path in found if not path.is_file()]:  # the hub's cache has links to blobs
        raise UserError(f'{directory}: {some(gone)} is a broken link\ncopy or download it again')
    if (directory / SINGLE) in found:
        return [directory / SINGLE]
    if len(found) == 1:
        return found
    if found:
        raise UserError(f'{directory}: several .safetensors files, {some([f.name for f in found])}, and no {INDEX}')
    if pickles := sorted(path.name for path in directory.iterdir() if path.suffix in PICKLES):
        raise UserError(
            f'{directory}: the weights are pickled in {some(pickles)}, and opening a pickle runs its code\n'
            'pretrax never unpickles. If you trust the file, convert it to safetensors with transformers:\n'
            f'  model = transformers.AutoModelForCausalLM.from_pretrained({str(directory)!r})\n'
            "  model.save_pretrained('DIR')"
        )
    raise UserError(f'{directory}: no .safetensors file')


def _tensors(path: Path) -> dict[str, Tensor]:
    import safetensors

    try:
        with safetensors.safe_open(path, framework='numpy'):  # raises if the header does not match the file
            pass
        with path.open('rb') as file:
            (length,) = struct.unpack('<Q', file.read(8))
            header = parse_json(file.read(length))
    except (safetensors.SafetensorError, OSError, ValueError, struct.error) as error:
        raise UserError(
            f'{path}: damaged or truncated: {error}\ncopy or download it again (it has {path.stat().st_size:,} bytes)'
        ) from error
    header.pop('__metadata__', None)
    found = {}
    for name, entry in header.items():
        dtype, start = entry['dtype'], 8 + length + entry['data_offsets'][0]
        quantized = f'\n{QUANTIZED}' if dtype.startswith(('I', 'U', 'F')) else ''
        why_not = '' if dtype in DTYPES else f'{path}: {name} is {dtype}; expected {", ".join(DTYPES)}{quantized}'
        found[name] = Tensor(path, dtype, tuple(entry['shape']), start, why_not)
    return found


def some(names: list[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    return ', '.join(names[:most]) + (f' and {len(names) - most} more' if len(names) > most else '')


def not_finite_text(counts: Mapping[str, int]) -> str:
    """The tensors with numbers that are NaN or infinite, in words; '' if there are none."""
    if not counts:
        return ''
    named = ', '.join(f'{count:,} in {name}' for name, count in list(counts.items())[:3])
    more = f' and {len(counts) - 3} more tensors' if len(counts) > 3 else ''
    return f'{sum(counts.values()):,} numbers are NaN or infinite: {named}{more}'
