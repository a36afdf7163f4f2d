"""A translation as text: commented YAML that ends with lists of what changed, and a summary for the terminal."""

import textwrap
from collections.abc import Container, Iterator
from typing import Any

import yaml

from pretrax.config import RunConfig
from pretrax.errors import printable
from pretrax.tables import nested
from pretrax.translate.translation import Fate, Translation

_WIDTH = 110
_SHOWN = (Fate.CHANGED, Fate.NO_EQUIVALENT, Fate.UNKNOWN)  # in the terminal
_LISTED = (*_SHOWN, Fate.NOT_NEEDED)  # in the file
_SHOWN_KEYS = 4  # of those that share a reason, in the terminal


def yaml_text(translation: Translation) -> str:
    """The configuration with the origin of each value; every other key of the input is in comments at the end."""
    values = nested(translation.values)
    lines = list(
        _lines({name: values[name] for name in RunConfig.model_fields if name in values}, '', 0, translation.values)
    )
    assert values.keys() <= RunConfig.model_fields.keys()
    width = min(44, max(len(text) for text, _ in lines))
    body = []
    for text, key in lines:
        comment = _one_line(translation.comments.get(key, ''))
        body.append(f'{text:<{width}}  # {comment}' if comment else text)
    header = [f'# Translated from {_one_line(translation.file)}, a configuration of {translation.tool}.']
    return '\n'.join([*header, *body, *_lists(translation)]) + '\n'


def summary(translation: Translation) -> list[str]:
    """What the user has to know after the file is written: which keys changed, have no equivalent, or are unknown."""
    counts = {fate: sum(map(len, translation.grouped_keys(fate).values())) for fate in Fate}
    lines = [
        f'{len(translation.given)} keys: {counts[Fate.TRANSLATED] + counts[Fate.CHANGED]} are translated, '
        f'{counts[Fate.NO_EQUIVALENT] + counts[Fate.UNKNOWN]} are not, and {counts[Fate.NOT_NEEDED]} are not needed'
    ]
    for fate in _SHOWN:
        for number, (reason, keys) in enumerate(translation.grouped_keys(fate).items()):
            lines += [f'{fate}:'] if number == 0 else []
            more = f' and {len(keys) - _SHOWN_KEYS} more' if len(keys) > _SHOWN_KEYS else ''
            lines.append(f'  {", ".join(map(_one_line, keys[:_SHOWN_KEYS]))}{more}: {_one_line(reason)}')
    return lines


def _lines(values: dict[str, Any], path: str, depth: int, leaves: Container[str]) -> Iterator[tuple[str, str]]:
    """(line without its comment, dotted key) for each value of `leaves`; mappings that are values stay on one line."""
    for key, value in values.items():
        name = f'{path}.{key}' if path else key
        if isinstance(value, dict) and name not in leaves:
            yield f'{"  " * depth}{key}:', ''
            yield from _lines(value, name, depth + 1, leaves)
        else:
            yield f'{"  " * depth}{key}: {_flow(value)}', name


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, sort_keys=False, allow_unicode=False)
    return text.removesuffix('\n').removesuffix('\n...')


def _lists(translation: Translation) -> Iterator[str]:
    for fate in _LISTED:
        for number, (reason, keys) in enumerate(translation.grouped_keys(fate).items()):
            if number == 0:
                yield '#'
                yield f'# {fate[0].upper()}{fate[1:]}:'
            text = f'{", ".join(map(_one_line, keys))}: {_one_line(reason)}'
            yield from textwrap.wrap(
                text, _WIDTH, initial_indent='#   ', subsequent_indent='#     ', break_long_words=False
            )


def _one_line(text: str) -> str:
    return printable(' '.join(text.split()))
