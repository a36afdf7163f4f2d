"""The configuration that a run was trained with, read from its `config.yaml` without loading it."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import yaml

from pretrax.config.registry import DEFAULTS, option_names


class Setting(NamedTuple):
    """A value of a configuration."""

    key: str  # dotted, such as 'optimizer.learning_rate'
    text: str  # as it is written in the file
    value: Any  # value of `text`: a number, text, True, False, None, a list or a dict
    origin: str  # 'configs/a.yaml:3', 'override', 'default', 'preset gpt2', 'derived', ...; '' if the file has none


def value_of(settings: Iterable[Setting], key: str, default: Any = None) -> Any:
    """The value of a dotted key."""
    return next((setting.value for setting in settings if setting.key == key), default)


def parse_settings(text: str) -> tuple[list[Setting], list[str]]:
    """The settings in a `config.yaml`, and the notes in its header; none if it is not YAML."""
    lines = text.split('\n')
    notes = [line[2:] for line in lines[1:] if line.startswith('# ')]
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        settings = _settings(root, '', lines) if isinstance(root, yaml.MappingNode) else []
        names = option_names('model', value_of(settings, 'model.name', DEFAULTS['model']))
        return ([_with_name_of_today(setting, names) for setting in settings] if names else settings), notes
    except (yaml.YAMLError, ValueError, RecursionError):
        return [], notes


def _with_name_of_today(setting: Setting, names: Any) -> Setting:
    """A setting of pretrax 0.1, whose section `model` was flat, under the key of today."""
    section, _, key = setting.key.partition('.')
    name, dot, rest = key.partition('.')
    if section != 'model' or name not in names.RENAMED or (dot and name in names.SECTIONS):
        return setting
    return setting._replace(key=f'model.{names.RENAMED[name]}{dot}{rest}')


def _settings(node: yaml.MappingNode, prefix: str, lines: list[str]) -> list[Setting]:
    found = []
    for name, value in node.value:
        key = f'{prefix}{name.value}'
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            found += _settings(value, f'{key}.', lines)
            continue
        start, end = value.start_mark, value.end_mark
        written = '\n'.join(lines[start.line : end.line + 1])
        after = lines[end.line][end.column :]
        text = written[start.column : len(written) - len(after)]
        origin = after.partition('#')[2].strip()
        found.append(Setting(key, text, _value(value, text), origin))
    return found


def _value(node: yaml.Node, text: str) -> Any:
    loader = yaml.SafeLoader('')
    try:
        value = loader.construct_document(node)
    finally:
        loader.dispose()
    if isinstance(value, str) and value == text:  # YAML 1.1 reads 1e-05 as text
        try:
            return float(value)
        except ValueError:
            return value
    return value
