"""Published models: the options of each preset, by dotted key, from presets.yaml. No JAX here."""

from pathlib import Path
from typing import Any

import yaml

from pretrax.model.option_names import dotted


def _read_presets() -> dict[str, dict[str, Any]]:
    loader = getattr(yaml, 'CSafeLoader', yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml
    table = yaml.load(Path(__file__).with_suffix('.yaml').read_text(), loader)
    return {name: dotted(section) for name, section in table.items()}


PRESETS = _read_presets()
