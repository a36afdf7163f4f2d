"""The page of keys, from the schema of configurations, its effects, and the options of the components."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pretrax.config import effect_of, registry
from pretrax.config.registry import DEFAULTS
from pretrax.config.schema import RunConfig
from reference_maker.markdown import code, heading, prose, section_about, table

type Schema = dict[str, Any]

# The page that explains a section or a key; the longest beginning counts.
PAGE_OF = {
    '': 'configuration.md',
    'name': 'configuration.md#keys',
    'run_dir': 'files.md',
    'steps': 'configuration.md#keys',
    'seed': 'configuration.md#keys',
    'init_from': 'reliability.md#starting-from-another-run',
    'plugins': 'configuration.md#your-own-components',
    'model': 'models.md',
    'model.target': 'bring-your-model.md',
    'model.arguments': 'bring-your-model.md',
    'model.axes': 'bring-your-model.md',
    'model.flops_per_token': 'bring-your-model.md',
    'model.rope.scaling': 'models.md#rope-scaling',
    'model.mup': 'research.md',
    'model.save': 'numerics.md',
    'model.batch_parts': 'parallelism.md#t',
    'model.pipeline.rounds': 'parallelism.md#p',
    'model.pipeline.schedule': 'parallelism.md#p',
    'model.attention.context': 'parallelism.md#c',
    'model.attention.kernel': 'models.md#loss-and-computation',
    'distill': 'research.md#distillation',
    'distill.cache': 'research.md#offline',
    'data': 'data.md',
    'data.text': 'data.md#text',
    'data.validation': 'data.md#validation',
    'data.vocab_size': 'data.md#tokenizers',
    'data.filters': 'data.md#filters',
    'data.near_duplicates': 'data.md#near-duplicates',
    'data.mixture': 'data.md#mixtures',
    'data.exhausted': 'data.md#mixtures',
    'data.streaming': 'data.md#streaming',
    'data.hugging_face': 'data.md#text',
    'batch.micro': 'scaling.md#chosen-for-you',
    'batch': 'data.md#batches-that-grow',
    'schedule': 'configuration.md#optimizer-and-schedule',
    'optimizer': 'configuration.md#optimizer-and-schedule',
    **dict.fromkeys(('optimizer.groups', 'optimizer.freeze'), 'configuration.md#groups-of-weights'),
    'optimizer.ema_decay': 'configuration.md#moving-average-of-the-weights',
    'mesh': 'configuration.md#mesh',
    **{f'mesh.{axis}': f'parallelism.md#{axis}' for axis in 'rdectp'},
    'precision': 'numerics.md',
    'precision.matmul': 'numerics.md#products-in-eight-bits',
    'precision.reduction': 'numerics.md#gradients-between-devices',
    'memory': 'numerics.md#state',
    'compiler': 'scaling.md',
    'checkpoint': 'reliability.md#checkpoints',
    'faults': 'reliability.md',
    'faults.lease_seconds': 'storage.md#runs-in-a-bucket',
    'processes': 'reliability.md#several-processes',
    'storage': 'storage.md',
    'storage.endpoint': 'storage.md#credentials-and-endpoints',
    'storage.region': 'storage.md#credentials-and-endpoints',
    'storage.profile': 'storage.md#credentials-and-endpoints',
    'eval': 'evaluation.md#in-training',
    'log': 'see.md',
    'log.every': 'metrics.md',
    'log.stall_seconds': 'data.md#batches',
    'log.noise_scale': 'research.md#gradient-noise-scale',
    'log.profile_on_slow': 'see.md#slow-steps',
    'log.notify': 'see.md#notifications',
    'sample': 'files.md#what-it-reports',
}
EXTENDS_SCHEMA: Schema = {
    'anyOf': [{'type': 'string'}, {'type': 'array', 'items': {'type': 'string'}}],
    'description': 'files to start from, relative to this one; later ones win',
}
CHANGES = {  # (Effect.on, Effect.resumable): the cell
    ('step', False): 'new run: step',
    ('input', False): 'new run: input',
    ('step', True): 'resumes: step',
    ('nothing', False): 'new run',
    ('nothing', True): 'resumes',
}
INTRODUCTION = """\
# Keys

