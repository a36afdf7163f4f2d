"""Exports weights as a Hugging Face checkpoint: safetensors with an index, config.json, tokenizer, generation settings.

The offset of every tensor is known before any is read, so each piece is written as soon as it is read.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from pretrax.huggingface.configs import HARMLESS, write_config
from pretrax.huggingface.files import read_json
from pretrax.huggingface.model import GENERATION, TOKENIZER, TOKENIZER_FILES
from pretrax.huggingface.names import TABLES
from pretrax.huggingface.tensor_files import TensorFiles, new_directory, write_json
from pretrax.huggingface.weights import Piece, tensors_of
from pretrax.model.families import Architecture
from pretrax.storage import AnyPath

TORCH_NAMES = {'F32': 'float32', 'BF16': 'bfloat16', 'F16': 'float16'}


class Weights(Protocol):
    """The source of the weights: a pretrax or a Hugging Face checkpoint."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def pieces(self, path: str) -> Iterator[Piece]: ...


def export(
    weights: Weights, arch: Architecture, like: Any, directory: AnyPath, *, dtype: str, family: str | None = None,
    tokenizer: Any = None, kept: Path | None = None, say: Callable[[str], None] = print,
) -> list[str]:  # fmt: skip
    """Writes a checkpoint that the standard classes of `transformers` load.

    Args:
        weights: the source of the weights.
        arch: the architecture of the decoder.
        like: arrays with the shapes of the weights.
        directory: a new or empty directory.
        dtype: dtype of the tensors in the files: 'F32', 'BF16' or 'F16'.
        family: the pretrax family to write config.json for, if possible.
        tokenizer: the tokenizer of the training data, or None.
        kept: directory with the tokenizer and generation files that an import kept, to be written again.

    Returns:
        The names of the files.

    Raises:
        UserError: the directory is not empty, the disk is full, or no class of transformers computes this architecture.
    """
    config, table = write_config(arch, family)
    config |= {'torch_dtype': TORCH_NAMES[dtype]}
    config = _harmless(kept) | {'eos_token_id': getattr(tokenizer, 'end_of_text', None)} | config
    with new_directory(directory) as partial:
        _write_tensors(weights, arch, like, partial, dtype, TABLES[table.names])
        write_json(partial / 'config.json', config)
        _write_tokenizer(partial, tokenizer, kept, arch, say)
    return sorted(path.name for path in directory.iterdir())


def _harmless(kept: Path | None) -> dict[str, Any]:
    """The token ids of the imported config.json, which the decoder does not know."""
    if kept is None or not (kept / 'config.json').is_file():
        return {}
    names = [name for name in HARMLESS if name.endswith('_token_id')]
    return {name: value for name, value in read_json(kept / 'config.json').items() if name in names}


def _write_tensors(weights: Weights, arch: Architecture, like: Any, directory: Path, dtype: str, table: Any) -> None:
    shapes, convert = tensors_of(table, arch, like, dtype)
    with TensorFiles(directory, shapes, dtype, {'format': 'pt'}) as files:
        for path in weights.shapes:
            for at, piece in weights.pieces(path):
                for name, where, values in convert(path, at, piece):
                    files.write(name, where, values)


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
    write_json(directory / GENERATION, generation)
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
    write_json(directory / 'tokenizer_config.json', settings)
