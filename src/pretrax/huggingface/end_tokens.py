"""The tokens that end a text, from the files of a checkpoint: tokenizer_config.json, generation_config.json, config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from pretrax.errors import UserError
from pretrax.machine.json_file import read_settings

NAMED = ('tokenizer_config.json', 'special_tokens_map.json')  # have the name of a token
NUMBERED = ('generation_config.json', 'config.json')  # have an id, or a list of them


def end_tokens(directory: Any, token_id: Callable[[str], int | None]) -> tuple[int, ...]:
    """The ids of the tokens that end a text; the first of them also separates documents.

    Args:
        directory: of the files, on a disk or in a bucket. Each of them may be missing.
        token_id: the id of a token by its name; None: there is no such token.

    Raises:
        UserError: a file names what is no token, or is no JSON.
    """
    found: list[int] = []
    for file in NAMED:
        value = _settings(directory / file).get('eos_token')
        name = value.get('content') if isinstance(value, dict) else value
        if name is None:
            continue
        token = token_id(name) if isinstance(name, str) else None
        if token is None:
            raise UserError(f'{directory / file}: eos_token {str(name)[:60]!r} is not a token of tokenizer.json')
        found.append(token)
    for file in NUMBERED:
        value = _settings(directory / file).get('eos_token_id')
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise UserError(
                    f'{directory / file}: eos_token_id is {str(value)[:60]}; expected an id, or a list of ids'
                )
        found += ids
    return tuple(dict.fromkeys(found))


def _settings(path: Any) -> Mapping[str, Any]:
    found = read_settings(path)
    # The ids of a model with a vision tower may be those of its language model
    inner = found.get('text_config')
    return {**inner, **found} if isinstance(inner, dict) else found
