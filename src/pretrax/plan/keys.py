"""How a plan treats each key of a configuration that may change the compiled step: see `keys.yaml`."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrax.config import RunConfig
from pretrax.model.choices import DEFAULTS, TransformerOptions, choose
from pretrax.model.families import families
from pretrax.tables import read_table


@functools.cache
def treatments() -> dict[str, dict[str, str]]:
    """{treatment: {dotted key: reason}}. The treatments are 'modelled', 'no_effect', 'free' and 'left_out'."""
    table = read_table(Path(__file__).with_name('keys.yaml'))
    table['modelled'] = {'': table['modelled']}
    return {
        treatment: {key: reason for reason, keys in by_reason.items() for key in keys.split()}
        for treatment, by_reason in table.items()
    }


def keys_left_out(config: RunConfig) -> list[str]:
    """The keys that a prediction leaves out or counts as free, and whose value, also from a preset or family, is not
    the default. A key of which only one value is listed has the form KEY=VALUE.
    """
    options, defaults = config.model.options, {}
    values: Mapping[str, Any] = {}
    if isinstance(options, TransformerOptions):
        values = choose(options.dotted())
        defaults = TransformerOptions.model_construct().dotted() | DEFAULTS | families()['llama']

    def is_set(entry: str) -> bool:
        key, _, only = entry.partition('=')
        section, _, name = key.partition('.')
        if section == 'model':
            value, default = _option(values, name), _option(defaults, name)
        else:
            value, default = _value_and_default(config, key)
        return str(value) == only if only else (value or None) != (default or None)

    return [key for treatment in ('left_out', 'free') for key in treatments()[treatment] if is_set(key)]


def left_out_lines(keys: list[str]) -> list[str]:
    """The lines of a plan that name keys of `keys_left_out`."""
    free = [key for key in keys if key in treatments()['free']]
    named = {'not in the prediction': [key for key in keys if key not in free], 'counted as free': free}
    return [f'    set, but {what}: {", ".join(which)}' for what, which in named.items() if which]


def _option(options: Mapping[str, Any], name: str) -> Any:
    """An option of the model, which may be an attribute of another one."""
    if name in options or '.' not in name:
        return options.get(name)
    section, _, last = name.rpartition('.')
    return getattr(_option(options, section), last, None)


def _value_and_default(config: RunConfig, key: str) -> tuple[Any, Any]:
    """The value of a dotted key, and its default; None for a key that the configuration cannot have."""
    *sections, name = key.split('.')
    holder = functools.reduce(lambda place, section: getattr(place, section, None), sections, config)
    if name not in getattr(type(holder), 'model_fields', ()):
        holder = getattr(holder, 'options', None)
    fields = getattr(type(holder), 'model_fields', {})
    return (getattr(holder, name), fields[name].default) if name in fields else (None, None)
