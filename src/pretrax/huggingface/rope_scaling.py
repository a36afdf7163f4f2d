"""The scaling of rotary positions in config.json: `rope_scaling`, or `rope_parameters` since transformers 5."""

from collections.abc import Callable, Mapping
from typing import Any

from pretrax.errors import UserError
from pretrax.huggingface.fields import Options, number, whole, wrong
from pretrax.model.rope_scaling import RopeScaling

ORIGINAL = 'original_max_position_embeddings'
_FIELDS = {'original_length': ORIGINAL, 'fraction': 'partial_rotary_factor'}  # other options have the name of the key
# The options of each kind -> their keys. `factor` is read apart.
_KEYS = {
    kind: {option: _FIELDS.get(option, option) for option in options.split()}
    for kind, options in {
        'linear': '',
        'llama3': 'low_freq_factor high_freq_factor original_length',
        'yarn': 'original_length beta_fast beta_slow truncate mscale mscale_all_dim attention_factor',
        'longrope': 'original_length short_factor long_factor attention_factor',
        'proportional': 'fraction',  # in no class but those whose `Rope.kinds` has it
    }.items()
}
KINDS = ('default', *(kind for kind in _KEYS if kind != 'proportional'))


def read_scaling(kind: str, rope: Mapping[str, Any], config: Mapping[str, Any], more: tuple[str, ...]) -> Options:
    """The options of a scaling.

    Args:
        kind: `rope_type`.
        rope: the keys of the scaling.
        config: config.json, with its defaults.
        more: other keys that may be there.

    Raises:
        UserError: a key is unknown, or has a value that it cannot have.
    """
    keys = _KEYS.get(kind, {})
    # older files keep the keys of another scaling
    known = {'factor', *more, *(name for names in _KEYS.values() for name in names.values())}
    if strange := sorted(set(rope) - known):
        raise UserError(f'config.json: rope_scaling has {", ".join(strange)[:80]}, which pretrax does not know')
    if kind == 'default':
        return {}
    said = dict(rope)
    if ORIGINAL in keys.values():
        said[ORIGINAL] = config.get(ORIGINAL, rope.get(ORIGINAL, config['max_position_embeddings']))
    options: Options = {'kind': kind}
    for option, name in keys.items():
        value = said.get(name)
        # transformers takes null and 0 for absent where it has a default
        if value is not None and not (value == 0 and option in ('beta_fast', 'beta_slow', 'mscale', 'mscale_all_dim')):
            options[option] = _READERS.get(option, number)(f'rope_scaling.{name}', value)
        elif kind == 'llama3' or option.endswith(('short_factor', 'long_factor')):
            raise wrong(f'rope_scaling.{name}', value, 'a value')
    for low, high in (('low_freq_factor', 'high_freq_factor'), ('beta_slow', 'beta_fast')):
        least, top = options.get(low, 1.0), options.get(high, 32.0)
        if low in keys and least > top:  # Llama 4 Scout and Kimi K2 have equal ones
            raise wrong(f'rope_scaling.{low}', least, f'at most {high}, {top:g}')
    options['factor'] = _factor(kind, said, config)
    return {'rope_scaling': options}


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The keys of a scaling; None: there is none."""
    if scaling is None:
        return None
    values = {theirs: getattr(scaling, ours) for ours, theirs in _KEYS[scaling.kind].items()}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    absent = {name for name, value in values.items() if value is None}
    return {'rope_type': scaling.kind, 'factor': scaling.factor} | {
        name: value for name, value in values.items() if name not in absent
    }


def _factor(kind: str, rope: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """The factor. yarn and longrope derive it from the two lengths if there is none; that of proportional is then 1."""
    factor = rope.get('factor', 1.0 if kind == 'proportional' else None)
    if factor is None and kind in ('yarn', 'longrope'):
        longest = whole('max_position_embeddings', config['max_position_embeddings'])
        return max(1.0, longest / whole(ORIGINAL, rope[ORIGINAL]))
    return number('rope_scaling.factor', factor, least=1.0, above=False)


def _switch(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(field, value, 'true or false')
    return value


def _divisors(field: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise wrong(field, value, 'a list of numbers, one for each pair of dimensions that rope rotates')
    return tuple(number(field, one) for one in value)


_READERS: dict[str, Callable[[str, Any], Any]] = {
    'original_length': whole,
    'truncate': _switch,
    'short_factor': _divisors,
    'long_factor': _divisors,
}
