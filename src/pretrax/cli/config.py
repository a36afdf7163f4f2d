"""`pretrax config show|schema|diff`: a configuration as pretrax understands it. Nothing is trained."""

import json
from pathlib import Path

from pretrax.config import ABSENT, json_schema, load, load_plugin, resolved_yaml
from pretrax.config import diff as differences


def show(path: str, overrides: list[str]) -> None:
    """Prints the resolved YAML, each value with its origin."""
    print(resolved_yaml(load(path, overrides)), end='')


def schema(plugins: list[str]) -> None:
    """Prints the JSON Schema of configuration files, for editors and generators."""
    for plugin in plugins:
        load_plugin(plugin, Path())
    print(json.dumps(json_schema(), indent=2))


def diff(old: str, new: str) -> None:
    """Prints the keys that differ."""
    changes = differences(load(old), load(new))
    for key, before, after in changes:
        print(f'{key}: {_shown(before)} -> {_shown(after)}')
    if not changes:
        print('no differences')


def _shown(value: object) -> str:
    return str(value) if value is ABSENT else json.dumps(value, ensure_ascii=False)
