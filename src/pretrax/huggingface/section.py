"""The `model:` section that `init_from:` implies, so that a configuration need not repeat what a checkpoint states.

It is read while a configuration is checked: without JAX and without weights.
"""

from typing import Any

from pretrax.checkpoint import find_checkpoint, read_description
from pretrax.errors import UserError
from pretrax.huggingface.configs import read_options
from pretrax.huggingface.files import find
from pretrax.machine.json_file import read_json
from pretrax.model.option_names import flat, nest
from pretrax.storage import locate

HF = 'hf:'


def model_section(place: str, key: str = 'init_from') -> dict[str, Any]:
    """The model options stated by a Hugging Face checkpoint (hf:DIR_OR_ID) or by a run's checkpoint; `key` names it."""
    if place.startswith(HF):
        directory = find(place.removeprefix(HF))
        if not (directory / 'config.json').is_file():
            raise UserError(f'{key}: {directory} is not a Hugging Face checkpoint: it has no config.json')
        return nest(read_options(read_json(directory / 'config.json'))[0])
    path = locate(place)
    try:
        directory, step = find_checkpoint(path)
    except UserError as error:
        is_hub = (path / 'config.json').is_file()
        hint = f'\nfor a Hugging Face checkpoint write {key}: {HF}{place}' if is_hub else ''
        raise UserError(f'{key}: {place} is neither a checkpoint nor a run with one{hint}') from error
    section = (read_description(directory, step).get('config') or {}).get('model')
    if section is None:
        raise UserError(f'{key}: {directory / str(step)} does not describe its model')
    is_decoder = section.get('name', 'transformer') == 'transformer'
    options = flat(nest(section)) if is_decoder else section  # pretrax 0.1 stored them flat
    known = {key: value for key, value in options.items() if value is not None}
    return nest(known) if is_decoder else known
