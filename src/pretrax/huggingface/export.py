"""Exports weights as a Hugging Face checkpoint: safetensors with an index, config.json, tokenizer, generation settings.

The offset of every tensor is known before any is read, so each piece is written as soon as it is read.
"""

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from pretrax.huggingface.configs import write_config
from pretrax.huggingface.harmless import DROPOUT_FIELDS, dropout_options
from pretrax.huggingface.model import GENERATION, SETTINGS, TOKENIZER, kept_names
from pretrax.huggingface.names import TABLES
from pretrax.huggingface.tensor_files import TensorFiles, new_directory, write_json
from pretrax.huggingface.text_part import text_config
from pretrax.huggingface.weights import Piece, tensors_of
from pretrax.model.architecture import Architecture
from pretrax.model.choices import DROPOUT
from pretrax.model.weights import MODULES
from pretrax.storage import AnyPath
from pretrax.system.json_file import read_json
from pretrax.system.trusted import copy_file

TOKEN_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id', 'sep_token_id', 'decoder_start_token_id')
TORCH_NAMES = {'F32': 'float32', 'BF16': 'bfloat16', 'F16': 'float16'}


class Weights(Protocol):
    """The source of the weights: a pretrax or a Hugging Face checkpoint."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def pieces(self, path: str) -> Iterator[Piece]: ...


def export(
    weights: Weights,
    arch: Architecture,
    like: Any,
    directory: AnyPath,
    *,
    dtype: str,
    family: str | None = None,
    tokenizer: Any = None,
    kept: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Writes a checkpoint that the standard classes of `transformers` load.

    Args:
        weights: the source of the weights.
        arch: the architecture of the decoder.
        like: arrays with the shapes of the weights.
        directory: a new or empty directory.
        dtype: dtype of the tensors in the files: 'F32', 'BF16' or 'F16'. Biases that choose experts stay in F32.
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
    kept_fields = _kept_fields(kept, table.model_type, arch)
    said = {o for name, options in dropout_options(table.model_type).items() if kept_fields.get(name) for o in options}
    for option in DROPOUT:
        if (rate := arch.option(option)) and option not in said:
            say(f'model.{option} = {rate:g} is not in config.json: {table.architecture} has no such dropout')
    if table.model_type == 'gpt2':
        config['n_ctx'] = config['n_positions']  # which converters of other tools read
    ids = (
        dict.fromkeys(('bos_token_id', 'eos_token_id', 'pad_token_id')) if kept is None else {}
    )  # classes have defaults
    config = ids | kept_fields | _text_ids(tokenizer, kept_fields) | config
    with new_directory(directory) as partial:
        names = _write_tensors(weights, arch, like, partial, dtype, TABLES[table.names], say)
        if arch.multi_token.n_layers and not any(path.startswith(MODULES) for path in names):
            say(f'multi-token prediction is left out: {table.architecture} has no tensors for it')
        write_json(partial / 'config.json', config)
        _write_tokenizer(partial, tokenizer, kept, arch, say)
    return sorted(path.name for path in directory.iterdir())


def _kept_fields(kept: Path | None, model_type: str, arch: Architecture) -> dict[str, Any]:
    """Fields of the imported config.json that matter only to training in transformers, and the dropout of the decoder.

    A decoder without dropout keeps the fields of the import. Without an import, GPT-2's are written as 0, since its
    class has another default.
    """
    fields = _dropout_fields(model_type, arch) if arch.drops or model_type == 'gpt2' else {}
    if kept is None or not (kept / 'config.json').is_file():
        return fields
    outer = read_json(kept / 'config.json')
    imported = {**text_config(outer), **{name: value for name, value in outer.items() if name in TOKEN_IDS}}
    found = {name: imported[name] for name in (*TOKEN_IDS, *DROPOUT_FIELDS, 'output_router_logits') if name in imported}
    return found | fields if arch.drops else fields | found


def _dropout_fields(model_type: str, arch: Architecture) -> dict[str, Any]:
    """The dropout of the decoder in the fields of the class; 0 if the class has one field for different rates."""
    fields = {}
    for name, options in dropout_options(model_type).items():
        shares = {arch.option(option) for option in options}
        fields[name] = shares.pop() if len(shares) == 1 else 0.0
    return fields


def _write_tensors(
    weights: Weights, arch: Architecture, like: Any, directory: Path, dtype: str, table: Any, say: Callable[[str], None]
) -> set[str]:
    """Writes the tensors, and returns the names of the weights that they hold."""
    written = set()
    shapes, convert = tensors_of(table, arch, like)
    exact = {name for name in shapes if any(fnmatch.fnmatch(name, pattern) for pattern in table.exact)}
    with TensorFiles(directory, shapes, dtype, {'format': 'pt'}, exact) as files:
        for path in weights.shapes:
            for at, piece in weights.pieces(path):
                for name, where, values in convert(path, at, piece):
                    files.write(name, where, values)
                    written.add(path)
        for note in files.notes():
            say(note)
    return written


def _write_tokenizer(
    directory: Path, tokenizer: Any, kept: Path | None, arch: Architecture, say: Callable[[str], None]
) -> None:
    end = getattr(tokenizer, 'end_of_text', None)
    generation: dict[str, Any] = {}
    if kept is not None:
        for name in kept_names(kept):
            if name == GENERATION:
                generation = read_json(kept / name)
            elif name != 'config.json':
                copy_file(name, kept, directory)
    ids = {name: value for name, value in _text_ids(tokenizer, generation).items() if value is not None}
    write_json(directory / GENERATION, generation | ids)
    if getattr(tokenizer, 'content', None) is None:
        if not (directory / TOKENIZER).is_file():
            say('the run has no tokenizer.json, so the export has none')
        return
    begin, adds = tokenizer.begin_of_text, tokenizer.adds.before
    if not (directory / TOKENIZER).is_file() or begin != adds:
        (directory / TOKENIZER).write_bytes(tokenizer.exported())
    is_kept = (directory / SETTINGS).is_file()
    if is_kept and begin == adds:
        return
    settings: dict[str, Any] = (
        read_json(directory / SETTINGS)
        if is_kept
        else {
            'tokenizer_class': 'PreTrainedTokenizerFast',
            'model_max_length': arch.max_sequence_length,
            'clean_up_tokenization_spaces': False,
        }
    )
    if end is not None and not is_kept:
        settings['eos_token'] = tokenizer.decode([end])
    if begin:
        settings['bos_token'] = tokenizer.decode([begin[0]])
    if begin != adds:
        say(
            f'{TOKENIZER} adds {tokenizer.shown_begin} before a text, as in training, where the original adds '
            f'{tokenizer.shown(adds) or "nothing"}'
        )
    if begin or is_kept:  # transformers 4 reads it, for some classes
        settings['add_bos_token'] = bool(begin)
    write_json(directory / SETTINGS, settings)


def _text_ids(tokenizer: Any, imported: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of the token before a text, and of those that end one: of the run's tokenizer, and the imported ones."""
    end = getattr(tokenizer, 'end_of_text', None)
    begin = [
        *getattr(tokenizer, 'begin_of_text', ()),
        imported.get('bos_token_id'),
        getattr(tokenizer, 'before_text', None),
        end,
    ]
    ids = imported.get('eos_token_id')
    ends = ids if isinstance(ids, list) else [] if ids is None else [ids]
    ends = ends if end is None or end in ends else [end, *ends]
    return {
        'bos_token_id': next((token for token in begin if token is not None), None),
        'eos_token_id': ids if ids == ends or not ends else ends[0] if len(ends) == 1 else ends,
    }
