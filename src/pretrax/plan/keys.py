"""How a plan treats each key of a configuration that may change the compiled step: see `keys.yaml`."""

import functools
from pathlib import Path
from typing import Any

from pretrax.config import RunConfig
from pretrax.model.choices import DEFAULTS, TransformerOptions, choose
from pretrax.tables import read_table


@functools.cache
def treatments() -> dict[str, dict[str, str]]:
    """{treatment: {dotted key: reason}}. The treatments are 'modelled', 'no_effect' and 'left_out'."""
    table = read_table(Path(__file__).with_name('keys.yaml'))
    table['modelled'] = {'': table['modelled']}
    return {
        treatment: {key: reason for reason, keys in by_reason.items() for key in keys.split()}
        for treatment, by_reason in table.items()
    }


def keys_left_out(config: RunConfig) -> list[str]:
    """The keys that a prediction leaves out and whose value, also from a preset or family, is not the default."""
    options = config.model.options
    values, defaults = {}, {}
    if isinstance(options, TransformerOptions):
        values, defaults = choose(options.dotted()), TransformerOptions.model_construct().dotted() | DEFAULTS

    def is_set(key: str) -> bool:
        section, _, name = key.partition('.')
        if section == 'model':
            return (values.get(name) or None) != (defaults.get(name) or None)
        return bool(_value(config, key))

    return [key for key in treatments()['left_out'] if is_set(key)]


def _value(config: Any, key: str) -> Any:
    """The value of a dotted key, or None if its section is None."""
    for name in key.split('.'):
        config = getattr(config, name, None)
    return config
