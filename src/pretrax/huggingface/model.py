"""A Hugging Face checkpoint as a pretrax model: its options, its tokenizer files and, on request, its weights."""

import functools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrax.errors import UserError
from pretrax.huggingface.configs import ConfigTable, Options, read_options, table_of
from pretrax.huggingface.files import HuggingFaceCheckpoint, find, open_checkpoint
from pretrax.model.families import Architecture, TransformerOptions, resolve

# Files besides the weights and config.json that an import keeps and an export writes again.
TOKENIZER = 'tokenizer.json'
TOKENIZER_FILES = (
    TOKENIZER, 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json', 'chat_template.jinja',
    'tokenizer.model', 'vocab.json', 'merges.txt',
)  # fmt: skip
GENERATION = 'generation_config.json'


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
        options = TransformerOptions(**self.options)
        return resolve(options, self.options['vocab_size'], self.options.get('max_sequence_length', 1))

    def weights(self, like: Any) -> Any:
        """The weights, for a model whose weights have the shapes of `like`."""
        from pretrax.huggingface.names import TABLES
        from pretrax.huggingface.weights import HuggingFaceWeights

        return HuggingFaceWeights(self.checkpoint, TABLES[self.table.names], self.arch, like)

    def copy_files(self, directory: Path) -> list[str]:
        """Copies the files that an export writes again: config.json, the tokenizer's files and the generation configuration."""
        directory.mkdir(parents=True, exist_ok=True)
        names = [n for n in ('config.json', GENERATION, *TOKENIZER_FILES) if (self.directory / n).is_file()]
        for name in names:
            shutil.copyfile(self.directory / name, directory / name)
        return names


def open_model(place: str) -> HuggingFaceModel:
    """Opens a checkpoint, given a directory or the id of a hub repository.

    Raises:
        UserError: there is no checkpoint, files are missing or damaged, or the model is not supported.
    """
    checkpoint = open_checkpoint(find(place))
    table = table_of(checkpoint.config)
    try:
        options, notes = read_options(checkpoint.config)
        model = HuggingFaceModel(checkpoint, table, options, notes)
        model.arch  # noqa: B018  # raises if the sizes are inconsistent
    except ValueError as error:
        said = str(error).removeprefix('1 validation error for TransformerOptions\n').strip().splitlines()
        raise UserError(f'{checkpoint.directory}: ' + '\n'.join(said[:6])) from error
    return model
