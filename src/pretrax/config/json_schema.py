"""The JSON Schema of configuration files, with which editors complete keys, describe them, and mark mistakes.

It accepts every file that `load` accepts, also with `extends` and `plugins`, and refuses unknown keys. pretrax checks
the rest, such as whether the batch fits the mesh, when it loads the file.
"""

import json
from collections.abc import Iterator
from typing import Any

from pydantic.json_schema import models_json_schema

from pretrax.config import registry
from pretrax.config.one_of import OneOf, merged_schema
from pretrax.config.schema import RunConfig

type Schema = dict[str, Any]

EXTENDS: Schema = {
    'anyOf': [{'type': 'string'}, {'type': 'array', 'items': {'type': 'string'}}],
    'description': 'files to start from, relative to this one; later ones win',
}
# Values that `load` takes for a section.
_MESH_AUTO: Schema = {'const': 'auto', 'description': 'pretrax chooses the axes; see `pretrax plan`'}
_NO_MODEL: Schema = {'type': 'null', 'description': 'the model of init_from'}
# A number may also be written '${batch.tokens}', '${oc.env:STEPS}' or 1_048_576, which are texts to JSON.
_NUMBER_AS_TEXT: Schema = {'type': 'string', 'pattern': r'\$\{|^[0-9][0-9_]*$'}


def json_schema() -> Schema:
    """The JSON Schema of a configuration file, with the options of every registered component."""
    options = {kind: {name: registry.options_model(kind, name) for name in registry.names(kind)} for kind in _KINDS}
    sections: dict[str, Any] = {kind: RunConfig.model_fields[kind].annotation for kind in _KINDS}
    models = [model for named in options.values() for own in named.values() for model in _models_of(own)]
    inlined: list[Any] = [RunConfig, *models]
    references, document = models_json_schema([(model, 'validation') for model in [*inlined, *sections.values()]])
    definitions: dict[str, Schema] = document['$defs']

    def name_of(model: Any) -> str:
        return references[model, 'validation']['$ref'].rpartition('/')[2]

    def options_schema(own: Any) -> Schema:
        schemas = [definitions[name_of(model)] for model in _models_of(own)]
        return merged_schema(schemas, definitions) if isinstance(own, OneOf) else schemas[0]

    run = definitions[name_of(RunConfig)]
    required = {'batch': definitions['Batch'].pop('required')}
    for kind, model in sections.items():
        section = definitions[name_of(model)]
        common = {key: value for key, value in section['properties'].items() if key not in ('name', 'options')}
        required[kind] = [key for key in section['required'] if key in common]
        # The default first: editors take it for a section without a name.
        ordered = sorted(options[kind].items(), key=lambda named: named[0] != registry.DEFAULTS[kind])
        choices = [_choice(kind, name, common, options_schema(own)) for name, own in ordered]
        definitions[name_of(model)] = {
            'description': section['description'],
            'anyOf': [*choices, _plugin_schema(kind, common)],
        }
    properties = {'extends': EXTENDS} | run['properties']
    for key, value in (('mesh', _MESH_AUTO), ('model', _NO_MODEL)):
        section = properties[key]
        reference, described = (
            {'$ref': section['$ref']},
            {name: text for name, text in section.items() if name != '$ref'},
        )
        properties[key] = {'anyOf': [reference, value]} | described
    by_kind = {kind: {name: options_schema(own) for name, own in options[kind].items()} for kind in _KINDS}
    named = {kind: {'properties': {'name': {'enum': registry.names(kind)}}} for kind in _KINDS}
    names_left_out = {'BaseModel', *map(name_of, inlined)}
    schema = {
        '$schema': 'https://json-schema.org/draft/2020-12/schema',
        'title': 'configuration of pretrax',
        'description': run['description'],
        'type': 'object',
        'additionalProperties': False,
        'properties': properties,
        'allOf': [
            _unless(['extends'], _needed([key for key in run['required'] if key != 'model'], required)),
            _unless(['extends', 'init_from'], {'required': ['model'], 'properties': {'model': {'type': 'object'}}}),
            _unless(['extends', 'plugins'], {'properties': named}),
        ],
        '$defs': {name: value for name, value in definitions.items() if name not in names_left_out},
    }
    for values in list(_properties(schema)):
        values |= {key: _number_or_text(value) for key, value in values.items()}
        for value in values.values():
            value.pop('title', None)  # the key again, in capitals
    complete = {kind: {'allOf': list(_complete(registry.DEFAULTS[kind], by_kind[kind]))} for kind in _KINDS}
    schema['allOf'].append(_unless(['extends'], {'properties': complete}))
    return schema


def json_schema_text() -> str:
    """The JSON Schema as the text of a file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + '\n'


_KINDS = tuple(registry.DEFAULTS)


def _models_of(options: Any) -> tuple[Any, ...]:
    return options.models if isinstance(options, OneOf) else (options,)


def _choice(kind: str, name: str, common: Schema, options: Schema) -> Schema:
    """A section with a registered component, and the options of this component."""
    named = {'const': name, 'description': registry.description(kind, name)}
    is_default = name == registry.DEFAULTS[kind]
    return {
        'type': 'object',
        'title': name,
        'additionalProperties': False,
        'properties': {'name': named | ({'default': name} if is_default else {})} | common | options['properties'],
    }


def _complete(default: str, options: dict[str, Schema]) -> Iterator[Schema]:
    """Requires the options that the component of a section needs, and refuses those of other components.

    A file that extends another one is not checked.
    """
    for name, own in options.items():
        if 'required' in own:
            is_named = {'required': ['name'], 'properties': {'name': {'const': name}}}
            yield {'if': is_named, 'then': {'required': own['required']}}
    others = {key for own in options.values() for key in own['properties']} - set(options[default]['properties'])
    of_default = {'required': options[default].get('required', []), 'properties': dict.fromkeys(sorted(others), False)}
    yield {'if': {'not': {'required': ['name']}}, 'then': of_default}


def _plugin_schema(kind: str, common: Schema) -> Schema:
    """A section with a component that is not registered here: any options."""
    name = {'type': 'string', 'not': {'enum': registry.names(kind)}, 'description': 'a component of a file in plugins'}
    return {'type': 'object', 'title': 'a plugin', 'properties': {'name': name} | common, 'required': ['name']}


def _needed(keys: list[str], below: dict[str, list[str]]) -> Schema:
    return {'required': keys, 'properties': {key: {'required': names} for key, names in below.items() if names}}


def _unless(keys: list[str], then: Schema) -> Schema:
    """`then`, for files with none of the keys."""
    return {'if': {'not': {'anyOf': [{'required': [key]} for key in keys]}}, 'then': then}


def _properties(schema: Any) -> Iterator[dict[str, Schema]]:
    """Every `properties` in a schema."""
    if isinstance(schema, dict) and isinstance(schema.get('properties'), dict):
        yield schema['properties']
    for below in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _properties(below)


def _number_or_text(schema: Schema) -> Schema:
    """A key that also takes a number in the form of a text, if it takes a number and no text."""
    choices = schema.get('anyOf', [schema])
    types = {choice.get('type') for choice in choices}
    if not types & {'integer', 'number'} or 'string' in types:
        return schema
    if 'anyOf' in schema:
        return schema | {'anyOf': [*choices, _NUMBER_AS_TEXT]}
    described = {key: schema[key] for key in ('description', 'default') if key in schema}
    plain = {key: value for key, value in schema.items() if key not in described}
    return {'anyOf': [plain, _NUMBER_AS_TEXT]} | described
