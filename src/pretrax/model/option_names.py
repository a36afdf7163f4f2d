"""The names that pretrax 0.1 had for the decoder's options, whose section `model:` was flat. No JAX here.

A configuration writes `model.attention.window`, or in dotted tables 'attention.window'. Version 0.1 wrote
`model.window`. `RENAMED` has every name that differs.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pretrax.model.options.attention import LatentOptions
from pretrax.model.options.decoder import DecoderOptions, ExecutionOptions

_DECLARED = DecoderOptions.declarations() | ExecutionOptions.declarations()
SECTIONS = tuple({section: None for key in _DECLARED if (section := key.rpartition('.')[0])})
# Former name -> dotted key below `model`. Names that are not here are the same.
RENAMED = {
    declared.former or key.rpartition('.')[2]: key
    for key, declared in _DECLARED.items()
    if '.' in key and declared.former is not None
}


def is_former(name: str, value: Any) -> bool:
    """Whether a key of `model:` with this value is one of pretrax 0.1.

    `attention`, `norm` and `init` were options, and are sections now. A mapping is a section; anything else is the
    option.
    """
    return name in RENAMED and not (name in SECTIONS and isinstance(value, Mapping))


def nest(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with dotted keys or former names, as the section `model:`. Keys that are nested already stay."""
    nested: dict[str, Any] = {}
    for path, value in _paths(options, ''):
        node = nested
        *sections, last = path.split('.')
        for section in sections:
            below = node.get(section)
            node[section] = node = below if isinstance(below, dict) else {}
        node[last] = value
    return nested


def dotted(section: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the section `model:` by dotted key, the inverse of `nest`. A null `latent` is a `kv_rank` of 0."""
    options = dict(_paths(section, ''))
    if options.get('attention.latent', 0) is None:
        del options['attention.latent']
        options |= dict.fromkeys(f'attention.latent.{name}' for name in LatentOptions.model_fields) | {
            'attention.latent.kv_rank': 0
        }
    return options


def _paths(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The dotted key below `model` and the value of every option; a section without options has its own path."""
    for key, value in values.items():
        path = f'{prefix}{key}'
        if path in SECTIONS and isinstance(value, Mapping):
            yield from _paths(value, f'{path}.')
        else:
            yield path if prefix else RENAMED.get(key, key), value
