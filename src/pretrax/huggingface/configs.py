"""Converts between Hugging Face's config.json and pretrax's model options, with one table per family. Imports no JAX.

A table is a list of fields, from configs.yaml. Each field can be read into options and written from an architecture. A
field of config.json that no table row mentions is rejected by name, unless it is harmless (harmless.py): nothing is
dropped silently. A field that is absent has the default of transformers (defaults.yaml).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrax.errors import UserError, first_line
from pretrax.huggingface.deepseek import DeepSeekExperts, ExtraLayers, LatentAttention
from pretrax.huggingface.fields import (
    Cap,
    Enumerated,
    Experts,
    Field,
    Lacking,
    Number,
    OfEveryLayer,
    Options,
    SameAs,
    Size,
    Unused,
    number,
    whole,
    wrong,
)
from pretrax.huggingface.gemma4 import GlobalLayers
from pretrax.huggingface.harmless import DROPOUT_FIELDS, dropout_options, is_harmless
from pretrax.huggingface.layers import DeltaLayers, Expansion, NoPositions, Rope, Windows
from pretrax.huggingface.llama4 import ChunkedLayers, InterleavedExperts
from pretrax.huggingface.quantized import check_quantization
from pretrax.huggingface.text_part import text_config
from pretrax.model.architecture import KEYS, Architecture, keys_that_change, resolve
from pretrax.model.choices import TransformerOptions
from pretrax.model.option_names import nest
from pretrax.tables import read_table


@dataclass(frozen=True)
class ConfigTable:
    """A family in Hugging Face: its model type, its class and its fields.

    Args:
        family: the pretrax family whose options the fields override.
        names: key of its table of names in `names.TABLES`.
    """

    model_type: str
    architecture: str
    family: str
    names: str
    fields: tuple[Field, ...]


# Rows with one field, by kind: they get the field and the value of the kind
_OF_ONE_FIELD: dict[str, Callable[..., Field]] = {
    'size': Size,
    'number': Number,
    'values': Enumerated.from_values,
    'switch': Enumerated.switch,
    'only': Enumerated.only,
    'cap': Cap,
    'same_as': SameAs,
    'of_every_layer': OfEveryLayer,
    'lacking': Lacking,
}
# Rows with several fields, by name
_OF_FIELDS: dict[str, Callable[..., Field]] = {
    'rope': Rope,
    'windows': Windows,
    'no_positions': NoPositions,
    'experts': Experts,
    'latent_attention': LatentAttention,
    'deepseek_experts': DeepSeekExperts,
    'extra_layers': ExtraLayers,
    'delta_layers': DeltaLayers,
    'expansion': Expansion,
    'chunked_layers': ChunkedLayers,
    'interleaved_experts': InterleavedExperts,
    'global_layers': GlobalLayers,
}


def _row(name: str, written: Any) -> Field:
    """A row of configs.yaml."""
    if name == 'unused':
        return Unused(written)
    if name in _OF_FIELDS:
        return _OF_FIELDS[name](**written)
    kind, value = ('size', written) if isinstance(written, str) else next(iter(written.items()))
    more = {key: one for key, one in written.items() if key != kind} if isinstance(written, dict) else {}
    return _OF_ONE_FIELD[kind](name, value, **more)


def _table(model_type: str, written: Mapping[str, Any]) -> ConfigTable:
    rows: dict[str, Any] = {}
    for group in written['groups']:
        rows |= _WRITTEN['groups'][group]
    rows |= written.get('fields', {})
    family, fields = written['family'], tuple(_row(*row) for row in rows.items())
    return ConfigTable(model_type, written['class'], family, written.get('names', family), fields)


_WRITTEN = read_table(Path(__file__).with_suffix('.yaml'))
BY_TYPE = {model_type: _table(model_type, written) for model_type, written in _WRITTEN['families'].items()}
# Known types of models that cannot be imported, with the parts that the decoder lacks
REFUSED: dict[str, str] = _WRITTEN['refused']
# Options that may differ if the mixers and windows of all layers are the same
_LAYER_TYPES = ('attention.window', 'attention.global_every', 'layer_types')
# The values of fields that a config.json leaves out, per model type
DEFAULTS: dict[str, dict[str, Any]] = {
    name: fields
    for name, fields in read_table(Path(__file__).with_name('defaults.yaml')).items()
    if not name.startswith('_')
}
_STORED_IN_ANOTHER_FORM = ('attention.query_pre_attn_scalar', 'head.multiplier')
LARGE_BALANCE = 0.1  # gpt-oss has 0.9
# Options that may differ because they do not affect the forward pass.
NOT_COMPUTED = keys_that_change('training')


def table_of(config: Mapping[str, Any]) -> ConfigTable:
    """The table for a config.json. Raises UserError if the family is not supported."""
    kind = text_config(config).get('model_type')
    kind = _WRITTEN['same_class'].get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in BY_TYPE:
        classes = config.get('architectures')
        named = ', '.join(map(str, classes))[:80] if isinstance(classes, list) and classes else 'none named'
        why = f': it has {REFUSED[str(kind)]}' if str(kind) in REFUSED else ''
        raise UserError(
            f"config.json: model_type is '{str(kind)[:80]}' (architectures: {named}), which pretrax does not "
            f'support{why}\n'
            f'supported: {", ".join(sorted(BY_TYPE))}'
        )
    return BY_TYPE[kind]


def read_options(config: Mapping[str, Any]) -> tuple[Options, list[str]]:
    """The options for a config.json, and notes for the user.

    Raises:
        UserError: the family has no table, no row knows a field, or a field has a value that it cannot have; the
            message names it.
    """
    table, config = table_of(config), text_config(config)
    check_quantization(config)
    known = {name for field in table.fields for name in field.fields} | {'quantization_config'}
    strange = [name for name, value in config.items() if name not in known and not is_harmless(name, value)]
    if strange:
        said = ', '.join(f'{name[:60]} ({str(config[name])[:60]})' for name in strange[:5])
        raise UserError(
            f'config.json has fields that pretrax does not know for {table.model_type}: {said}\n'
            'they may change what the model computes, so the model is not imported\n'
            'if they do not, remove them from config.json'
        )
    values = DEFAULTS[table.model_type] | _without_aliases(config, table)
    options: Options = {'family': table.family}
    for field in table.fields:
        options |= field.read(values)
    return options, [*_notes(options, values), *_notes_on_dropout(config, table.model_type)]


def _without_aliases(config: Mapping[str, Any], table: ConfigTable) -> dict[str, Any]:
    """The configuration with every field under its first name."""
    values = dict(config)
    for field in table.fields:
        alias = getattr(field, 'alias', None)
        if alias in values:
            value = values.pop(alias)
            if values.setdefault(field.fields[0], value) != value:
                raise wrong(alias, value, f'the value of {field.fields[0]}, {values[field.fields[0]]!r:.80}')
    return values


def _notes(options: Options, config: Mapping[str, Any]) -> list[str]:
    """Notes on extra layers, which are left out, and on a load-balance loss far above those of published recipes."""
    notes = []
    for field in ('num_nextn_predict_layers', 'num_mtp_modules'):
        if extra := config.get(field):
            notes.append(
                f'{field} = {whole(field, extra)} of config.json: {extra} more layer{
                    "s" * (extra > 1)
                } for multi-token '
                'prediction, left out (init_from reads as many as model.multi_token.n_layers says)'
            )
    if options.get('experts.router.balance_loss', 0.0) >= LARGE_BALANCE:
        notes.append(
            f'the load-balance loss has the weight {options["experts.router.balance_loss"]:g} of config.json in '
            'continued training; published recipes have 0.0001 to 0.01 (model.experts.router.balance_loss)'
        )
    return notes


def _notes_on_dropout(config: Mapping[str, Any], model_type: str) -> list[str]:
    notes = []
    for name in DROPOUT_FIELDS:
        value = config.get(name)
        if value is not None and number(name, value, above=False):
            options = ' '.join(f'model.{option}={value}' for option in dropout_options(model_type).get(name, ()))
            how = f'to train with it, use {options}' if options else 'pretrax has nothing like it'
            notes.append(f'{name} = {value} of config.json is not applied; {how}')
    return notes


def write_config(arch: Architecture, family: str | None = None) -> tuple[dict[str, Any], ConfigTable]:
    """The config.json for an architecture, and the Hugging Face family that computes it.

    Args:
        arch: the architecture of the decoder.
        family: the pretrax family to try first.

    Raises:
        UserError: no family computes this architecture; the message names the nearest one and the differences.
    """
    nearest: tuple[int, str, dict[str, str]] | None = None
    for table in sorted(BY_TYPE.values(), key=lambda table: table.family != family):
        config = {'architectures': [table.architecture], 'model_type': table.model_type}
        for field in table.fields:
            config |= field.write(arch)
        try:
            options, _ = read_options(config)
            back = resolve(TransformerOptions(**nest(options)), arch.vocab_size, arch.max_sequence_length)
            differences = compare(back, arch, 'in the class', 'here')
        except (UserError, ValueError) as error:  # the family does not allow these sizes
            differences = {'': first_line(error)}
        if not differences:
            return config, table
        if nearest is None or len(differences) < nearest[0]:
            nearest = len(differences), table.architecture, differences
    assert nearest is not None
    said = '; '.join(f'{name}: {what}' if name else what for name, what in nearest[2].items())
    raise UserError(
        f'no class of transformers computes this architecture; the nearest is {nearest[1]}, but\n  {said}\n'
        'to export, train with the options of one family'
    )


def _rounded(one: Architecture, other: Architecture, option: str) -> bool:
    """Whether a number that a class stores in another form, such as its inverse, is the same up to rounding."""
    if option == 'attention.query_pre_attn_scalar':
        a, b = (arch.attention.query_pre_attn_scalar or arch.attention.d_query for arch in (one, other))
    else:
        a, b = one.option(option), other.option(option)
    return option in _STORED_IN_ANOTHER_FORM and math.isclose(a, b, rel_tol=1e-12)


def compare(one: Architecture, other: Architecture, of_one: str, of_other: str) -> dict[str, str]:
    """The options by which two architectures compute different results, as text."""
    found = {}
    same = {*NOT_COMPUTED}
    if _mixers(one) == _mixers(other):
        same |= {*_LAYER_TYPES}
    if [kind.experts for kind in one.kinds] == [kind.experts for kind in other.kinds]:
        same |= {'experts.dense_layers', 'experts.every'}
    if one.experts.router.n_groups == other.experts.router.n_groups == 1:
        same |= {'experts.router.group_scores'}
    for key in KEYS:
        a, b = one.option(key), other.option(key)
        if a != b and key not in same and not _rounded(one, other, key):
            found[key] = f'{a} {of_one}, {b} {of_other}'
    return found


def _mixers(arch: Architecture) -> list[tuple[str, int, bool]]:
    """The mixer of each layer, its window, and whether it has rotary positions."""
    return [(kind.mixer, kind.window, kind.rope_base is not None) for kind in arch.kinds]
