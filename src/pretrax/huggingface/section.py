"""The `model:` section that `init_from:` stands for, so that a configuration need not repeat what a checkpoint says.

Read while a configuration is checked: no JAX, and no weights.
"""

from pathlib import Path
from typing import Any

from pretrax.checkpoint import find_checkpoint, read_description
from pretrax.errors import UserError
from pretrax.huggingface.configs import read_options
from pretrax.huggingface.files import find, read_json

HF = 'hf:'


def model_section(place: str) -> dict[str, Any]:
    """What a checkpoint of Hugging Face (hf:DIR_OR_ID) or of a run says of its model, without what it leaves open."""
    if place.startswith(HF):
        directory = find(place.removeprefix(HF))
        if not (directory / 'config.json').is_file():
            raise UserError(f'init_from: {directory} has no config.json, so it is no Hugging Face checkpoint')
        return read_options(read_json(directory / 'config.json'))[0]
    path = Path(place)
    try:
        directory, step = find_checkpoint(path)
    except UserError as error:
        is_hub = (path / 'config.json').is_file()
        hint = f'\nfor a Hugging Face checkpoint write init_from: {HF}{place}' if is_hub else ''
        raise UserError(f'init_from: {place} is no run with a checkpoint, and no checkpoint{hint}') from error
    section = (read_description(directory, step).get('config') or {}).get('model')
    if section is None:
        raise UserError(f'init_from: {directory / str(step)} does not say what model it is of')
    return {key: value for key, value in section.items() if value is not None}
