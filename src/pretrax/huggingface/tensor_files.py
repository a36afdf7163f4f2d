"""Writes tensors to safetensors files, in any order and in parts, with an index if there are several files.

The offset of every tensor is known before any is written, so each part is written as soon as it arrives.
"""

import collections
import contextlib
import json
import math
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from pretrax.errors import UserError, system_errors
from pretrax.huggingface.files import INDEX, SINGLE, WRITTEN, not_finite_text
from pretrax.storage import AnyPath
from pretrax.storage.staging import written_directory
from pretrax.system import atomic

LARGEST_FILE = 5_000_000_000  # bytes; the default of transformers


class TensorFiles(contextlib.AbstractContextManager['TensorFiles']):
    """Safetensors files that are being written.

    Args:
        directory: directory of the files.
        shapes: shapes of all tensors, by name.
        dtype: 'F32', 'BF16' or 'F16'.
        exact: names of the tensors that are F32 whatever the dtype is.
        metadata: text for the header of each file.

    Attributes:
        not_finite: how many numbers of each tensor were NaN or infinite before they were rounded.
        vanished: how many numbers of each tensor are 0 because the dtype has none as small.
    """

    def __init__(
        self,
        directory: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str,
        metadata: Mapping[str, str],
        exact: Collection[str] = (),
    ):
        self.not_finite: collections.Counter[str] = collections.Counter()
        self.vanished: collections.Counter[str] = collections.Counter()
        self._directory, self._shapes = directory, shapes
        self._dtypes = {name: 'F32' if name in exact else dtype for name in shapes}
        self._sizes = {name: WRITTEN[self._dtypes[name]].itemsize * math.prod(shape) for name, shape in shapes.items()}
        self._files = _files(self._sizes)
        self._starts: dict[str, tuple[IO[bytes], int]] = {}
        self._opened = contextlib.ExitStack()
        for file, names in self._files.items():
            self._begin(file, names, metadata)

    def __exit__(self, *raised: object) -> None:
        self._opened.close()
        if len(self._files) > 1 and raised[0] is None:
            weight_map = {name: file for file, names in self._files.items() for name in names}
            write_json(
                self._directory / INDEX,
                {'metadata': {'total_size': sum(self._sizes.values())}, 'weight_map': weight_map},
            )

    def write(self, name: str, where: tuple[slice, ...], values: np.ndarray) -> None:
        """Writes the part `where` of a tensor: complete rows at once, parts of rows one by one, others mapped.

        The values are rounded to the dtype of the tensor. Raises UserError if one of them is too large for it.
        """
        file, start = self._starts[name]
        shape, values = self._shapes[name], self._rounded(name, values)
        row = values.itemsize * math.prod(shape[1:])
        if not shape or values.shape[1:] == tuple(shape[1:]):
            first = where[0].indices(shape[0])[0] if shape else 0
            file.seek(start + first * row)
            file.write(values.reshape(-1).view(np.uint8).data)
            return
        if len(shape) != 2 or where[1].step not in (None, 1):
            file.flush()
            like = np.dtype(f'u{values.itemsize}')
            np.memmap(file.name, like, 'r+', start, tuple(shape))[where] = values.view(like)
            return
        column = where[1].indices(shape[1])[0] * values.itemsize
        for index, part in enumerate(values):
            file.seek(start + index * row + column)
            file.write(part.view(np.uint8).data)

    def _rounded(self, name: str, values: np.ndarray) -> np.ndarray:
        dtype = WRITTEN[self._dtypes[name]]
        with np.errstate(over='ignore'):
            rounded = np.ascontiguousarray(values, dtype)
        finite = np.isfinite(values)
        if (too_large := finite & ~np.isfinite(rounded)).any():
            worst = float(np.abs(values[too_large].astype(np.float64)).max())
            raise UserError(
                f'{name} has a number of size {worst:g}, but the largest of {self._dtypes[name]} is '
                f'{float(ml_dtypes.finfo(dtype).max):.4g}\n'
                f'use --dtype {"bf16, or f32" if dtype == np.float16 else "f32"}'
            )
        self.not_finite[name] += int(values.size - np.count_nonzero(finite))
        self.vanished[name] += int(np.count_nonzero(values) - np.count_nonzero(rounded))
        return rounded

    def notes(self) -> list[str]:
        """Lines for the user about numbers that are not finite, or became 0."""
        lines = [text] if (text := not_finite_text(+self.not_finite)) else []
        if vanished := +self.vanished:
            name, count = vanished.most_common(1)[0]
            lines.append(
                f'{vanished.total():,} numbers are 0 in the files, since {self._dtypes[name]} has none as small: '
                f'{count:,} in {name}'
            )
        return lines

    def _begin(self, file: str, names: list[str], metadata: Mapping[str, str]) -> None:
        header: dict[str, Any] = {'__metadata__': metadata}
        offset = 0
        for name in names:
            end = offset + self._sizes[name]
            header[name] = {
                'dtype': self._dtypes[name],
                'shape': self._shapes[name],
                'data_offsets': [offset, end],
            }
            offset = end
        text = json.dumps(header).encode()
        text += b' ' * (-len(text) % 8)
        stream = self._opened.enter_context((self._directory / file).open('wb'))
        stream.write(struct.pack('<Q', len(text)) + text)
        stream.truncate(8 + len(text) + offset)
        for name in names:
            self._starts[name] = stream, 8 + len(text) + header[name]['data_offsets'][0]


@contextlib.contextmanager
def new_directory(directory: AnyPath) -> Iterator[Path]:
    """Creates a directory atomically: it gets its name when the block succeeds and is removed if the block fails.

    One in a bucket is written in a temporary directory, and uploaded when the block succeeds.

    Raises:
        UserError: the directory exists and is not empty, or it cannot be written.
    """
    with system_errors(f'cannot write {directory}'):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(f'{directory} exists and is not empty\ngive a new directory')
        with written_directory(directory) as local, atomic.new_directory(local, sync=True) as partial:
            yield partial


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')


def _files(sizes: dict[str, int]) -> dict[str, list[str]]:
    """Groups tensors into files."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > LARGEST_FILE:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f'model-{i:05}-of-{len(groups):05}.safetensors': names for i, names in enumerate(groups, start=1)}
