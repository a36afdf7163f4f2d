"""Tables that are YAML files of pretrax, such as the presets of models."""

from pathlib import Path
from typing import Any


def read_table(path: Path) -> Any:
    """The content of a YAML file that is part of pretrax. The caller keeps it."""
    import yaml  # a machine that only computes need not have it

    loader = getattr(yaml, 'CSafeLoader', yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml
    return yaml.load(path.read_text(encoding='utf-8'), loader)
