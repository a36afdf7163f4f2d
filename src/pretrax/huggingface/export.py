"""Weights of ours as a Hugging Face checkpoint: safetensors with an index, config.json, tokenizer, generation settings.

The place of every tensor is known before any is read, so each piece is written where it belongs as it comes.
"""

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from ..errors import UserError
from ..model.families import Architecture
from .configs import HARMLESS, write_config
from .files import DTYPES, INDEX, SINGLE, read_json
from .model import GENERATION, TOKENIZER, TOKENIZER_FILES
from .names import TABLES
from .weights import Piece, tensors_of

LARGEST_FILE = 5_000_000_000  # bytes, as transformers has it
TORCH_NAMES = {'F32': 'float32', 'BF16': 'bfloat16', 'F16': 'float16'}


class Weights(Protocol):
    """Where the weights come from: a checkpoint of ours, or one of theirs."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def pieces(self, path: str) -> Iterator[Piece]: ...


def export(
    weights: Weights, arch: Architecture, like: Any, directory: Path, *, dtype: str, family: str | None = None,
    tokenizer: Any = None, kept: Path | None = None, say: Callable[[str], None] = print,
) -> list[str]:  # fmt: skip
    """Writes a checkpoint that the stock classes of `transformers` load.

    Args:
        weights: their source.
        arch: every choice of the decoder.
        like: the weights' shapes.
        directory: a new or empty directory.
        dtype: 'F32', 'BF16' or 'F16', of the file's tensors.
        family: our family that config.json is written for if it can be.
        tokenizer: the one that made the tokens, or None.
        kept: the files that an import kept, of which the tokenizer's and the generation's settings are given back.

    Returns:
        The names of the files.

    Raises:
        UserError: the directory is not empty, the disk is full, or no class of transformers has these choices.
    """
    config, table = write_config(arch, family)
    config |= {'torch_dtype': TORCH_NAMES[dtype]}
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f'{directory} exists and is not empty\ngive a new directory')
    config = _harmless(kept) | {'eos_token_id': getattr(tokenizer, 'end_of_text', None)} | config
    partial = directory.with_name(f'.{directory.name}.partial')
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_tensors(weights, arch, like, partial, dtype, TABLES[table.names])
        _write_json(partial / 'config.json', config)
        _write_tokenizer(partial, tokenizer, kept, arch, say)
        for path in partial.iterdir():
            with path.open('rb') as file:
                os.fsync(file.fileno())
        if directory.exists():
            directory.rmdir()
        partial.rename(directory)
    except OSError as error:
        raise UserError(f'cannot write {directory}: {error.strerror}') from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sorted(path.name for path in directory.iterdir())


def _harmless(kept: Path | None) -> dict[str, Any]:
    """What the imported config.json said of tokens, which the decoder does not know."""
    if kept is None or not (kept / 'config.json').is_file():
        return {}
    names = [name for name in HARMLESS if name.endswith('_token_id')]
    return {name: value for name, value in read_json(kept / 'config.json').items() if name in names}


def _write_tensors(weights: Weights, arch: Architecture, like: Any, directory: Path, dtype: str, table: Any) -> None:
    shapes, convert = tensors_of(table, arch, like, dtype)
    width = DTYPES[dtype].itemsize
    files = _files({name: width * math.prod(shape) for name, shape in shapes.items()})
    starts: dict[str, tuple[Path, int]] = {}
    opened: dict[Path, IO[bytes]] = {}
    try:
        for file, names in files.items():
            path = directory / file
            header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
            offset = 0
            for name in names:
                size = width * math.prod(shapes[name])
                header[name] = {'dtype': dtype, 'shape': shapes[name], 'data_offsets': [offset, offset + size]}
                offset += size
            text = json.dumps(header).encode()
            text += b' ' * (-len(text) % 8)
            opened[path] = path.open('wb')
            opened[path].write(struct.pack('<Q', len(text)) + text)
            opened[path].truncate(8 + len(text) + offset)
            for name in names:
                starts[name] = path, 8 + len(text) + header[name]['data_offsets'][0]
        for path in weights.shapes:
            for at, piece in weights.pieces(path):
                for name, where, values in convert(path, at, piece):
                    file, start = starts[name]
                    _write_part(opened[file], start, shapes[name], where, values)
    finally:
        for file in opened.values():
            file.close()
    if len(files) > 1:
        total = width * sum(math.prod(shape) for shape in shapes.values())
        weight_map = {name: file for file, names in files.items() for name in names}
        _write_json(directory / INDEX, {'metadata': {'total_size': total}, 'weight_map': weight_map})


def _files(sizes: dict[str, int]) -> dict[str, list[str]]:
    """Which tensors lie in which file."""
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


def _write_part(file: IO[bytes], start: int, shape: tuple[int, ...], where: tuple, values: np.ndarray) -> None:
    """Writes the part `where` of a tensor that begins at `start`: whole rows at once, shares of rows one by one."""
    values = np.ascontiguousarray(values)
    row = values.itemsize * math.prod(shape[1:])
    if not shape or values.shape[1:] == tuple(shape[1:]):
        first = where[0].indices(shape[0])[0] if shape else 0
        file.seek(start + first * row)
        file.write(values.reshape(-1).view(np.uint8).data)
        return
    assert len(shape) == 2, shape
    column = where[1].indices(shape[1])[0] * values.itemsize
    for index, part in enumerate(values):
        file.seek(start + index * row + column)
        file.write(part.view(np.uint8).data)


def _write_tokenizer(
    directory: Path, tokenizer: Any, kept: Path | None, arch: Architecture, say: Callable[[str], None]
) -> None:
    end = getattr(tokenizer, 'end_of_text', None)
    generation: dict[str, Any] = {} if end is None else {'eos_token_id': end}
    if kept is not None:
        for name in TOKENIZER_FILES:
            if (kept / name).is_file():
                shutil.copyfile(kept / name, directory / name)
        if (kept / GENERATION).is_file():
            generation |= read_json(kept / GENERATION)
    _write_json(directory / GENERATION, generation)
    content = getattr(tokenizer, 'content', None)
    if (directory / TOKENIZER).is_file():
        return
    if content is None:
        say('the run has no tokenizer.json, so the export has none')
        return
    (directory / TOKENIZER).write_bytes(content)
    settings: dict[str, Any] = {
        'tokenizer_class': 'PreTrainedTokenizerFast', 'model_max_length': arch.max_sequence_length,
        'clean_up_tokenization_spaces': False,
    }  # fmt: skip
    if end is not None:
        settings['eos_token'] = tokenizer.decode([end])
    _write_json(directory / 'tokenizer_config.json', settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