Every key of a configuration file. Those without a component are defined in `src/pretrax/config/schema.py`.
[Configuration](../configuration.md) explains how files are read. `pretrax config schema` prints the same for an editor,
and with `--plugin FILE` also the options of your own components.

The column *change* says what another value does to a run that has a checkpoint:

- **resumes**: the run resumes with the new value. With *step*, its training step is compiled again.
- **new run**: the run does not resume with another value, because it would not continue the same training. Write
  another `name`, or resume with `--allow-changes`. *step*: the compiled step depends on the value. *input*: the batches
  or the initial weights do.

`NAME[].KEY` is a key of each item of the list `NAME`. *or null* means that the value may be left empty; what `null`
means is in the description.
"""


class Row(NamedTuple):
    """A key: its dotted name, its JSON Schema, and the named schemas that this may refer to."""

    key: str
    schema: Schema
    definitions: Schema
    is_required: bool


def page() -> str:
    """The whole page."""
    run = RunConfig.model_json_schema()
    definitions = run['$defs']
    plain, sections = [Row('extends', EXTENDS_SCHEMA, {}, False)], []
    for row in _rows('', run, definitions):
        inner = _section(row.schema, definitions)
        if inner is None or row.key == 'init_from':
            plain += _with_keys_below(row)
            continue
        page = PAGE_OF.get(row.key, PAGE_OF['']).partition('#')[0]
        text = ' '.join(inner.get('description', '').split()).partition('; see ')[0].rstrip('.')
        sections += [f'## `{row.key}`\n', f'{prose(text)}. See {_link_to(page)}.\n']
        if row.key in DEFAULTS:
            sections += _components(row.key, inner, definitions)
        else:
            sections.append(_table(_rows_below(row.key, inner, definitions)))
    return '\n'.join([INTRODUCTION, '## Run\n', _table(plain), *sections])


def link(key: str) -> str:
    """A link to the section that explains a key; to its page, if no section mentions it."""
    plain = key.replace('[]', '')
    page = PAGE_OF[max((start for start in PAGE_OF if start == '' or f'{plain}.'.startswith(f'{start}.')), key=len)]
    if '#' in page:
        return _link_to(page)
    section, _, below = plain.partition('.')
    names = [below, plain.rpartition('.')[2]] if section in DEFAULTS else []
    target = section_about(page, plain, *names)
    return _link_to(target or page)


def _link_to(target: str) -> str:
    """A link from a page of the reference, with the heading that it leads to."""
    return f'[{heading(target)}](../{target})'


def type_in_words(schema: Schema, definitions: Schema) -> str:
    """What a value may be: 'integer, at least 1; or null'."""
    if '$ref' in schema:
        target = definitions[schema['$ref'].rpartition('/')[2]]
        return 'keys below' if 'properties' in target else type_in_words(target, definitions)
    if 'const' in schema:
        return code(str(schema['const']))
    if 'enum' in schema:
        *first, last = [code(str(value)) for value in schema['enum']]
        return f'{", ".join(first)} or {last}' if first else last
    if 'anyOf' in schema:
        words = [type_in_words(one, definitions) for one in schema['anyOf'] if one.get('type') != 'null']
        has_null = len(words) < len(schema['anyOf'])
        return ' or '.join([*dict.fromkeys(words), *(['null'] if has_null else [])])
    if 'properties' in schema:
        return 'keys below'
    kind = schema.get('type')
    if kind == 'array':
        if 'prefixItems' in schema:
            return f'[{", ".join(type_in_words(one, definitions) for one in schema["prefixItems"])}]'
        return f'list of {type_in_words(schema.get("items", {}), definitions)}'
    if kind == 'object':
        return f'mapping of names to {type_in_words(_values(schema), definitions)}'
    name = {'string': 'text', 'boolean': 'true or false', None: 'any value', 'null': 'null'}.get(kind, str(kind))
    return name + _range(schema)


def _values(schema: Schema) -> Schema:
    values = schema.get('additionalProperties')
    return values if isinstance(values, dict) else {}


def _range(schema: Schema) -> str:
    low = f'at least {schema["minimum"]}' if 'minimum' in schema else None
    low = f'above {schema["exclusiveMinimum"]}' if 'exclusiveMinimum' in schema else low
    high = f'at most {schema["maximum"]}' if schema.get('maximum', 2**31 - 1) != 2**31 - 1 else None
    high = f'below {schema["exclusiveMaximum"]}' if 'exclusiveMaximum' in schema else high
    words = [word for word in (low, high) if word]
    return f' {" and ".join(words)}' if words else ''


def _components(kind: str, section: Schema, definitions: Schema) -> Iterator[str]:
    """The tables of a section that chooses a component: its common keys, then those of each component."""
    names = {
        'anyOf': [{'const': name} for name in registry.names(kind)],
        'default': DEFAULTS[kind],
        'description': 'the component; a plugin may register more',
    }
    common = {key: value for key, value in section['properties'].items() if key not in ('name', 'options')}
    required = [key for key in section['required'] if key in common]
    own = {'properties': {'name': names} | common, 'required': required}
    yield _table(_rows_below(kind, own, definitions))
    for name in sorted(registry.names(kind), key=lambda name: name != DEFAULTS[kind]):
        options = registry.options_model(kind, name).model_json_schema()
        yield f'### `{kind}.name: {name}`\n'
        yield f'{prose(registry.description(kind, name))} Defined in `{_origin(kind, name)}`.\n'
        rows = list(_rows_below(kind, options, options.get('$defs', {})))
        yield _table(rows) if rows else 'It has no options.\n'


def _origin(kind: str, name: str) -> str:
    """The file that defines the options of a component of pretrax."""
    entry = registry._components[kind][name]
    module = str(entry.options or entry.factory).partition(':')[0]
    return f'src/{module.replace(".", "/")}.py'


def _rows(prefix: str, section: Schema, definitions: Schema) -> Iterator[Row]:
    """The keys of a section, without those below them."""
    for name, schema in section.get('properties', {}).items():
        yield Row(f'{prefix}.{name}'.lstrip('.'), schema, definitions, name in section.get('required', ()))


def _rows_below(prefix: str, section: Schema, definitions: Schema) -> Iterator[Row]:
    for row in _rows(prefix, section, definitions):
        yield from _with_keys_below(row)


def _with_keys_below(row: Row) -> Iterator[Row]:
    """The key, unless it is always a section; the keys of the section; those of each item of a list."""
    inner = _section(row.schema, row.definitions)
    if inner is None or 'anyOf' in row.schema:
        yield row
    if inner is not None:
        yield from _rows_below(row.key, inner, row.definitions)
    for one in (row.schema, *row.schema.get('anyOf', ())):
        item = _section(one.get('items', {}), row.definitions)
        if item is not None:
            own = ('name', 'weight') if row.key == 'data.mixture' else tuple(item['properties'])  # the rest is above
            item = item | {'properties': {key: item['properties'][key] for key in own}}
            yield from _rows_below(f'{row.key}[]', item, row.definitions)


def _section(schema: Schema, definitions: Schema) -> Schema | None:
    """The section that a schema refers to, alone or besides null and text; None if it refers to none."""
    for one in (schema, *schema.get('anyOf', ())):
        found = definitions.get(one.get('$ref', '').rpartition('/')[2], one)
        if 'properties' in found:
            return found
    return None


def _table(rows: Iterable[Row]) -> str:
    return table(('key', 'type', 'default', 'meaning', 'change'), [_cells(row) for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    meaning = f'{prose(row.schema.get("description", ""))} ({link(row.key)})'
    words = type_in_words(row.schema, row.definitions)
    return code(row.key), words, _default(row), meaning, _change(row.key)


def _default(row: Row) -> str:
    if row.is_required:
        return 'required'
    if row.key == 'run_dir':
        return '`runs/<name>`'
    return code(json.dumps(row.schema['default'], ensure_ascii=False)) if 'default' in row.schema else ''


def _change(key: str) -> str:
    if key == 'extends':  # it is read before the configuration is
        return ''
    effect = effect_of(key)
    return CHANGES[effect.on, effect.resumable]
