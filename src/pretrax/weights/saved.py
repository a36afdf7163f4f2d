"""The model of a checkpoint, as its description states it: read without JAX and without weights.

A configuration with `init_from:` need not repeat what the checkpoint states.
"""

import dataclasses
import hashlib
from typing import Any

from pydantic import ValidationError

from pretrax.checkpoint import CheckpointWeights, find_checkpoint, read_description, read_manifest
from pretrax.config import upgraded
from pretrax.data.tokenizers.tokenizer import tokens_before
from pretrax.errors import UserError
from pretrax.huggingface.configs import read_options
from pretrax.huggingface.files import find
from pretrax.huggingface.model import KEPT, TOKENIZER
from pretrax.model.choices import TransformerOptions
from pretrax.model.option_names import dotted, nest
from pretrax.storage import AnyPath, BucketPath, locate_run
from pretrax.system.json_file import read_json

HF = 'hf:'
DECODER = 'transformer'  # model.name of the decoder


@dataclasses.dataclass(frozen=True)
class SavedModel:
    """One checkpoint of a run."""

    directory: AnyPath  # `checkpoints`
    step: int
    description: dict[str, Any]

    @property
    def run_dir(self) -> AnyPath:
        """The directory of the run."""
        return self.directory.parent

    @property
    def kept(self) -> AnyPath:
        """The directory with the other files of the tokenizer and of generation; it may not exist."""
        return self.run_dir / KEPT

    @property
    def pieces(self) -> CheckpointWeights:
        """The weights, read piece by piece."""
        return CheckpointWeights(self.directory, self.step)

    @property
    def section(self) -> dict[str, Any] | None:
        """The section `model:` of the run, with the names of today and without nulls; None: the checkpoint has none."""
        section = upgraded(self.description.get('config') or {}).get('model')
        if section is None:
            return None
        is_decoder = section.get('name', DECODER) == DECODER
        options = dotted(section) if is_decoder else section
        known = {key: value for key, value in options.items() if value is not None}
        return nest(known) if is_decoder else known

    @property
    def is_decoder(self) -> bool:
        """Whether the model is the decoder of pretrax."""
        return (self.section or {}).get('name', DECODER) == DECODER

    def options(self, where: str) -> TransformerOptions:
        """The options of the decoder, with the sizes of its vocabulary and of learned positions.

        Args:
            where: the key and the checkpoint, which begin the message of an error.

        Raises:
            UserError: the model is not the decoder, or this version does not know it.
        """
        section = dict(self.section or {})
        name = section.pop('name', DECODER)
        if name != DECODER:
            raise UserError(f'{where} is a model of the kind {name}\nuse a checkpoint of model.name={DECODER}')
        positions = read_manifest(self.directory, self.step).arrays.get('weights.positions')
        if self.description.get('vocab_size'):
            section['vocab_size'] = self.description['vocab_size']
        if positions:
            section['max_sequence_length'] = positions.shape[0]
        return decoder_options(section, where)

    def tokenizer(self) -> bytes | None:
        """The content of the tokenizer.json that the run was trained with; None: it has none."""
        sha256, data = self.description.get('tokenizer'), self.run_dir / 'data'
        if isinstance(data, BucketPath):
            paths = [data / name for name in data.files() if name.rpartition('/')[2] == TOKENIZER]
        else:
            paths = [data / TOKENIZER, *sorted(data.glob(f'*/{TOKENIZER}'))]
        contents = [path.read_bytes() for path in paths if path.is_file()]
        return next((c for c in contents if sha256 in (None, hashlib.sha256(c).hexdigest())), None)

    def begin_of_text(self, tokenizer: bytes | None) -> tuple[int, ...]:
        """The ids that began the texts that the model was trained on.

        An older pretrax recorded none: texts began with what tokenizer.json adds if the model was imported, otherwise
        with nothing.
        """
        if (recorded := self.description.get('begin_of_text')) is not None:
            return tuple(recorded)
        data = self.description['config'].get('data') or {}
        is_import = data.get('name') == 'tokenizer'
        return tokens_before(tokenizer, 'tokenizer.json') if is_import and tokenizer is not None else ()


def open_saved(path: str | AnyPath) -> SavedModel:
    """Opens a checkpoint, or the newest one of a run or of its `checkpoints`. Raises UserError if there is none."""
    directory, step = find_checkpoint(locate_run(path) if isinstance(path, str) else path)
    return SavedModel(directory, step, read_description(directory, step))


def model_section(place: str, key: str = 'init_from') -> dict[str, Any]:
    """The model options stated by a Hugging Face checkpoint (hf:DIR_OR_ID) or by a run's checkpoint; `key` names it."""
    if place.startswith(HF):
        directory = find(place.removeprefix(HF))
        if not (directory / 'config.json').is_file():
            raise UserError(f'{key}: {directory} is not a Hugging Face checkpoint: it has no config.json')
        return nest(read_options(read_json(directory / 'config.json'))[0])
    saved = _open_named(place, key)
    if saved.section is None:
        raise UserError(f'{key}: {saved.directory / str(saved.step)} does not describe its model')
    return saved.section


def stated_options(place: str, key: str) -> TransformerOptions:
    """The options of the decoder in a checkpoint of Hugging Face or of a run; `key` names it.

    Raises UserError if there is no checkpoint, or its model is not the decoder.
    """
    if place.startswith(HF):
        return decoder_options(model_section(place, key), f'{key}: {place}')
    return _open_named(place, key).options(f'{key}: {place}')


def decoder_options(section: dict[str, Any], where: str) -> TransformerOptions:
    """The options of a decoder. `where` begins the UserError for options that this version does not know."""
    try:
        return TransformerOptions(**section)
    except ValidationError as error:
        problem = ' '.join(str(error).split())[:300]
        raise UserError(f'{where} has a model that this version of pretrax does not know\n{problem}') from error


def _open_named(place: str, key: str) -> SavedModel:
    path = locate_run(place)
    try:
        return open_saved(path)
    except UserError as error:
        is_beside = '/' in place and path.parent.is_dir()  # `runs/x` is not a name of the hub
        is_hub = (path / 'config.json').is_file() if path.exists() or is_beside else True
        fix = f'for a Hugging Face checkpoint write {key}={HF}{place}' if is_hub else str(error).partition('\n')[2]
        hint = f'\n{fix}' if fix else ''
        raise UserError(f'{key}: {place} is neither a checkpoint nor a run with one{hint}') from error
