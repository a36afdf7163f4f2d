"""A Hugging Face checkpoint as a pretrax model: its options, its tokenizer files and, on request, its weights."""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrax.errors import UserError
from pretrax.huggingface.configs import ConfigTable, Options, read_options, table_of
from pretrax.huggingface.files import FILES, HuggingFaceCheckpoint, find, open_checkpoint
from pretrax.huggingface.quantized import with_whole_tensors
from pretrax.huggingface.text_part import text_checkpoint
from pretrax.model.architecture import Architecture, resolve
from pretrax.model.choices import TransformerOptions
from pretrax.model.option_names import nest
from pretrax.system.trusted import copy_file

# Files besides the weights and config.json that an import keeps and an export writes again.
KEPT = 'huggingface'  # folder of a run with the original configuration and tokenizer, for `pretrax export`
TOKENIZER = 'tokenizer.json'
GENERATION, SETTINGS, SPECIAL = 'generation_config.json', 'tokenizer_config.json', 'special_tokens_map.json'
CHAT_TEMPLATES = FILES['chat_templates']
# Files that remain valid with a tokenizer that extends the imported one
OF_ANY_TOKENIZER = ('config.json', *CHAT_TEMPLATES, GENERATION)


def kept_names(directory: Path, of_any_tokenizer: bool = False) -> list[str]:
    """The files in a directory that an import keeps: config.json and those of the tokenizer, chats and generation."""
    patterns = (
        OF_ANY_TOKENIZER if of_any_tokenizer else ('config.json', GENERATION, *FILES['tokenizer'], *CHAT_TEMPLATES)
    )
    found = {
        path.relative_to(directory).as_posix()
        for pattern in patterns
        for path in directory.glob(pattern)
        if path.is_file()
    }
    return sorted(found)


@dataclass(frozen=True)
class HuggingFaceModel:
    """A checkpoint opened by `open_model`. Its weights are not read yet."""

    checkpoint: HuggingFaceCheckpoint
    table: ConfigTable
    options: Options
    notes: list[str]

    @property
    def directory(self) -> Path:
        return self.checkpoint.directory

    @functools.cached_property
    def arch(self) -> Architecture:
        """The architecture of the decoder."""
        options = TransformerOptions(**nest(self.options))
        return resolve(options, self.options['vocab_size'], self.options.get('max_sequence_length', 1))

    def with_modules(self, count: int) -> 'HuggingFaceModel':
        """The model with `count` modules of multi-token prediction, or as many as the files have."""
        n_layers, tensors = self.arch.n_layers, self.checkpoint.tensors
        there = [any(name.endswith(f'layers.{n_layers + i}.eh_proj.weight') for name in tensors) for i in range(count)]
        found = (*there, False).index(False)
        notes = [note for note in self.notes if not (found and note.startswith('num_nextn_predict_layers'))]
        return dataclasses.replace(self, options=self.options | {'multi_token.n_layers': found}, notes=notes)

    def weights(self, like: Any) -> Any:
        """The weights, for a model whose weights have the shapes of `like`."""
        from pretrax.huggingface.names import TABLES
        from pretrax.huggingface.weights import HuggingFaceWeights

        return HuggingFaceWeights(self.checkpoint, TABLES[self.table.names], self.arch, like)

    def copy_files(self, directory: Path) -> list[str]:
        """Copies the files of an export: config.json, those of the tokenizer, and the generation configuration."""
        directory.mkdir(parents=True, exist_ok=True)
        names = kept_names(self.directory)
        for name in names:
            copy_file(name, self.directory, directory)
        return names


def open_model(place: str) -> HuggingFaceModel:
    """Opens a checkpoint, given a directory or the id of a hub repository.

    Raises:
        UserError: there is no checkpoint, files are missing or damaged, or the model is not supported.
    """
    return read_model(open_checkpoint(find(place)))


def read_model(checkpoint: HuggingFaceCheckpoint) -> HuggingFaceModel:
    """The model of an open checkpoint. Raises UserError if it is not supported, or its sizes contradict each other."""
    table = table_of(checkpoint.config)
    try:
        options, notes = read_options(checkpoint.config)
        checkpoint, left_out = text_checkpoint(with_whole_tensors(checkpoint))
        model = HuggingFaceModel(checkpoint, table, options, left_out + notes)
        model.arch  # noqa: B018  # raises if the sizes are inconsistent
    except ValueError as error:
        said = str(error).removeprefix('1 validation error for TransformerOptions\n').strip().splitlines()
        raise UserError(f'{checkpoint.directory}: ' + '\n'.join(said[:6])) from error
    return model
