"""A Hugging Face checkpoint as a model of ours: its options, its tokenizer's files, and its weights when asked for."""

import functools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrax.errors import UserError
from pretrax.huggingface.configs import ConfigTable, Options, read_options, table_of
from pretrax.huggingface.files import HuggingFaceCheckpoint, find, open_checkpoint
from pretrax.model.families import Architecture, TransformerOptions, resolve

# Beside weights and config.json: kept by an import, given back by an export.
TOKENIZER = 'tokenizer.json'
TOKENIZER_FILES = (
    TOKENIZER, 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json', 'chat_template.jinja',
    'tokenizer.model', 'vocab.json', 'merges.txt',
)  # fmt: skip
GENERATION = 'generation_config.json'


@dataclass(frozen=True)
class HuggingFaceModel:
    """What `open_model` found: nothing of the weights is read yet."""

    checkpoint: HuggingFaceCheckpoint
    table: ConfigTable
    options: Options
    notes: list[str]

    @property
    def directory(self) -> Path:
        return self.checkpoint.directory

    @functools.cached_property
    def arch(self) -> Architecture:
        """Every choice of the decoder."""
        options = TransformerOptions(**self.options)
        return resolve(options, self.options['vocab_size'], self.options.get('max_sequence_length', 1))

    def weights(self, like: Any) -> Any:
        """The weights as `HuggingFaceWeights`, for a model whose weights are shaped `like` this."""
        from pretrax.huggingface.names import TABLES
        from pretrax.huggingface.weights import HuggingFaceWeights

        return HuggingFaceWeights(self.checkpoint, TABLES[self.table.names], self.arch, like)

    def copy_files(self, directory: Path) -> list[str]:
        """Copies what an export gives back: config.json, the tokenizer's files, the generation configuration."""
        directory.mkdir(parents=True, exist_ok=True)
        names = [n for n in ('config.json', GENERATION, *TOKENIZER_FILES) if (self.directory / n).is_file()]
        for name in names:
            shutil.copyfile(self.directory / name, directory / name)
        return names


def open_model(place: str) -> HuggingFaceModel:
    """Opens a directory or the id of a hub repository.

    Raises:
        UserError: nothing there, files missing or damaged, or a model that pretrax has no decoder for.
    """
    checkpoint = open_checkpoint(find(place))
    table = table_of(checkpoint.config)
    try:
        options, notes = read_options(checkpoint.config)
        model = HuggingFaceModel(checkpoint, table, options, notes)
        model.arch  # noqa: B018  # sizes that do not fit together are told now
    except ValueError as error:
        said = str(error).removeprefix('1 validation error for TransformerOptions\n').strip().splitlines()
        raise UserError(f'{checkpoint.directory}: ' + '\n'.join(said[:6])) from error
    return model
