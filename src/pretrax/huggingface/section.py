"""The `model:` section that `init_from:` stands for, so that a configuration need not repeat what a checkpoint says.

Read while a configuration is checked: no JAX, and no weights.
"""

import json
from pathlib import Path
from typing import Any

from ..errors import UserError
from .configs import read_options
from .files import find, read_json

HF = 'hf:'


def model_section(place: str) -> dict[str, Any]:
    """What a checkpoint of Hugging Face (hf:DIR_OR_ID) or of a run says of its model, without what it leaves open."""
    if place.startswith(HF):
        directory = find(place.removeprefix(HF))
        if not (directory / 'config.json').is_file():
            raise UserError(f'init_from: {directory} has no config.json, so it is no Hugging Face checkpoint')
        return read_options(read_json(directory / 'config.json'))[0]
    path = Path(place)
    if path.name.isdigit() and path.parent.name == 'checkpoints':
        found = [path]
    else:
        steps = (path if path.name == 'checkpoints' else path / 'checkpoints').glob('*')
        found = sorted((step for step in steps if step.name.isdigit()), key=lambda step: int(step.name))
    if not found or not found[-1].is_dir():
        hint = (
            f'\nfor a Hugging Face checkpoint write init_from: {HF}{place}' if (path / 'config.json').is_file() else ''
        )
        raise UserError(f'init_from: {place} is no run with a checkpoint, and no checkpoint{hint}')
    manifest = found[-1] / 'manifest.json'
    try:
        section = json.loads(manifest.read_text())['description']['config']['model']
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f'init_from: {found[-1]} does not say what model it is of: {error}') from error
    return {key: value for key, value in section.items() if value is not None}
