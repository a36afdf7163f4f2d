"""Tables that are YAML files of pretrax, such as the presets of models, and tables with dotted keys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_table(path: Path) -> Any:
    """The content of a YAML file that is part of pretrax. The caller keeps it."""
    import yaml  # a machine that only computes need not have it

    loader = getattr(yaml, 'CSafeLoader', yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml
    return yaml.load(path.read_text(encoding='utf-8'), loader)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """{'batch.tokens': 1} -> {'batch': {'tokens': 1}}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        section = found
        *parents, last = key.split('.')
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return found
