"""A configuration as text: resolved YAML with origins, the difference of two, and the JSON Schema."""

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import yaml
from omegaconf import OmegaConf
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pretrax import __version__
from pretrax.config import registry
from pretrax.config.problems import Path, dotted
from pretrax.config.schema import Component, RunConfig

type Leaf = tuple[Path, Any]


class Absent(Enum):
    """The value of a key that only the other configuration has."""

    ABSENT = '(absent)'

    def __str__(self) -> str:
        return self.value


ABSENT = Absent.ABSENT


def resolved_yaml(config: RunConfig) -> str:
    """Every value as YAML, with its origin as a comment. Loading this text gives an equal configuration."""
    header = [f'# Every value of this run and where it came from; pretrax {__version__}.']
    header += [f'# {note}' for note in config.notes]
    lines = list(_lines(config.model_dump(mode='json'), (), config))
    width = min(48, max(len(text) for text, comment in lines if comment))
    body = [f'{text:<{width}}  # {comment}' if comment else text for text, comment in lines]
    return '\n'.join([*header, *body]) + '\n'


def diff(old: RunConfig, new: RunConfig) -> list[tuple[str, Any, Any]]:
    """The dotted keys whose values differ, with the old and the new value; `ABSENT` if there is none."""
    return diff_values(old.model_dump(mode='json'), new.model_dump(mode='json'))


def diff_values(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The same as `diff`, for two nested dicts."""
    before, after = dict(_leaves(old, ())), dict(_leaves(new, ()))
    keys = [*before, *(key for key in after if key not in before)]
    pairs = [(dotted(key), before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys]
    return [(key, a, b) for key, a, b in pairs if a != b]


def origin(config: RunConfig, *path: str) -> str:
    """The origin of a value: 'configs/a.yaml:3', 'override', 'default', 'preset gpt2', 'derived', ..."""
    section: BaseModel = config
    depth = 0
    while True:
        key = path[depth]
        if isinstance(section, Component) and key not in type(section).model_fields:
            section = section.options
        value = getattr(section, key)
        depth += 1
        if depth == len(path) or not isinstance(value, BaseModel):
            break
        section = value
    # path[:depth] is a field; deeper keys are in a plain mapping, which may have been given as a whole.
    given = config.origins.get(path) or config.origins.get(path[:depth])
    if given:
        return given
    field = type(section).model_fields[key]
    if isinstance(section, Component) and key == 'name':
        return 'default'
    if not field.default_factory_takes_validated_data and value == field.get_default(call_default_factory=True):
        return 'default'
    preset = getattr(section, 'preset', None)
    return f'preset {preset}' if preset else 'derived'


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a configuration file, with the options of every registered component."""
    choices = [
        (kind, name, registry.options_model(kind, name)) for kind in registry.DEFAULTS for name in registry.names(kind)
    ]
    sections = {kind: RunConfig.model_fields[kind].annotation for kind in registry.DEFAULTS}
    models: list[Any] = [RunConfig, *sections.values(), *(model for *_, model in choices)]
    references, definitions = models_json_schema([(model, 'validation') for model in models])
    found: dict[str, Any] = definitions['$defs']

    def definition(model: Any) -> dict[str, Any]:
        return found[references[model, 'validation']['$ref'].rpartition('/')[2]]

    run = definition(RunConfig)
    for kind, section_model in sections.items():
        section = definition(section_model)
        common = {key: value for key, value in section['properties'].items() if key not in ('name', 'options')}
        required = [key for key in section.get('required', ()) if key not in ('name', 'options')]
        section['anyOf'] = []
        for _, name, model in (choice for choice in choices if choice[0] == kind):
            options = definition(model)
            named = {'const': name, 'default': name} if name == registry.DEFAULTS[kind] else {'const': name}
            needed = required + options.get('required', []) + (['name'] if 'default' not in named else [])
            properties = {'name': named} | common | options.get('properties', {})
            section['anyOf'].append(
                {'type': 'object', 'additionalProperties': False, 'properties': properties, 'required': needed}
            )
        for key in ('properties', 'required', 'additionalProperties', 'type'):
            section.pop(key, None)
    inlined = {references[model, 'validation']['$ref'].rpartition('/')[2] for model in models[1 + len(sections) :]}
    paths = {'anyOf': [{'type': 'string'}, {'type': 'array', 'items': {'type': 'string'}}]}
    extends = {'extends': paths | {'description': 'files to start from, relative to this one; later ones win'}}
    return run | {
        '$schema': 'https://json-schema.org/draft/2020-12/schema',
        'properties': extends | run['properties'],
        '$defs': {name: found[name] for name in found if name not in inlined | {'BaseModel', 'RunConfig'}},
    }


def _lines(values: dict[str, Any], path: tuple[str, ...], config: RunConfig) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        here, margin = (*path, key), '  ' * len(path)
        if isinstance(value, dict) and value:
            yield f'{margin}{_scalar(key)}:', ''
            yield from _lines(value, here, config)
        else:
            yield f'{margin}{_scalar(key)}: {_flow(value)}', origin(config, *here)


def _leaves(values: dict[str, Any], path: Path) -> Iterator[Leaf]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _flow(value: Any) -> str:
    if isinstance(value, list):
        return f'[{", ".join(_flow(item) for item in value)}]'
    if isinstance(value, dict):
        return f'{{{", ".join(f"{_scalar(key)}: {_flow(item)}" for key, item in value.items())}}}'
    return _scalar(value)


def _scalar(value: Any) -> str:
    """A value as YAML that reads back as the same value: plain if possible, else in double quotes."""
    if value is None:
        return 'null'
    if isinstance(value, bool):
        return 'true' if value else 'false'
    if not isinstance(value, str):
        return repr(value)
    if re.fullmatch(r'[A-Za-z_/.][\w/. +*-]*', value, re.ASCII) and not value.endswith(' '):
        read = OmegaConf.from_dotlist([f'value={value}'])['value']
        if isinstance(read, str) and read == value:
            return value
    literal = re.sub(r'(\\*)\$\{', lambda match: match[1] * 2 + '\\${', value)  # no interpolation
    return yaml.dump(literal, default_style='"', width=float('inf'), allow_unicode=True).rstrip('\n')
